"""Install compilers and the emulator for tests of other processors' kernels, and the browser for pages (`make test-data`).

By apt-get, where there is one and its user is root. Elsewhere those tests are skipped and name the packages.
"""

import os
import platform
import shutil
import subprocess
import sys

# Programs, and Debian's packages that have them.
PACKAGES = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "clang++": "clang",
    "chromium": "chromium",
}


def missing(*programs: str) -> str | None:
    """Why something cannot be compiled or run, or None."""
    gone = [program for program in programs if shutil.which(program) is None]
    packages = " ".join(PACKAGES.get(program, program) for program in gone)
    return f"{', '.join(gone)} not found; Debian's packages: {packages}" if gone else None


def can_install() -> bool:
    return platform.machine() == "x86_64" and shutil.which("apt-get") is not None and os.geteuid() == 0


def are_required() -> bool:
    """Under CI, where they can be had, a missing one is a failure."""
    return os.environ.get("DIFFTRANSFORMER_CI") == "1" and can_install()


def main() -> int:
    """One line; 1 where they are required and cannot be installed."""
    if missing(*PACKAGES) and can_install():
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "check": False}
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=environment, **quiet)
        words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES.values()]
        subprocess.run(words, env=environment, **quiet)
    problem = missing(*PACKAGES)
    print(f"compilers for other processors, and a browser: {problem or 'found'}")
    return int(problem is not None and are_required())


if __name__ == "__main__":
    sys.exit(main())

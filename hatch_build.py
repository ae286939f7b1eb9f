"""Writes the wheel and the source package; the wheel has the CPU kernels built ahead (`make dist`).

`python hatch_build.py FOLDER` builds the kernels for every instruction set of this machine's architecture and lets hatchling
pack them, by the hook below. The hook adds nothing on its own: `pip install .` and `python -m build` make a wheel for any
machine, whose kernels are built on first use. Without a compiler this program does the same, and says so.
"""

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Tells the hook the folder of the libraries.
VARIABLE = "DIFFTRANSFORMER_PREBUILT"
# By the newest symbols GLIBCXX_3.4.N that a library asks for: the first glibc 2.M whose distributions all have them.
GLIBC_OF = {24: 28, 28: 31, 29: 34, 30: 35}


class PrebuiltKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get(VARIABLE)
        libraries = sorted(Path(folder).glob("*.so")) if folder else []
        if libraries and version == "standard":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(path.read_bytes() for path in libraries)}"
            build_data["force_include"] |= {
                str(path): f"difftransformer/ops/prebuilt/{path.name}" for path in libraries
            }


def platform_tag(libraries: Iterable[bytes]) -> str:
    """The oldest systems that libraries run on, as wheels name them."""
    whole = b"".join(libraries)
    glibc = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", whole)]
    newest = max((int(minor) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", whole)), default=0)
    by_library = [minor for symbols, minor in GLIBC_OF.items() if symbols >= newest]
    if not glibc or not by_library:
        return re.sub("[-.]", "_", sysconfig.get_platform())
    return f"manylinux_2_{max(*glibc, by_library[0])}_{platform.machine()}"


def main() -> int:
    from difftransformer.errors import BackendUnavailable
    from difftransformer.ops import build, processor

    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for isa in processor.of_architecture():
                print(f"building the CPU kernels for {isa}")
                build.build_ahead(isa, Path(folder) / f"{isa}.so")
        except BackendUnavailable as error:
            if "no C++ compiler" not in str(error):
                print(f"hatch_build: {error}", file=sys.stderr)
                return 1
            print(f"the wheel is without CPU kernels, which are built on first use: {error}")
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
        return subprocess.run(
            command, cwd=Path(__file__).parent, env=os.environ | {VARIABLE: folder}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())

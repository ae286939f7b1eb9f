"""Peak memory: of this process, or of a command, in MiB to a file: python peak_memory.py FILE COMMAND ..."""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

LINUX = Path("/proc/self/clear_refs").exists()


def resident(peak=False):
    """Bytes of memory that this process has now, or had at most since `forget_peak`; on Linux."""
    name = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def forget_peak():
    """Count the peak of `resident` from now."""
    Path("/proc/self/clear_refs").write_text("5")


def return_freed_memory():
    """From now on, give blocks of 64 KiB and more back to the system as soon as they are freed; with glibc."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD, which otherwise grows with what is freed


def main(file, *command):
    """Return the exit status of the command."""
    status = subprocess.run(command, check=False).returncode
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)
    with open(file, "a") as lines:
        lines.write(f"{peak} {' '.join(command)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run a command and append its peak memory in MiB to a file: python peak_memory.py FILE COMMAND ..."""

import resource
import subprocess
import sys


def main(file, *command):
    """Return the exit status of the command."""
    status = subprocess.run(command, check=False).returncode
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)
    with open(file, "a") as lines:
        lines.write(f"{peak} {' '.join(command)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

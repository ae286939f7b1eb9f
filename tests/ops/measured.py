"""Runs a command and appends the peak of its memory, in MiB, to a file: python measured.py FILE COMMAND ..."""

import resource
import subprocess
import sys

status = subprocess.run(sys.argv[2:], check=False).returncode
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)
with open(sys.argv[1], "a") as file:
    file.write(f"{peak} {' '.join(sys.argv[2:])}\n")
sys.exit(status)

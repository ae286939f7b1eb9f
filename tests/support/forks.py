"""Run the command many times in little time: a process that has imported the package forks once for each command line.

`ForkServer.run` gives what a user would see: exit status, standard output and standard error. Each command gets its own
folder, MEMORY_BYTES beyond what the server has, and SECONDS of CPU; past these it is killed, with status -9.
"""

# ruff: noqa: SIM115

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 10  # of CPU, after which a command is killed
WAITING_SECONDS = 60  # after which one is that waits for something
MEMORY_BYTES = 4 * 2**30  # that a command may take beyond what the server has


@dataclass
class Case:
    """A command line in a folder, with what it reads on standard input."""

    name: str
    words: list[str]
    folder: str
    stdin: str = ""
    environment: dict = field(default_factory=dict)


@dataclass
class Outcome:
    """What a command left: its exit status, what it printed, and how long it took."""

    case: Case
    status: int
    out: str
    err: str
    seconds: float

    def faults(self):
        """What is wrong with it, or nothing: a status of our own, no traceback, one line for an error, nothing raw."""
        found = []
        if self.status not in (0, 2, 130):
            found.append(f"status {self.status}")
        if "Traceback" in self.out + self.err:
            found.append("traceback")
        lines = [line for line in self.err.splitlines() if ": missing: " not in line]  # what a suite had to leave out
        if self.status == 2 and (len(lines) > 1 or not self.err):
            found.append(f"{len(lines)} lines on standard error")
        if raw := sorted({c for c in self.out + self.err if c not in "\n\t" and (c < " " or "\x7f" <= c <= "\x9f")}):
            found.append(f"raw {raw}")
        if len(self.err) > 3000:
            found.append(f"{len(self.err)} characters on standard error")
        return found


class ForkServer:
    """A context manager that runs cases in forks of one process, two at a time."""

    def __init__(self, folder, warm_up=()):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks", json.dumps([[*words] for words in warm_up])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": os.pathsep.join([*map(os.path.abspath, filter(None, sys.path))])},
            cwd=folder,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.process:
            self.process.stdin.close()

    def run(self, cases, at_once=2):
        """Run all cases and return their outcomes in order."""
        waiting, found, place = list(enumerate(cases)), {}, 0
        while len(found) < len(cases):
            while place < len(waiting) and place - len(found) < at_once:
                self.process.stdin.write(json.dumps([place, vars(waiting[place][1])]) + "\n")
                self.process.stdin.flush()
                place += 1
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended with {self.process.wait()}")
            index, status, out, err, seconds = json.loads(line)
            found[index] = Outcome(cases[index], status, out, err, seconds)
        return [found[index] for index in range(len(cases))]


def _command(case, out, err):
    """Be the command."""
    os.setsid()
    os.environ.update(case["environment"])
    source = tempfile.TemporaryFile()
    source.write(case["stdin"].encode("utf-8", "surrogateescape"))
    source.seek(0)
    for number, file in enumerate((source, out, err)):
        os.dup2(file.fileno(), number)
    encoding = case["environment"].get("PYTHONIOENCODING", "utf-8")
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding=encoding, errors="strict", closefd=False)
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False)
    os.chdir(case["folder"])
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["difftransformer", *case["words"]]
    from difftransformer_lab.cli import console, main

    console.console.file = None  # rich asks for sys.stdout anew
    status = 1
    try:
        status = main.main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe or file: Python itself then ends with 120
            status = 120
    os._exit(status or 0)


def _cpu_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _serve(warm_up):
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.argv = ["difftransformer"]
    from difftransformer_lab.cli.main import main

    for words in warm_up:
        with contextlib.suppress(SystemExit):
            main(words)
    running = {}
    commands = os.fdopen(os.dup(0), "rb", buffering=0)
    os.set_blocking(commands.fileno(), False)
    buffer, is_open = b"", True
    while is_open or running:
        piece = commands.read(1 << 20) if is_open else None
        if piece == b"":
            is_open = False
        buffer += piece or b""
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            index, case = json.loads(line)
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
            child = os.fork()
            if child == 0:
                _command(case, out, err)
            running[child] = index, out, err, time.monotonic()
        for child, (index, out, err, begun) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            seconds = time.monotonic() - begun
            if not done and (seconds > WAITING_SECONDS or _cpu_seconds(child) > SECONDS):
                os.killpg(child, signal.SIGKILL)
                done, status = os.waitpid(child, 0)
            if done:
                del running[child]
                texts = []
                for file in (out, err):
                    file.seek(0)
                    texts.append(file.read(1 << 20).decode("utf-8", "backslashreplace"))
                    file.close()
                results.write(json.dumps([index, os.waitstatus_to_exitcode(status), *texts, seconds]) + "\n")
                results.flush()
        time.sleep(0.005)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))

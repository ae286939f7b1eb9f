"""Run code in fresh processes that have loaded torch already.

They are forked from a server that loads torch and what transformers loads beside itself, but neither transformers nor this
package: a test that needs a process of its own then takes a fraction of the seconds of CPU that these imports take.
"""

import concurrent.futures
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
from multiprocessing import reduction

PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.export", "torch.utils.cpp_extension",
    "huggingface_hub", "jinja2", "numpy", "safetensors.torch", "scipy.optimize", "tokenizers",
)  # fmt: skip


def _settle(environment, folder, streams):
    """Take over streams, environment and folder."""
    for number, file in streams.items():
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def _execute(code, arguments, environment, folder, output, errors):
    """Be the process that runs code."""
    _settle(environment, folder, {number: os.open(path, os.O_WRONLY) for number, path in ((1, output), (2, errors))})
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<fresh process>", "exec"), {"__name__": "__main__"})


def _run(flag, program, words, environment, folder, streams, is_leader):
    """Run a module or code as a process of its own."""
    if is_leader:
        os.setsid()
    _settle(environment, folder, streams)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [flag, *words]
    if flag == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<fresh process>", "exec"), {"__name__": "__main__"})


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Fresh:
    """A process that runs `code` as `python -c CODE ARGUMENTS` would, with these additions to the environment."""

    def __init__(self, code, *arguments, folder=".", **environment):
        self.streams = [tempfile.NamedTemporaryFile("r+", suffix=".txt") for _ in range(2)]  # noqa: SIM115
        words, files = [str(word) for word in arguments], [stream.name for stream in self.streams]
        given = (textwrap.dedent(code), words, os.environ | environment, str(folder), *files)
        self.process = _context().Process(target=_execute, args=given)
        self.process.start()

    def finish(self, timeout=120):
        """Wait for the process, at most `timeout` seconds, and return it with its status and what it printed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        texts = []
        for stream in self.streams:
            texts.append(stream.read())
            stream.close()
        return subprocess.CompletedProcess([], self.process.exitcode, *texts)


def finished(processes, timeout=400):
    """Wait for processes, of which none may fail; return them with what they printed."""
    done = [process.finish(timeout) for process in processes]
    assert not any(process.returncode for process in done), "\n".join(process.stderr for process in done)
    return done


def run(code, *arguments, **environment):
    """Run `code`, which may not fail, as `python -c CODE ARGUMENTS` would; return what it printed."""
    return finished([Fresh(code, *arguments, **environment)])[0].stdout


class _Descriptor:
    """The number of an open file, which arrives as the number of a duplicate."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _detach, (reduction.DupFd(self.number),)


def _detach(duplicate):
    return duplicate.detach()


class Popen:
    """`subprocess.Popen` of `python -m MODULE ...` or `python -c CODE ...`, as far as tests use it."""

    def __init__(
        self, command, *, stdin=None, stdout=None, stderr=None, cwd=".", env=None, text=False, start_new_session=False
    ):
        interpreter, flag, program, *words = command
        assert interpreter == sys.executable
        assert flag in ("-m", "-c")
        mode = "" if text else "b"
        self.stdin = self.stdout = self.stderr = None
        theirs, passed = {}, []
        if stdin == subprocess.PIPE:
            theirs[0], write = os.pipe()
            self.stdin = os.fdopen(write, "w" + mode)
            passed.append(theirs[0])
        for number, given in ((1, stdout), (2, stderr)):
            if given == subprocess.PIPE:
                read, theirs[number] = os.pipe()
                setattr(self, ("stdout", "stderr")[number - 1], os.fdopen(read, "r" + mode))
                passed.append(theirs[number])
            elif given == subprocess.STDOUT:
                theirs[number] = theirs[1]
            elif given is not None:
                theirs[number] = given if isinstance(given, int) else given.fileno()
        # Each number arrives as that of a duplicate of its own.
        streams = {number: _Descriptor(file) for number, file in theirs.items()}
        arguments = (flag, program, words, dict(env or os.environ), str(cwd), streams, start_new_session)
        self.process = _context().Process(target=_run, args=arguments)
        self.process.start()
        for file in passed:
            os.close(file)
        self.pid = self.process.pid

    @property
    def returncode(self):
        """Its exit status, or None while it runs."""
        return self.process.exitcode

    def poll(self):
        """Return its exit status, or None while it runs."""
        return self.process.exitcode

    def wait(self, timeout=None):
        """Wait for its end and return its exit status."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.pid, timeout)
        return self.process.exitcode

    def send_signal(self, number):
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """Close its standard input and wait for its end; return what it printed to pipes."""
        if self.stdin is not None:
            self.stdin.close()
        pipes = [pipe if pipe is not None and not pipe.closed else None for pipe in (self.stdout, self.stderr)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            reads = [pipe and pool.submit(pipe.read) for pipe in pipes]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            texts = [read and read.result() for read in reads]
        self.__exit__()
        return tuple(texts)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def start_child(module, *words, **options):
    """`difftransformer_lab.child.start_child`, with torch loaded already."""
    return Popen([sys.executable, "-m", "difftransformer_lab.child", module, *words], stdin=subprocess.PIPE, **options)

"""Run code in fresh processes that have loaded torch already.

They are forked from a server that loads torch and what transformers loads beside itself, but neither transformers nor this
package: a test that needs a process of its own then takes a fraction of the seconds of CPU that these imports take.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap

PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.export", "torch.utils.cpp_extension",
    "huggingface_hub", "jinja2", "numpy", "safetensors.torch", "scipy.optimize", "tokenizers",
)  # fmt: skip


def _execute(code, arguments, environment, folder, output, errors):
    """Be the process: with its own streams, environment and folder."""
    for stream, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<fresh process>", "exec"), {"__name__": "__main__"})


class Fresh:
    """A process that runs `code` as `python -c CODE ARGUMENTS` would, with these additions to the environment."""

    def __init__(self, code, *arguments, folder=".", **environment):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.streams = [tempfile.NamedTemporaryFile("r+", suffix=".txt") for _ in range(2)]  # noqa: SIM115
        self.process = context.Process(
            target=_execute,
            args=(
                textwrap.dedent(code),
                [str(word) for word in arguments],
                os.environ | environment,
                str(folder),
                *(stream.name for stream in self.streams),
            ),
        )
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


def run(code, *arguments, **environment):
    """Run `code` as `python -c CODE ARGUMENTS` would; return the process with its status and what it printed."""
    return Fresh(code, *arguments, **environment).finish()

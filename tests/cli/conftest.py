"""Commands in processes of their own."""

import os
import subprocess
import sys

import pytest

from tests.support import fresh


@pytest.fixture
def start(tmp_path):
    """start(*words): start a command; it is killed at the end if it still runs."""
    started = []

    def run(*words, launcher=("-m", "difftransformer_lab")):
        process = fresh.Popen(
            [sys.executable, *launcher, *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()

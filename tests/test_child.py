"""Children end within 5 s of a parent that is killed, whatever they are doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_interruption import is_alive

LIMIT_SECONDS = 5.0

# A parent that has imported nothing heavy, as the command does before it needs a model.
PARENT = """
import sys
sys.argv[0] = "difftransformer"
from difftransformer_lab.child import start_child
child = start_child(sys.argv[1], *sys.argv[2:])
assert "torch" not in sys.modules
print(child.pid, flush=True)
sys.exit(child.wait())
"""

CHILDREN = {
    # Python does not return to its loop, and takes no signal, for long.
    "importing": "import time\nopen('begun', 'w').close()\ntime.sleep(60)\ndef main(words): pass",
    "swallowing": "import time\nopen('begun', 'w').close()\nwhile True:\n    try:\n        time.sleep(60)\n"
    "    except BaseException:\n        pass",
    "working": "import time\ndef main(words):\n    open('begun', 'w').close()\n    time.sleep(60)",
    "stubborn": "import time\ndef main(words):\n    open('begun', 'w').close()\n    while True:\n        try:\n"
    "            time.sleep(60)\n        except KeyboardInterrupt:\n            pass",
    "saving": "import time\ndef main(words):\n    open('begun', 'w').close()\n    try:\n        time.sleep(60)\n"
    "    except KeyboardInterrupt:\n        time.sleep(0.5)\n        open('saved', 'w').close()",
}


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    processes = []

    def run(code):
        (tmp_path / "work.py").write_text(code)
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        environment = os.environ | {"PYTHONPATH": paths}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        command = [sys.executable, "-c", PARENT, "work", "word"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)
        processes.append(process)
        return process, int(process.stdout.readline())

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system shows no processes")
@pytest.mark.parametrize("work", CHILDREN)
def test_a_child_ends_with_its_killed_parent(start, tmp_path, work):
    parent, child = start(CHILDREN[work])
    wait_for((tmp_path / "begun").exists)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(child), LIMIT_SECONDS)
    assert (tmp_path / "saved").exists() == (work == "saving")


def test_a_child_whose_parent_is_gone_before_it_looks_ends_too(start, tmp_path):
    parent, child = start(CHILDREN["working"])
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(child), LIMIT_SECONDS)


def test_a_child_gets_its_words_and_gives_its_status(start, tmp_path):
    parent, _ = start("def main(words):\n    open('words', 'w').write(repr(words))\n    return 7")
    assert parent.wait(timeout=60) == 7
    assert (tmp_path / "words").read_text() == "['word']"


def test_an_interrupt_during_imports_is_not_swallowed(start, tmp_path):
    parent, child = start(CHILDREN["swallowing"])
    wait_for((tmp_path / "begun").exists)
    os.kill(child, signal.SIGINT)
    assert parent.wait(timeout=60) == 130

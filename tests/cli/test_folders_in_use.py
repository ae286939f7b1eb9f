"""Two commands in one folder: the second says in one line who holds it, exits with 2 and changes nothing. Readers go on."""

import os
import socket
import subprocess
import sys

import pytest
import yaml

from difftransformer_lab.cli.main import main
from tests.support import tiny_folders
from tests.test_files import HOLDER


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder of the command, and of what it writes."""
    (tmp_path / "out").mkdir()
    lock = tmp_path / "out" / ".lock"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def words(toy_file, toy, tmp_path):
    """The command lines, with a model and a text that are there."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    tiny_folders.saved(model)
    text.write_text("".join(f"line {i} tells of {i * i} things\n" for i in range(900)))
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": [{"task": "perplexity"}]}))
    asked = toy | {"data": toy["data"] | {"tokenizer": "byte"}, "evaluation": toy["evaluation"][:1]}
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump(asked))
    study = toy | {"model": {}, "data": toy["data"] | {"tokenizer": ""}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    return {
        "train": ["train", toy_file, "--out"],
        "compare": ["compare", toy_file, "--out"],
        "upcycle": ["upcycle", model, "--train", tmp_path / "study.yaml"],
        "eval": ["eval", model, "--recipe", tmp_path / "asked.yaml", "--out"],
        "eval task": ["eval", "perplexity", model, "--text", text, "--window", "16", "--windows", "2", "--out"],
        "eval suite": ["eval", tmp_path / "suite.yaml", model, "--out"],
    }


def run(words, out, capfd):
    capfd.readouterr()
    status = main([*map(str, words), str(out)])
    return status, capfd.readouterr().err


@pytest.mark.parametrize("name", ["train", "compare", "upcycle", "eval", "eval task", "eval suite"])
def test_the_second_command_is_refused(words, holder, tmp_path, capfd, name):
    status, error = run(words[name], tmp_path / "out", capfd)
    assert status == 2
    assert error == (
        f"difftransformer {name.replace(' task', ' perplexity').removesuffix(' suite')}: {tmp_path / 'out'}: process "
        f"{holder.pid} on {socket.gethostname()} is working in it; wait until it ends, or name another folder\n"
    )
    assert os.listdir(tmp_path / "out") == [".lock"]


def test_the_folder_is_free_after_the_command_and_after_a_kill(words, holder, tmp_path, capfd):
    holder.kill()
    holder.wait()
    for _ in range(2):
        assert run(words["eval task"], tmp_path / "out", capfd)[0] == 0
        assert not (tmp_path / "out" / ".lock").exists()


def test_a_run_that_is_at_work_can_be_read(toy_file, tmp_path, capfd, holder):
    """Its newest checkpoint is evaluated and continued with a prompt while the run is locked."""
    run_folder = tmp_path / "run"
    assert main(["train", str(toy_file), "--out", str(run_folder)]) == 0
    (tmp_path / "out" / ".lock").rename(run_folder / ".lock")
    assert run(["train", toy_file, "--out"], run_folder, capfd)[0] == 2
    assert run(["eval", run_folder, "--out"], tmp_path / "evals", capfd)[0] == 0
    assert run(["eval"], run_folder, capfd)[0] == 0
    assert run(["export", run_folder], tmp_path / "exported", capfd)[0] == 0

"""A disk that is full: one line that names the file, whatever is being written. A full standard output is none."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer.data import byte_tokenizer
from difftransformer.files import locked
from difftransformer_lab.cli.main import main
from tests.support import fresh, tiny_folders
from tests.support.full_disk import room


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """A module compiled while there is no room would be cut off, and stay so."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def commands(toy_file, toy, toy_shards, tmp_path):
    """The command lines, but for --out."""
    model, llama, text = tmp_path / "model", tmp_path / "llama", tmp_path / "text.txt"
    tiny_folders.saved(model)
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(llama)
    byte_tokenizer().save(llama)
    text.write_text("".join(f"line {i} tells of {i * i} things\n" for i in range(900)))
    loss = {"task": "perplexity", "options": {"text": str(text), "window": 16, "windows": 2}}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": [loss]}))
    arms = {"diff": {"set": {"model.attention_type": "diff"}}, "twin": {"set": {"model.attention_type": "softmax"}}}
    study = {
        "name": "small", "question": "Does it work?", "recipe": str(toy_file), "reference": "twin", "arms": arms,
        "figures": [{"label": "loss", "task": "perplexity", "name": "nll", "unit": "nats/token"}],
        "presets": {"laptop": {"seeds": 1, "set": {"evaluation.needle": None, "evaluation.allocation": None}}},
    }  # fmt: skip
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    task = ["eval", "perplexity", model, "--text", text, "--window", "16", "--windows", "2", "--out"]
    return {
        "train": ["train", toy_file, "--out"],
        "tokenize": ["tokenize", toy["data"]["source"], "--tokenizer", "byte", "--validation-share", "0.3", "--out"],
        "export": ["export", model],
        "convert": ["convert", "--to", "diffllama", model],
        "upcycle": ["upcycle", llama, "--to", "diff_v2", "--tokens", "0"],
        "study": ["study", tmp_path / "study.yaml", "--results", tmp_path / "out" / "results", "--out"],
        "eval task": task,
        "eval suite": ["eval", tmp_path / "suite.yaml", model, "--out"],
    }


WRITES = [
    ("train", 100, "config.yaml"),
    ("train", 4000, "step-000003: the checkpoint of step 3 cannot be written (model.safetensors: File too large)"),
    ("tokenize", 30_000, "while writing train-00000.bin"), ("export", 2000, "model.safetensors"),
    ("convert", 2000, "model.safetensors"), ("upcycle", 2000, "model.safetensors"), ("study", 500, "config.yaml"),
    ("eval task", 10, "perplexity.answers.jsonl"), ("eval task", 1000, "perplexity.json"),
    ("eval task", 8000, "perplexity.svg"), ("eval suite", 8000, ".svg"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bytes_", "file"), WRITES)
def test_the_file_is_named(commands, tmp_path, capsys, name, bytes_, file):
    words = [*map(str, commands[name]), str(tmp_path / "out")]
    with room(bytes_):
        status = main(words)
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert f": {tmp_path / 'out'}" in error
    assert file in error
    assert "File too large" in error
    if name == "upcycle":
        assert main(words) == 0


@pytest.mark.slow
def test_a_study_keeps_what_is_finished_and_goes_on(commands, tmp_path, capsys, monkeypatch):
    words, out = [*map(str, commands["study"]), str(tmp_path / "out")], tmp_path / "out"

    def finish(*more):
        with monkeypatch.context() as warm:  # processes that inherit no limit
            warm.setattr("difftransformer_lab.studies.jobs.start_child", fresh.start_child)
            assert main([*words, *more]) == 0

    finish()
    finished = {path: path.stat().st_mtime_ns for path in out.rglob("*-seed0-*/**/*") if path.is_file()}
    records = {path: path.read_bytes() for path in out.rglob("*-seed0-*.json")}
    assert len(records) == 2
    capsys.readouterr()
    with room(3000):
        status = main([*words, "--seeds", "2"])
    error = capsys.readouterr().err
    assert status == 2
    said = r"difftransformer study: .*, seed 1: .*cannot be written \(model.safetensors: File too large\).*\n"
    assert re.fullmatch(said, error)
    finish("--seeds", "2")
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert {path: path.read_bytes() for path in records} == records
    assert len(list(out.rglob("*-seed1-*.json"))) == 2


def test_metrics_that_cannot_be_written(toy_file, tmp_path, monkeypatch, capsys):
    """The disk is full when a line is written, and still is when the file is closed."""

    class Full:
        def __init__(self, file):
            self.file, self.truncate = file, file.truncate

        def flush(self, *_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        write = flush

        def close(self):
            self.file.close()
            self.flush()

    before = Path.open

    def opened(path, *words, **options):
        file = before(path, *words, **options)
        return Full(file) if path.name == "metrics.jsonl" and words[0].startswith("a") else file

    monkeypatch.setattr(Path, "open", opened)
    assert main(["train", str(toy_file), "--out", str(tmp_path / "run")]) == 2
    line = f"{tmp_path / 'run' / 'metrics.jsonl'}: No space left on device; make room and run again\n"
    assert capsys.readouterr().err == f"difftransformer train: {line}"


def test_a_lock_needs_no_room(tmp_path):
    with room(0), locked(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").stat().st_size == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    ("words", "buffered"),
    [(["--help"], False), (["--help"], True), pytest.param(["info", "tiny"], False, marks=pytest.mark.slow)],
)
def test_a_full_standard_output_is_no_full_disk(words, buffered):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *([] if buffered else ["-u"]), "-m", "difftransformer_lab", *words]
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "env": environment, "text": True, "check": False}
        done = subprocess.run(command, **options)
    assert done.returncode == 2
    assert done.stderr == "difftransformer: standard output cannot be written (No space left on device)\n"

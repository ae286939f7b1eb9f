"""The line "Next: COMMAND" at the end of a command: the printed command runs."""

import shlex

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer.data import byte_tokenizer
from difftransformer_lab.cli import console
from difftransformer_lab.cli.main import main
from tests.support import tiny_folders

FEWER = {
    "eval needle": ["--documents", "2", "--needles", "[[1,1]]"],
    "check causality": ["--length", "8", "--backend", "reference"],
}


def printed(out):
    (line,) = [line for line in out.splitlines() if line.startswith("Next: ")]
    words = shlex.split(line.removeprefix("Next: "))
    program = shlex.split(console.command())
    assert words[: len(program)] == program
    return words[len(program) :]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("some words of a text\n" * 200)
    tiny_folders.saved(tmp_path / "a model")
    return tmp_path


@pytest.mark.parametrize(("command", "following"), [
    ("maps demo --beside demo-twin", "eval needle demo demo-twin --digits 2"),
    ("check causality 'a model' --length 8 --backend reference", "eval needle 'a model'"),
    ("eval perplexity 'a model' --text words.txt", "maps 'a model'"),
    ("eval perplexity 'a model' demo --text words.txt", "maps 'a model'"),
    ("export 'a model' made", "maps made"),
    ("convert 'a model' made --to diffllama", "check causality made"),
])  # fmt: skip
@pytest.mark.slow
def test_the_printed_command_runs(command, following, folder, capfd):
    assert main(shlex.split(command)) == 0
    words = printed(capfd.readouterr().out)
    assert words == shlex.split(following)
    assert main([*words, *FEWER.get(" ".join(words[:2]), ())]) == 0


def test_a_run_is_evaluated_next(toy_file, folder, capfd):
    assert main(["train", str(toy_file), "--out", "my run"]) == 0
    words = printed(capfd.readouterr().out)
    assert words == ["eval", "my run"]
    assert main(words) == 0


def test_an_upcycled_model_is_evaluated_next_beside_the_first(folder, capfd):
    config = LlamaConfig(
        vocab_size=258, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    byte_tokenizer().save(folder / "llama")
    assert main(["upcycle", "llama", "made", "--to", "diff", "--text", "words.txt"]) == 0
    words = printed(capfd.readouterr().out)
    assert words == ["eval", "perplexity", "llama", "made"]
    assert main([*words, "--text", "words.txt", "--windows", "2"]) == 0


def test_without_the_command_on_the_path_the_interpreter_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(console.shutil, "which", lambda name: None)
    monkeypatch.setattr(console.sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert console.command("eval", "my run") == "venv/bin/python -m difftransformer_lab eval 'my run'"

"""Words, names and streams out of bounds: one line, exit status 2, and nothing heavy is imported to find out."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import yaml
from rich.table import Table

from difftransformer.errors import DataError
from difftransformer_lab.analysis import analyse
from difftransformer_lab.analysis.page import study_page, write_page
from difftransformer_lab.cli.console import console, log, show
from difftransformer_lab.cli.main import verbs
from difftransformer_lab.evals.sets.labelled import read_labelled_files
from tests.analysis.conftest import make_comparison

COMMAND = [sys.executable, "-m", "difftransformer_lab"]


def shell(line, **environment):
    """Run a line of the shell, in which $COMMAND is the command."""
    command = " ".join(f"'{word}'" for word in COMMAND)
    words = ["bash", "-c", line.replace("$COMMAND", command)]
    return subprocess.run(words, capture_output=True, env=os.environ | environment, timeout=60, check=False)


def test_faults_of_the_command_line_are_found_without_torch(tmp_path):
    code = f"""
        import sys
        from difftransformer_lab.cli.main import main
        assert main(["--help"]) == 0
        for verb in {sorted(set(verbs()) - {"build-kernels"})!r}:
            assert main([*verb.split(), "--no_such_flag", "3"]) == 2
            assert main([*verb.split(), "a", "--device", "cud", "--threads"]) == 2
        assert main(["generate", "a", "text", "--max-new-tokens", "0"]) == 2
        assert main(["train", "a", "--threads", "1e6"]) == 2
        for words in (["train", "a"], ["compare", "a"], ["generate", "a", "text"], ["eval", "a"], ["eval", "needle", "a"],
                      ["eval", "quantized", "a"], ["export", "a", "b"], ["upcycle", "a", "b", "--to", "diff"]):
            assert main(words) == 2
        for name in ("../../x", ""):
            with open("recipe.yaml", "w") as file:
                print("name: '" + name + "'", file=file)
            for verb in ("train", "compare"):
                assert main([verb, "recipe.yaml"]) == 2
        assert not {{"torch", "transformers"}} & set(sys.modules)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["../../x", "", "  ", ".", "..", "/tmp/x", "a/b", "a\nb", "\x1b[31m"])
def test_names_that_leave_their_folder(name, toy, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(toy | {"name": name}))
    for verb in ("train", "compare"):
        assert "recipe.yaml: name" in fails(verb, "recipe.yaml")
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml"}


def test_a_name_of_several_words(toy_recipe):
    assert type(toy_recipe)(**(vars(toy_recipe) | {"name": "two words, (1M)"})).name == "two words, (1M)"


@pytest.mark.parametrize("threads", ["1000000", "9" * 20, "9" * 5000, "-1", "nan"])
def test_threads(threads, toy_file, tmp_path, fails):
    line = fails("train", toy_file, "--out", tmp_path / "out", "--threads", threads)
    assert "threads" in line
    assert len(line) < 300
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("temperature", "nan"), ("top_p", "inf"), ("seed", "9" * 20), ("seed", "9" * 5000), ("seed", "1e3")],
)
def test_numbers(flag, value, fails):
    assert flag.replace("_", "-") in fails("generate", "a", "b", "--temperature", "1", f"--{flag}", value)


OVERRIDES = ["compare.seeds=1000000", "compare.jobs=1000000", f"training.batch_tokens={2**62}"]


@pytest.mark.parametrize("override", OVERRIDES)
def test_recipes_that_ask_for_too_much(override, toy_file, tmp_path, fails):
    line = fails("compare", toy_file, "--out", tmp_path / "out", "--set", override)
    assert override.partition(".")[2] in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [{"rope_type": "x", "rope_theta": 1}, {"rope_type": "yarn", "rope_theta": 1e4}])
def test_rotary_settings_that_transformers_does_not_know(value, toy, tmp_path, fails):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(toy | {"model": toy["model"] | {"rope_parameters": value}}))
    line = fails("train", tmp_path / "recipe.yaml", "--out", tmp_path / "out")
    assert "transformers makes no rotary embedding" in line


def test_a_long_field_of_a_table(tmp_path, fails):
    (tmp_path / "x.csv").write_text('text,label\n"' + "x" * 200_000 + '",a\n')
    (tmp_path / "model").mkdir()
    line = fails("eval", "icl", tmp_path / "model", "--train-file", tmp_path / "x.csv")
    assert "checkpoint" in line  # the model is opened first
    with pytest.raises(DataError, match=r"x\.csv: line \d is not CSV \(field larger than field limit"):
        read_labelled_files(str(tmp_path / "x.csv"))


def test_control_characters_of_an_error(fails):
    line = fails("\x1b[2J\nx")
    assert "\x1b" not in line


def test_want_of_memory(toy_file, tmp_path, fails):
    words = ["--set", "model.intermediate_size=2147483647", "--set", "model.hidden_size=1073741824"]
    line = fails("train", toy_file, "--out", tmp_path / "out", *words)
    assert "not enough memory" in line


def test_closed_streams():
    done = shell("$COMMAND --version >&-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.count(b"\n") == 1
    assert b"standard output is closed" in done.stderr
    done = shell("$COMMAND generate nowhere <&-")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert b"no prompt" in done.stderr
    done = shell("$COMMAND nothing 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")
    assert shell("$COMMAND --help <&- 2>&-").returncode == 0


def test_streams_of_few_characters():
    done = shell("$COMMAND caf\u00e9-\u202e", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert done.stderr.isascii()
    assert shell("$COMMAND --help", PYTHONIOENCODING="ascii").returncode == 0


def test_pages_hold_no_control_characters(tmp_path):
    bad = "\x1b[31m<b>\x07\u202e[bold]"
    evidence = make_comparison(seeds=1, needle=False, allocation=False)
    index = dataclasses.replace(evidence.index, question=bad, about=bad, command=bad)
    page = write_page(study_page(analyse(dataclasses.replace(evidence, index=index))), tmp_path)
    for path in (page, *tmp_path.rglob("*.csv"), *tmp_path.rglob("*.svg")):
        assert not {*"\x1b\x07\u202e"} & set(path.read_text(encoding="utf-8")), path
    assert "\u241b[31m&lt;b&gt;\u2407\ufffd[bold]" in page.read_text(encoding="utf-8")


def test_tables_hold_no_control_characters_and_no_markup(capsys):
    bad = "[bold]a[/nope]\x1b[31m\x07"
    table = Table(bad, title=bad)
    table.add_row(bad)
    console.print(table)
    for print_it in (show, log, console.print):
        print_it(bad)
    shown = capsys.readouterr().out
    assert not {*"\x1b\x07"} & set(shown)
    assert shown.count("[bold]a[/nope]\u241b[31") == 6

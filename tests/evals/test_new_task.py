"""A task defined in this file runs by `eval` and in a suite, resumes, and has its picture and table; no other file knows it."""

import csv
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from difftransformer.errors import ConfigError
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals import registry, tasks
from difftransformer_lab.evals.engine import Scores, Task
from difftransformer_lab.evals.models.causal import CausalLanguageModel
from difftransformer_lab.evals.registry import TaskKind, register
from difftransformer_lab.evals.requests import Continuation
from difftransformer_lab.evals.scores import proportion
from difftransformer_lab.plots import bars, select
from difftransformer_lab.results import ItemScore, TaskResult, read_result
from tests.support.answering import tiny_model
from tests.support.missing import without


@dataclass(frozen=True, kw_only=True)
class Options:
    """Repetition of words.

    Attributes:
        words: The words to repeat.
        times: How often the prompt shows each word.
    """

    words: str = "ab,cd,ef,gh"
    times: int = 3

    def __post_init__(self) -> None:
        if self.times < 1:
            raise ConfigError(f"times={self.times}: give at least 1")


class ToyTask(Task):
    """Prompts that repeat a word, which the model should continue."""

    def __init__(self, options, model):
        self.words, self.tokenizer = options.words.split(","), model.tokenizer
        self.data_name, self.choices = "words", ["The prompt ends with a space."]
        prompts = [tuple(model.tokenizer.encode(f"{word} " * options.times)) for word in self.words]
        self.requests = [Continuation(ids, len(word)) for ids, word in zip(prompts, self.words, strict=True)]

    def score(self, answers):
        right = [self.tokenizer.decode(ids) == word for ids, word in zip(answers, self.words, strict=True)]
        pairs = zip(self.words, right, strict=True)
        items = [ItemScore(name="repeated", item=word, score=float(is_right)) for word, is_right in pairs]
        return Scores(measurements=[proportion("repeated", right, {})], items=items)


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw a bar for each model."""
    figure = bars(results, ["words"], lambda result, group: select(result, "repeated"), form=".2f")
    return "Repetition", f"Words that are repeated, of {len(results[0].items)}.", figure


@pytest.fixture(autouse=True)
def _toy():
    register(TaskKind(name="toy", doc="Repetition of words.", options=Options, make=ToyTask, draw=draw))
    yield
    del registry._registered["toy"]


@pytest.fixture
def asked(monkeypatch):
    """Prompts that reach the model; it is interrupted after as many as `limit` says."""

    class Asked(list):
        limit = 10**9

    seen, answer = Asked(), CausalLanguageModel.answer

    def counting(self, requests):
        for index, found in answer(self, requests):
            if len(seen) == seen.limit:
                raise KeyboardInterrupt
            seen.append(requests[index].prompt)
            yield index, found

    monkeypatch.setattr(CausalLanguageModel, "answer", counting)
    return seen


def test_the_command(tmp_path, asked, capsys, fails):
    """Help, an interruption, a second call that asks only what is left, the result, its table and its picture."""
    assert main(["eval", "--help"]) == 0
    assert "  toy            Repetition of words\n" in capsys.readouterr().out
    words = ["eval", "toy", tiny_model(tmp_path / "model"), "--out", str(tmp_path / "out"), "--times", "2"]
    assert "times=0: give at least 1" in fails(*words[:-1], "0")
    asked.limit = 1
    assert main(words) == 130
    assert not (tmp_path / "out" / "toy.json").exists()
    asked.limit = 10**9
    assert main(words) == 0
    assert len(set(asked)) == 4
    assert len(asked) == 4 + 1  # the part that was interrupted is computed whole
    assert "repeated, share" in capsys.readouterr().out
    result = read_result(tmp_path / "out" / "toy.json", TaskResult)
    assert (result.task, result.options) == ("toy", {"words": "ab,cd,ef,gh", "times": 2})
    assert (result.data.requests, result.choices) == (4, ["The prompt ends with a space."])
    assert result.measurements[0].n == 4
    ElementTree.parse(tmp_path / "out" / "toy.svg")
    assert (tmp_path / "out" / "toy.png").stat().st_size > 5000


def test_a_suite(tmp_path, asked):
    models = [tiny_model(tmp_path / name) for name in ("one", "two")]
    tasks = [{"task": "toy", "options": {"words": "ab,cd"}}, {"task": "toy", "label": "toy again"}]
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"name": "toys", "tasks": tasks}))
    words = ["eval", str(tmp_path / "suite.yaml"), *models, "--out", str(tmp_path / "report")]
    asked.limit = 3
    assert main(words) == 130
    asked.limit = 10**9
    assert main(words) == 0
    assert len(asked) == 2 * (2 + 4) + 1  # the part that was interrupted is computed whole
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count('class="wide"') == page.count('class="narrow"') == 2
    assert "Words that are repeated, of 4." in page
    rows = list(csv.reader((tmp_path / "report" / "tables" / "toy-again.csv").read_text().splitlines()))
    assert rows[0] == ["measure", "one", "two", "items"]
    assert [row[0] for row in rows[1:]] == ["repeated, share"]


def test_under_coarser_numbers(tmp_path, asked):
    words = ["eval", "quantized", tiny_model(tmp_path / "model"), "--out", str(tmp_path / "out"), "--task", "toy"]
    assert main([*words, "--bits", "[16, 4]"]) == 0
    result = read_result(tmp_path / "out" / "quantized.json", TaskResult)
    assert [(row.name, row.at["bits"]) for row in result.measurements] == [("repeated", 16), ("repeated", 4)]
    assert len(asked) == 2 * 4


def test_tasks_and_reports_load_neither_torch_nor_transformers():
    """A report draws the picture of every task, on a machine with Python and matplotlib."""
    files = [path for path in Path(tasks.__file__).parent.glob("*.py") if path.name != "__init__.py"]
    code = without("torch", "transformers") + (
        "import difftransformer_lab.analysis.page\n"
        "from difftransformer_lab.evals.tasks import registered_tasks\n"
        f"assert len(registered_tasks()) == {len(files)} and registered_tasks()['maps'].draw is not None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

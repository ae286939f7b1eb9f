"""Answers on disk: an evaluation that was stopped goes on, asks nothing twice, and takes nothing for what it is not."""

import json
import math

import pytest

from difftransformer.data import byte_tokenizer
from difftransformer.errors import CheckpointError, EvaluationError
from difftransformer.progress import shown_by
from difftransformer_lab.evals.engine import Scores, Task, run_task
from difftransformer_lab.evals.models.causal import CausalLanguageModel
from difftransformer_lab.evals.requests import Loss
from difftransformer_lab.results import Grid, ItemScore, Measurement
from tests.support import tiny_folders as tiny_models
from tests.support.fakes import TensorModel


class Counting(Task):
    """A task whose figure is the sum of its answers."""

    data_name, choices = "numbers", ()

    def __init__(self, requests):
        self.requests = requests

    def score(self, answers):
        total = Measurement(name="sum", unit="1", value=sum(answers), standard_error=None, n=1, at={})
        return Scores(measurements=[total], items=[])


class Adding(TensorModel):
    """Answers with the first id, backwards; stops after some."""

    def __init__(self, stop_after=10**9):
        self.asked, self.stop_after = [], stop_after

    def answer(self, requests):
        for index in reversed(range(len(requests))):
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(requests[index].ids[0])
            yield index, requests[index].ids[0]


def numbers(*values):
    return Counting([Loss((value, value)) for value in values])


def test_a_stopped_evaluation_goes_on(tmp_path):
    journal, task = tmp_path / "a.jsonl", numbers(1, 20, 300, 4000)
    with pytest.raises(KeyboardInterrupt):
        run_task(Adding(stop_after=2), task, journal=journal, identity="m")
    told, model = [], Adding()
    with shown_by(lambda done, total, title: told.append((done, total))):
        scores = run_task(model, task, journal=journal, identity="m")
    assert scores.measurements[0].value == 4321
    assert model.asked == [20, 1]
    assert told == [(4, 8), (6, 8), (8, 8)]
    again = Adding()
    assert run_task(again, task, journal=journal, identity="m").measurements[0].value == 4321
    assert again.asked == []


@pytest.mark.parametrize("rest", ['{"request": 1, "ans', '{"request": 0, "answer": 9}', "\x00\x00\x00"])
def test_a_line_that_a_kill_cut_short_is_dropped(rest, tmp_path):
    journal, task = tmp_path / "a.jsonl", numbers(1, 20, 300)
    with pytest.raises(KeyboardInterrupt):
        run_task(Adding(stop_after=1), task, journal=journal, identity="m")
    with open(journal, "a", encoding="utf-8") as file:
        file.write(rest)
    model = Adding()
    with pytest.warns(UserWarning, match=r"a\.jsonl: line 3 is not whole and is left out"):
        assert run_task(model, task, journal=journal, identity="m").measurements[0].value == 321
    assert model.asked == [20, 1]
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line.get("request") for line in lines] == [None, 2, 1, 0]


def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path):
    journal, task = tmp_path / "a.jsonl", numbers(1, 20)
    run_task(Adding(), task, journal=journal, identity="m")
    whole = journal.read_text()
    for wrong in ('"request": [1]', '"request: 1'):
        journal.write_text(damaged := whole.replace('"request": 1', wrong))
        with pytest.raises(CheckpointError, match="line 2 is damaged; delete the line to ask again what it answered"):
            run_task(Adding(), task, journal=journal, identity="m")
        assert journal.read_text() == damaged
    journal.write_text("".join(line for line in damaged.splitlines(keepends=True) if '"request: 1' not in line))
    model = Adding()
    assert run_task(model, task, journal=journal, identity="m").measurements[0].value == 21
    assert model.asked == [20]


def test_a_folder_of_a_suite_begins_again_with_other_questions(tmp_path, caplog):
    journal = tmp_path / "a.jsonl"
    run_task(Adding(), numbers(1, 20), journal=journal, identity="m")
    scores = run_task(Adding(), numbers(1, 300), journal=journal, identity="m", replace_others=True)
    assert scores.measurements[0].value == 301
    assert "to other questions; every question is asked again" in caplog.messages[0]


def test_undefined_figures_are_named_and_left_out():
    class Mixed(Counting):
        def score(self, answers):
            rows = [("good", 1.0, {}), ("bad", math.nan, {}), ("some", 2.0, {"at": 1}), ("some", math.inf, {"at": 2})]
            scores = {"good": (0.0, 1.0), "bad": (0.0, math.nan)}
            return Scores(
                measurements=[
                    Measurement(name=name, unit="1", value=value, standard_error=None, n=1, at=at)
                    for name, value, at in rows
                ],
                items=[
                    ItemScore(name=k, item=str(i), score=v) for k, both in scores.items() for i, v in enumerate(both)
                ],
                grids=[Grid(name="map", at={}, values=[[0.0], [math.nan]])],
            )

    scores = run_task(Adding(), Mixed(numbers(1).requests))
    assert [(row.name, row.value) for row in scores.measurements] == [("good", 1.0), ("some", 2.0)]
    assert {item.name for item in scores.items} == {"good"}
    assert scores.grids == []
    assert scores.gaps == ["bad is undefined", "some is undefined in 1 of 2 places", "map is undefined"]


def test_answers_of_another_model_or_to_other_questions_are_refused(tmp_path):
    journal = tmp_path / "a.jsonl"
    run_task(Adding(), numbers(1, 2), journal=journal, identity="m")
    for task, identity in ((numbers(1, 2), "n"), (numbers(1, 3), "m"), (numbers(1, 2, 3), "m")):
        with pytest.raises(CheckpointError, match="holds answers of another model or to other questions"):
            run_task(Adding(), task, journal=journal, identity=identity)
    (tmp_path / "b.jsonl").write_text("not a journal\n")
    with pytest.raises(CheckpointError, match="line 1 is damaged; delete the file"):
        run_task(Adding(), numbers(1), journal=tmp_path / "b.jsonl", identity="m")


def test_an_evaluation_without_an_answer_blocks_no_later_one(tmp_path):
    journal = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_task(Adding(stop_after=0), numbers(1, 20), journal=journal, identity="m")
    assert run_task(Adding(), numbers(300), journal=journal, identity="n").measurements[0].value == 300


def test_a_question_longer_than_the_context_is_refused_before_the_first_answer(tmp_path):
    model = CausalLanguageModel(tiny_models.model(max_position_embeddings=64), byte_tokenizer())
    task, journal = Counting([Loss((1,) * 20), Loss((1,) * 66)]), tmp_path / "a.jsonl"
    with pytest.raises(EvaluationError, match="takes 65 tokens, and the model's context has 64"):
        run_task(model, task, journal=journal)
    assert journal.read_bytes() == b""


def test_progress_moves_inside_a_batch():
    """Four rows in one pass: each of its layers is told before the first answer, and the end is told once."""
    network = tiny_models.model(num_hidden_layers=4)
    model, told = CausalLanguageModel(network, byte_tokenizer()), []
    task = Counting([Loss(tuple(range(row, row + 41))) for row in range(4)])
    task.score = lambda answers: Scores(measurements=[], items=[])
    answers, answer = [], model.answer
    model.answer = lambda requests: (answers.append(len(told)) or pair for pair in answer(requests))
    with shown_by(lambda done, total, title: told.append((done, total))):
        run_task(model, task)
    total = sum(request.shown_tokens for request in task.requests)
    before = [done for done, _ in told[: answers[0]]]
    assert before[:5] == [0, 40, 80, 120, 160]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)
    assert [done for done, _ in told].count(total) == 1
    assert not any(module._forward_hooks for module in network.modules())


def test_nothing_to_ask_is_refused():
    with pytest.raises(EvaluationError, match="nothing to ask"):
        run_task(Adding(), numbers())

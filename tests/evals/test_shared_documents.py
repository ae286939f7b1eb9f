"""Answers that share a document, a question or an item are one unit: of an error, of an interval and of a pairing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from difftransformer_lab.evals.scores import mean, mean_of_sets, proportion
from difftransformer_lab.evals.tasks.allocation import SEGMENTS
from difftransformer_lab.evals.tasks.hallucination import HallucinationTask, Item
from difftransformer_lab.evals.tasks.harness import _items
from difftransformer_lab.evals.tasks.needle import CHANCE, COPYING, LOOKUP
from difftransformer_lab.results import summary_rows
from difftransformer_lab.statistics import wilson_interval
from tests.evals import test_allocation, test_needle_eval
from tests.support.task_results import task_result


@pytest.mark.parametrize("paired", [True, False])
def test_the_error_of_allocation_is_over_documents(paired, toy_shards):
    """Depths of a document give the same share here, so that more depths say no more about other documents."""
    shares = [0.1, 0.2, 0.6]
    task = test_allocation.drawn(toy_shards, replace(test_allocation.OPTIONS, paired=paired))
    rows = []
    for share in shares * 3:  # three documents at each of three depths
        sums = [(share if segment == "answer" else (1 - share) / 4) for segment in SEGMENTS]
        rows.append([[[sums, sums, sums, sums, sums]]])
    scores = task.score(rows)
    whole = {row.name: row for row in scores.measurements if not row.at}["signed attention on the answer"]
    assert whole.value == pytest.approx(0.3)
    values = shares if paired else shares * 3
    assert whole.standard_error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))
    assert (whole.n, whole.units) == (9, 3 if paired else None)
    assert len(scores.items) == len(values)


def test_needles_asked_of_one_document_are_not_independent(oracle, toy_shards):
    """Both answers of a document are right or both wrong: the interval is that of documents, in a cell and over all."""
    changes = {"cities": "seen", "paired": True, "lengths": [128], "needles": [[2, 2]], "depths": [0, 1]}
    task = test_needle_eval.drawn(toy_shards, replace(test_needle_eval.GRID, documents=6, **changes))
    answers = [answer for _, answer in task.answer(oracle, task.requests)]
    wrong = [[0] * len(answer) if index % 12 < 4 else answer for index, answer in enumerate(answers)]
    scores = task.score(wrong)
    for row in (row for row in scores.measurements if row.name in ("accuracy", COPYING)):
        assert row.value == pytest.approx(2 / 3)
        assert (row.units, row.standard_error) == (6, pytest.approx(np.std([0, 0, 1, 1, 1, 1], ddof=1) / math.sqrt(6)))
        assert (row.low, row.high) == pytest.approx(wilson_interval(4, 6))
    for name in ("accuracy", COPYING, LOOKUP):
        items = [(item.score, item.weight) for item in scores.items if item.name.startswith(f"{name} N=2")]
        assert items == [(0, 4)] * 2 + [(4, 4)] * 4


def test_all_right_is_no_certainty_about_other_documents(oracle, toy_shards):
    options = replace(test_needle_eval.GRID, cities="seen", paired=True, needles=[[1, 1]], documents=5)
    task = test_needle_eval.drawn(toy_shards, options)
    scores = task.score([answer for _, answer in task.answer(oracle, task.requests)])
    for row in (row for row in scores.measurements if row.name != CHANCE):
        assert (row.value, row.low, row.high) == (1, pytest.approx(wilson_interval(5, 5)[0]), 1)


def test_documents_of_several_numbers_of_needles_are_different_ones(oracle, toy_shards):
    task = test_needle_eval.drawn(toy_shards, replace(test_needle_eval.GRID, paired=True))
    rows = task.score([answer for _, answer in task.answer(oracle, task.requests)]).measurements
    assert [row.units for row in rows if (row.name, row.at) == ("accuracy", {"cities": "seen"})] == [3 * 4]


def test_questions_about_one_document_are_one_unit():
    items = [Item("qasper", str(i), f"paper {i // 3}", f"{i}?", "r", 9) for i in range(15)]
    rows = [(item, "a", (i // 3 < 2, "")) for i, item in enumerate(items)]
    scores = object.__new__(HallucinationTask).score(rows)
    accuracy = next(row for row in scores.measurements if row.name == "accuracy")
    assert (accuracy.n, accuracy.units, accuracy.value) == (15, 5, 0.4)
    assert accuracy.standard_error == pytest.approx(np.std([1, 1, 0, 0, 0], ddof=1) / math.sqrt(5))
    assert [(item.item, item.weight) for item in scores.items] == [(f"qasper/{i}", 3) for i in range(0, 15, 3)]


def test_filters_and_shots_of_lm_eval_are_figures_of_their_own():
    samples = [
        {"metrics": ["exact_match"], "exact_match": 1.0, "filter": name, "doc_id": number}
        for name in ("strict", "flexible")
        for number in range(4)
    ]
    found = [row for shots in (0, 5) for row in _items({"samples": {"gsm8k": samples}, "higher_is_better": {}}, shots)]
    assert len({row["name"] for row in found}) == 4
    for name in {row["name"] for row in found}:
        assert [row["item"] for row in found if row["name"] == name] == [f"document {i}" for i in range(4)]


def test_a_unit_is_counted_once_whatever_its_size():
    values = [1.0, 1.0, 1.0, 4.0, 5.0]
    row = mean("m", "u", values, {}, units=["a", "a", "a", "b", "c"])
    residuals = [3 - 3 * 2.4, 4 - 2.4, 5 - 2.4]
    assert (row.value, row.n, row.units) == (pytest.approx(2.4), 5, 3)
    assert row.standard_error == pytest.approx(math.sqrt(sum(r * r for r in residuals) * 3 / 2) / 5)
    assert mean("m", "u", values, {}, units=list("abcde")) == mean("m", "u", values, {})
    right = [True, False, True, True]
    assert proportion("p", right, {}, units=list("abcd")) == proportion("p", right, {})


def test_a_mean_over_sets_has_the_error_of_a_mean_of_independent_shares():
    rows = [proportion("accuracy", [True] * k + [False] * (20 - k), {"set": str(k)}) for k in (5, 12, 17)]
    whole = mean_of_sets(rows)
    assert whole.value == pytest.approx(34 / 60)
    assert whole.standard_error == pytest.approx(math.hypot(*(row.standard_error for row in rows)) / 3)


def test_a_mean_over_sets_has_width_where_every_answer_is_right():
    rows = [proportion("accuracy", [True] * n, {"set": str(n)}) for n in (10, 30)]
    whole = mean_of_sets(rows)
    below = [1 - wilson_interval(n, n)[0] for n in (10, 30)]
    assert (whole.value, whole.high) == (1, 1)
    assert whole.low == pytest.approx(1 - math.hypot(*below) / 2)
    mixed = [proportion("accuracy", [True] * 9 + [False], {"set": "a"}), proportion("accuracy", [True], {"set": "b"})]
    result = task_result("math", "m", [*mixed, mean_of_sets(mixed)])
    assert [text for _, text in summary_rows(result)] == ["0.9000 (9 of 10)", "1.0000 (1 of 1)", "0.9500"]

"""Comparisons of a page: every two models, settings of one model, Holm's correction, rounding, intervals over seeds."""

import itertools
import math
import statistics

import numpy as np
import pytest
import scipy.stats

from difftransformer_lab.analysis.page import suite_page
from difftransformer_lab.analysis.tasks import corrected_pairs, measurement_table, pooled, task_pairs
from difftransformer_lab.evals.scores import mean, proportion
from difftransformer_lab.results import ItemScore, Measurement
from tests.support.task_results import task_result


def all_tables(page):
    return [table for section in page.sections for table, _ in section.every_table]


def scored(model, values, name="nll", task="harness", **options):
    items = [ItemScore(name=name, item=f"window {i}", score=float(value)) for i, value in enumerate(values)]
    return task_result(task, model, [mean(name, "nats/token", list(values), {})], scores=items, **options)


def test_a_suite_compares_every_two_models() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(3, 1, 30)
    shifts = {"a": 0.0, "b": 0.5, "c": 0.5}
    results = [scored(model, base + shift + rng.normal(0, 0.05, 30)) for model, shift in shifts.items()]
    found = corrected_pairs({"loss": task_pairs(results)})["loss"]
    assert [pair.compared for pair in found] == ["a minus b", "a minus c", "b minus c"]
    page = suite_page("mine", {"loss": results}, [])
    (table,) = (table for table in all_tables(page) if table.name == "loss_pairs")
    column = table.header().index("result")
    assert [row[column] for row in table.rows] == ["second higher", "second higher", "undecided"]
    assert "3 comparisons" in " ".join(table.notes)


def test_a_suite_shows_the_first_measure_of_each_task_for_every_model() -> None:
    """The first task has no result of b, the second none of c."""
    by_model = {model: scored(model, [value] * 3) for model, value in (("x/a", 1.0), ("y/b", 2.0), ("z/c", 3.0))}
    parts = {"one": ["x/a", "z/c"], "two": ["x/a", "y/b"]}
    by_task = {label: [by_model[model] for model in models] for label, models in parts.items()}
    missing = [("two", "z/c", "too long"), ("one", "y/b", "too long")]
    page = suite_page("mine", by_task, missing, [*by_model, "never/opened"])
    (table,) = page.sections[0].tables
    assert table.header() == ["task", "measure", "a", "b", "c"]
    assert [row[2:] for row in table.rows] == [["1.000", "not measured", "3.000"], ["1.000", "2.000", "not measured"]]
    assert page.gaps == ["two on z/c: too long", "one on y/b: too long"]


def test_p_values_are_corrected_for_all_tasks_of_a_page() -> None:
    rng = np.random.default_rng(3)
    found = {
        label: [scored(model, rng.normal(3, 1, 25)) for model in ("a", "b")] for label in ("first", "second", "third")
    }
    raw = {label: task_pairs(results)[0].difference.p_value for label, results in found.items()}
    order = sorted(raw, key=raw.get)
    expected = list(itertools.accumulate((min(1, (3 - place) * raw[label]) for place, label in enumerate(order)), max))
    corrected = corrected_pairs({label: task_pairs(results) for label, results in found.items()})
    assert [corrected[label][0].difference.p_holm for label in order] == pytest.approx(expected)


def test_of_pages_with_twenty_null_figures_few_claim_a_difference() -> None:
    """Without a correction two pages of three would; the bound is the 99.9 % point of a binomial of 5 %."""
    rng, pages, claimed = np.random.default_rng(4), 40, 0
    for _ in range(pages):
        figures = rng.exponential(size=(20, 2, 10))
        found = {str(i): [scored(model, row) for model, row in zip("ab", figure, strict=True)]
                 for i, figure in enumerate(figures)}  # fmt: skip
        tables = all_tables(suite_page("null", found, []))
        claimed += any("higher" in cell for table in tables if table.name.endswith("_pairs")
                       for row in table.rows for cell in row)  # fmt: skip
    assert claimed <= scipy.stats.binom(pages, 0.05).ppf(0.999)


def test_fewer_bits_are_paired_with_the_most_bits_over_the_same_items() -> None:
    rng = np.random.default_rng(5)
    fine = rng.normal(3, 1, 24)
    worse = {16: 0 * fine, 8: np.tile([0.01, -0.01], 12), 4: rng.normal(0.4, 0.05, 24)}
    items = [
        ItemScore(name=f"nll, {bits} bits by row", item=f"window {i}", score=float(value))
        for bits, change in worse.items()
        for i, value in enumerate(fine + change)
    ]
    result = task_result("quantized", "m", [], scores=items, bits=[16, 4, 8], granularity=["row"])
    found = {pair.compared: pair for pair in corrected_pairs({"bits": task_pairs([result])})["bits"]}
    assert list(found) == ["m: 8 bits minus 16 bits by row", "m: 4 bits minus 16 bits by row"]
    four = found["m: 4 bits minus 16 bits by row"]
    assert (four.name, four.items) == ("nll", 24)
    assert four.difference.mean == pytest.approx(worse[4].mean())
    half = scipy.stats.t(23).ppf(0.975) * worse[4].std(ddof=1) / math.sqrt(24)
    assert four.difference.high - four.difference.low == pytest.approx(2 * half, rel=0.25)
    assert four.difference.low > 0
    assert found["m: 8 bits minus 16 bits by row"].difference.p_holm > 0.05


@pytest.mark.parametrize(("value", "error", "text"), [
    (1.1, 0.028, "1.10 ± 0.03"), (3.14159, 0.0996, "3.1 ± 0.1"), (1234.5, 17.0, "1234 ± 17"), (0.5, 0.1, "0.5 ± 0.1"),
    (2.0, 0.00051, "2.0000 ± 0.0005"), (7.25, None, "7.25"), (1.0, 0.0, "1 ± 0"),
])  # fmt: skip
def test_a_value_and_its_uncertainty_have_the_same_decimals(value, error, text) -> None:
    row = Measurement(name="m", unit="u", value=value, standard_error=error, n=50, at={})
    table = measurement_table([task_result("harness", "a", [row])])
    assert table.rows[0][1] == text


@pytest.mark.parametrize(("right", "n", "text"), [(5, 10, "0.50 [0.24, 0.76]"), (5000, 10_000, "0.50 [0.49, 0.51]")])
def test_a_share_has_the_decimals_of_its_interval(right, n, text) -> None:
    row = proportion("accuracy", [True] * right + [False] * (n - right), {})
    assert measurement_table([task_result("harness", "a", [row])]).rows[0][1] == text


def test_few_items_are_named() -> None:
    for n, named in ((19, True), (20, False)):
        results = [scored(model, np.random.default_rng(n).normal(size=n)) for model in "ab"]
        tables = [
            table
            for table in all_tables(suite_page("mine", {"loss": results}, []))
            if table.name not in ("all", "models")
        ]
        assert ["ewer than 20 items" in " ".join(table.notes) for table in tables] == [named] * 2
    row = proportion("accuracy", [True, False] * 20, {}, units=[i // 4 for i in range(40)])
    table = measurement_table([task_result("needle", "a", [row])])
    assert table.rows[0][-1] == "40 in 10 units"
    assert "fewer than 20" in " ".join(table.notes)


def test_a_share_over_seeds_has_students_interval_over_seeds() -> None:
    shares = [0.98, 0.31, 0.9]
    rows = [proportion("accuracy", [True] * round(100 * p) + [False] * round(100 - 100 * p), {}) for p in shares]
    (row,) = pooled([task_result("needle", "a", [row]) for row in rows], "A").measurements
    half = 4.302653 * statistics.stdev(shares) / math.sqrt(3)
    assert (row.value, row.n) == (pytest.approx(0.73), 300)
    assert row.standard_error == pytest.approx(statistics.stdev(shares) / math.sqrt(3))
    assert (row.low, row.high) == (max(0.0, 0.73 - half), 1.0)
    (alike,) = pooled([task_result("needle", "a", [rows[0]])] * 3, "A").measurements
    assert (alike.low, alike.high) == (None, None)

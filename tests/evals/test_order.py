"""Order of demonstrations: a planted bias is measured exactly, and the floor is what sampling alone would give."""

import itertools
import math

import numpy as np
import pytest

from difftransformer.errors import EvaluationError
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.tasks.order import Options, OrderTask, binomial_margin, permuted_margin
from tests.support.classification import Reader, figures, truth, write_labelled

LABELS = ("a", "b", "c")
ASKED = {"a": 6, "b": 3, "c": 1}  # how many test items a class has, all of them asked


@pytest.fixture
def files(tmp_path):
    return {
        "train_file": write_labelled(tmp_path / "train.jsonl", dict.fromkeys(LABELS, 9)),
        "test_file": write_labelled(tmp_path / "test.jsonl", ASKED),
        "items": 10,
    }


def shown_labels(prompt):
    return [block.partition("\nLabel: ")[2] for block in prompt.split("\n==\n")[:-1]]


def evaluate(choose, **options):
    model = Reader(choose, LABELS)
    task = OrderTask(Options(**options), model)
    return task, run_task(model, task)


def first_prompts(task, tokenizer):
    """The prompt of each order's first item."""
    return [tokenizer.decode(request.prompt) for request in task.requests[:: len(task.items)]]


def value(scores, name):
    (row,) = figures(scores, name)
    return row.value


def test_the_oracle_has_no_margin(files):
    _, scores = evaluate(truth, **files, shots=2)
    assert [row.value for row in figures(scores, "accuracy")] == [1.0] * 10
    for name in ("best minus worst", "sd over orders"):
        assert value(scores, name) == value(scores, f"{name}, binomial floor") == 0.0
    assert value(scores, "mean accuracy") == 1.0
    assert [(item.score, item.weight) for item in scores.items] == [(10.0, 10.0)] * 10


def test_a_uniform_model_is_at_the_floor(files):
    """Over 40 runs the mean margin is the floor within three of its standard errors; accuracy is chance."""
    rng = np.random.default_rng(0)
    runs = [evaluate(lambda prompt: LABELS[rng.integers(3)], **files, shots=1)[1] for _ in range(40)]
    margins = [value(scores, "best minus worst") for scores in runs]
    floor = np.mean([value(scores, "best minus worst, binomial floor") for scores in runs])
    assert abs(np.mean(margins) - floor) < 3 * np.std(margins, ddof=1) / 40**0.5
    assert floor > 0.3
    rows = [row for scores in runs for row in figures(scores, "mean accuracy")]
    assert sum(abs(row.value - 1 / 3) < 2 * row.standard_error for row in rows) > 35


@pytest.mark.parametrize("form", ["random", "alternating"])
def test_a_model_that_repeats_the_last_label(form, files):
    """Its accuracy in an order is the share of items with the last demonstration's label."""
    task, scores = evaluate(lambda prompt: shown_labels(prompt)[-1], **files, shots=2, format=form, orders=12)
    last = [shown_labels(prompt)[-1] for prompt in first_prompts(task, Reader(None).tokenizer)]
    expected = [ASKED[label] / 10 for label in last]
    assert set(last) == set(LABELS)
    assert [row.value for row in figures(scores, "accuracy")] == expected
    assert [row.at for row in figures(scores, "accuracy")] == [{"order": order} for order in range(12)]
    assert value(scores, "best minus worst") == pytest.approx(0.5)
    mean = sum(expected) / 12
    assert value(scores, "mean accuracy") == pytest.approx(mean)
    assert value(scores, "sd over orders") == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in expected) / 11))
    assert value(scores, "sd over orders, binomial floor") == pytest.approx(math.sqrt(mean * (1 - mean) / 10))


def test_a_model_that_is_right_behind_one_class_alone(files):
    def choose(prompt):
        return truth(prompt) if shown_labels(prompt)[0] == "b" else {"a": "b", "b": "c", "c": "a"}[truth(prompt)]

    task, scores = evaluate(choose, **files, shots=3)
    right = [shown_labels(prompt)[0] == "b" for prompt in first_prompts(task, Reader(None).tokenizer)]
    assert 0 < sum(right) < 10
    assert [row.value for row in figures(scores, "accuracy")] == right
    assert value(scores, "best minus worst") == 1.0
    assert value(scores, "mean accuracy") == sum(right) / 10


@pytest.mark.parametrize("form", ["random", "alternating"])
def test_orders_of_the_same_demonstrations(form, files):
    model = Reader(truth, LABELS)
    task = OrderTask(Options(**files, shots=4, format=form), model)
    assert len(task.requests) == 10 * {"random": 10, "alternating": 30}[form]
    prompts = first_prompts(task, model.tokenizer)
    blocks = [tuple(prompt.removeprefix("<|endoftext|>").split("\n==\n")[:-1]) for prompt in prompts]
    assert len(set(blocks)) == len(blocks)
    assert len({frozenset(shown) for shown in blocks}) == 1
    assert len(blocks[0]) == 12
    turns = [[shown_labels(prompt)[begin : begin + 3] for begin in (0, 3, 6, 9)] for prompt in prompts]
    alternate = [all(turn == own[0] and len(set(turn)) == 3 for turn in own) for own in turns]
    assert all(alternate) if form == "alternating" else not any(alternate)
    assert len({tuple(own[0]) for own in turns}) > 2


def test_the_floor_is_exact():
    """Against every outcome of two draws of three trials, and a million random shares."""
    p = 0.3
    each = [math.comb(3, k) * p**k * (1 - p) ** (3 - k) for k in range(4)]
    expected = sum(each[a] * each[b] * abs(a - b) / 3 for a, b in itertools.product(range(4), repeat=2))
    assert binomial_margin(p, 3, 2) == pytest.approx(expected, rel=1e-12)
    draws = np.random.default_rng(0).binomial(100, 0.746, (100_000, 10))
    margins = (draws.max(1) - draws.min(1)) / 100
    assert abs(binomial_margin(0.746, 100, 10) - margins.mean()) < 4 * margins.std() / 100_000**0.5
    # Thirty normal draws are 4.0855 standard deviations apart (L. H. C. Tippett, 1925).
    assert binomial_margin(0.746, 20_000, 30) == pytest.approx(4.0855 * math.sqrt(0.746 * 0.254 / 20_000), rel=2e-3)
    assert binomial_margin(0.0, 9, 5) == binomial_margin(1.0, 9, 5) == 0.0


def test_what_fits(files):
    def task(context_tokens, **options):
        return OrderTask(Options(**files | options), Reader(truth, LABELS, context_tokens))

    longest = max(len(request.prompt) + 3 for request in task(10**6, shots=4, orders=2).requests)
    assert task(10**6).at == {"format": "random", "shots": 8, "demonstrations": 24}
    assert task(longest).at["shots"] == 4
    assert task(longest - 1).at["shots"] == 2
    with pytest.raises(EvaluationError, match=r"shots=5: .*at most 12 demonstrations do, 4 of each class"):
        task(longest, shots=5)
    with pytest.raises(EvaluationError, match=r"shots=10: the largest class has 9"):
        task(longest, shots=10)


def test_the_permutation_floor_is_the_mean_over_all_exchanges_within_items() -> None:
    """Two orders and three items of which one is right in both: exchanges of the other two, by hand."""
    floor, p_value = permuted_margin([[True, True, True], [True, False, False]], permutations=20_000)
    assert floor == pytest.approx((2 + 0 + 0 + 2) / 4 / 3, abs=0.01)
    assert p_value == pytest.approx(0.5, abs=0.015)


def test_items_that_are_always_right_or_wrong_have_no_floor() -> None:
    """The binomial floor of such answers is far above zero: it takes all items as equally hard."""
    right = [[index < 50 for index in range(100)]] * 10
    assert permuted_margin(right) == (0.0, 1.0)
    assert binomial_margin(0.5, 100, 10) > 0.1


def test_the_permutation_test_finds_a_bad_order_below_the_binomial_floor() -> None:
    """Eight items that only one order has wrong, among items of which the order changes nothing."""
    right = [[index < 50 or (index < 58 and order > 0) for index in range(100)] for order in range(10)]
    floor, p_value = permuted_margin(right)
    assert p_value == pytest.approx(1e-4)
    assert floor < 0.08 < binomial_margin(0.572, 100, 10)


def test_the_permutation_test_rarely_finds_an_order_where_none_matters() -> None:
    rng = np.random.default_rng(6)
    hard = rng.random(30)
    p_values = [permuted_margin(rng.random((6, 30)) < hard, permutations=199, seed=run)[1] for run in range(200)]
    assert np.mean(np.array(p_values) <= 0.05) < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    assert np.mean(p_values) == pytest.approx(0.55, abs=0.12)  # above 0.5, because margins tie

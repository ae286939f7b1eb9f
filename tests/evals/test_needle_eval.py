"""Retrieval: an oracle scores everything, a guesser scores chance, and every model gets the same documents."""

import pytest
import torch

from difftransformer.data import CITIES_SEEN, CITIES_UNSEEN
from difftransformer.errors import ConfigError, DataError
from difftransformer.evals import NeedleConfig, evaluate_needle
from difftransformer.evals.tasks.needle import needle_cells
from difftransformer.statistics import wilson_interval
from tests.support.fakes import TensorModel

GRID = NeedleConfig(
    lengths_tokens=[128, 200], needles=[(1, 1), (2, 2), (4, 2)], depths=[0.0, 0.5, 1.0], documents=4, digits=3
)


def test_the_oracle_is_right_in_every_cell(oracle, toy_shards):
    result = evaluate_needle(oracle, toy_shards, GRID, context_tokens=64)
    assert len(result.cells) == 2 * 3 * 3 * 2
    assert {(c.length_tokens, c.needles, c.asked, c.depth, c.cities) for c in result.cells} == {
        (length, needles, asked, depth, cities)
        for length in (128, 200)
        for needles, asked in ((1, 1), (2, 2), (4, 2))
        for depth in (0.0, 0.5, 1.0)
        for cities in ("seen", "unseen")
    }
    for cell in result.cells:
        assert cell.trials == 4 * cell.asked
        assert cell.correct == cell.trials, cell


def test_a_right_city_with_one_wrong_digit_is_wrong(oracle, toy_shards):
    honest = oracle.continue_greedily

    def slip(prompts, tokens):
        made = honest(prompts, tokens)
        digits = toy_shards.tokenizer.encode("\n0123456789")[1:]
        last = made[:, -1]
        made[:, -1] = torch.where(last == digits[7], digits[8], digits[7])
        return made

    oracle.continue_greedily = slip
    result = evaluate_needle(oracle, toy_shards, GRID, context_tokens=64)
    assert sum(cell.correct for cell in result.cells) == 0


def test_a_guesser_scores_chance(guesser, toy_shards):
    """300 documents of each kind; the interval of 95 % holds chance with this seed, and is far from 1."""
    config = NeedleConfig(needles=[(1, 1)], depths=[0.5], documents=300, digits=1)
    result = evaluate_needle(guesser(1), toy_shards, config, context_tokens=64)
    assert result.chance == pytest.approx(0.1)
    correct, trials = (sum(getattr(cell, name) for cell in result.cells) for name in ("correct", "trials"))
    assert trials == 600
    low, high = wilson_interval(correct, trials)
    assert low <= 0.1 <= high
    assert 0.05 < low < high < 0.2


def test_cities_are_kept_apart(toy_shards):
    names = {"seen": set(), "unseen": set()}
    for cell in needle_cells(toy_shards, GRID, context_tokens=64):
        for question in cell.questions:
            text = toy_shards.tokenizer.decode(question.prompts[0])
            names[cell.cities] |= {city for city in CITIES_SEEN + CITIES_UNSEEN if f"magic {city} number" in text}
    assert names["seen"] <= set(CITIES_SEEN)
    assert names["unseen"] <= set(CITIES_UNSEEN)
    assert len(names["seen"]) > 20
    assert len(names["unseen"]) > 10


def test_every_model_gets_the_same_documents_and_another_seed_others(toy_shards, oracle):
    def prompts(config):
        seen = []
        honest = type(oracle)(toy_shards.tokenizer)

        class Listening(TensorModel):
            def continue_greedily(self, prompts, tokens):
                seen.append(prompts.clone())
                return honest.continue_greedily(prompts, tokens)

        evaluate_needle(Listening(), toy_shards, config, context_tokens=96)
        return seen

    config = NeedleConfig(needles=[(2, 1)], documents=3, digits=3)
    first, second = prompts(config), prompts(config)
    other = prompts(NeedleConfig(needles=[(2, 1)], documents=3, digits=3, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    # No two cells share their documents either.
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


def test_prompt_and_answer_fit_into_the_length(toy_shards):
    for cell in needle_cells(toy_shards, GRID, context_tokens=64):
        for question in cell.questions:
            assert {len(prompt) for prompt in question.prompts} == {cell.length_tokens - 3 - 2}


def test_needles_that_do_not_fit(toy_shards, oracle):
    config = NeedleConfig(lengths_tokens=[40], needles=[(6, 1)], documents=1, digits=7)
    with pytest.raises(DataError, match="longer than the context"):
        evaluate_needle(oracle, toy_shards, config, context_tokens=64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"needles": [(1, 2)]}, r"needles=\[1, 2\]"),
        ({"needles": [(0, 0)]}, r"needles=\[0, 0\]"),
        ({"depths": [1.5]}, r"depths=\[1.5\]"),
        ({"documents": 0}, "documents=0"),
        ({"digits": 10}, "digits=10"),
        ({"lengths_tokens": [0]}, "lengths_tokens"),
        ({"needles": []}, "needles"),
        ({"depths": []}, "depths"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_impossible_grids_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        NeedleConfig(**fields)

"""Token-equivalents: a difference of held-out losses in tokens, and what is left of it at equal time.

Losses of different scales do not compare in nats, so a difference is divided by what the reference's own loss falls with each
doubling of its tokens, from its runs of another length on the same seeds and data. A difference of d doublings is a change of
2^d - 1 in the tokens for the same loss. An arm whose step takes r times as long sees 1/r of the tokens in the same time, and
loses log2(r) doublings.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..results import PairedDifference, RunRecord, StudyFigure, figure_of
from ..statistics import mean_and_standard_error, paired_difference, ratio_of_means, sum_of
from .comparisons import timed_seeds
from .reading import Evidence, Point

TASK = "perplexity"
"""The evaluation whose figures are losses per token or byte."""

Pool = Mapping[str, Sequence[RunRecord]]
"""Runs by what runs of different lengths have in common (see `pooled_runs`)."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """A difference of losses in doublings of the reference's tokens; negative where fewer tokens are needed.

    Attributes:
        gain: What the reference's loss falls with each doubling of its tokens, in the unit of the figure.
        time: The same difference at equal time; None where no times can be compared.
    """

    gain: float
    tokens: PairedDifference
    time: PairedDifference | None


def pooled_runs(studies: Iterable[Evidence]) -> Pool:
    """Return the runs of several studies by their seed, data, model and optimizer."""
    pool: dict[str, list[RunRecord]] = {}
    for evidence in studies:
        for _, _, seed, run in evidence.every_run():
            pool.setdefault(_alike(seed, run), []).append(run)
    return pool


def gains(pool: Pool, runs: Mapping[int, RunRecord], figure: StudyFigure) -> dict[int, float]:
    """Return what a figure falls with each doubling of the tokens, by seed, from runs of another length, if there are any.

    Of several other lengths, the one nearest to half of the tokens is taken.
    """
    found: dict[float, dict[int, float]] = {}
    for seed, run in runs.items():
        for other in pool.get(_alike(seed, run), ()):
            end, there = figure_of(run, figure), figure_of(other, figure)
            if other.train_tokens != run.train_tokens and end is not None and there is not None:
                doublings = math.log2(run.train_tokens / other.train_tokens)
                found.setdefault(doublings, {})[seed] = (there - end) / doublings
    return found[min(found, key=lambda doublings: abs(doublings - 1))] if found else {}


def worth(
    differences: Mapping[int, float], gained: Mapping[int, float], log2_times: Sequence[float] = ()
) -> Worth | None:
    """Return differences of losses in doublings; None where the gain of a doubling is not known or not above zero.

    Args:
        differences: An arm's loss minus another's, by seed.
        gained: What the reference's loss falls with each doubling, by seed (`gains`).
        log2_times: Logarithms to base 2 of the ratio of their times for a step; a single one counts as exact.
    """
    if not differences or not gained or (gain := mean_and_standard_error([*gained.values()]).mean) <= 0:
        return None
    tokens = ratio_of_means(differences, gained)
    slower = paired_difference(log2_times, [0.0] * len(log2_times)) if log2_times else None
    return Worth(gain=gain, tokens=tokens, time=sum_of(tokens, slower) if slower else None)


def log2_times(evidence: Evidence, arm: str, other: str, point: Point) -> list[float]:
    """Return the logarithms to base 2 of the ratio of two arms' times for a step: measured in turns, else of their runs."""
    seconds = {row.model: row.train_step_seconds for row in evidence.index.costs}
    if (first := seconds.get(arm)) and (second := seconds.get(other)):
        return [math.log2(first / second)]
    seeds = timed_seeds(evidence, arm, other, point)
    pairs = ((evidence.at(arm, point)[seed], evidence.at(other, point)[seed]) for seed in seeds)
    return [math.log2(own.step_seconds / others.step_seconds) for own, others in pairs]


def tokens_cells(difference: PairedDifference | None) -> list[str]:
    """Return a difference in doublings as a change of the tokens in percent, with its interval; empty for None."""
    if difference is None:
        return ["", "", ""]
    bounds = (difference.mean, difference.low, difference.high)
    mean, low, high = ("" if one is None else f"{100 * math.expm1(one * math.log(2)):+.1f}" for one in bounds)
    return [f"{mean} %", low, high]


def worth_words(found: Worth | None) -> str:
    """Return a difference in percent of the tokens, and at equal time; empty for None."""
    parts = [tokens_cells(one) for one in ((found.tokens, found.time) if found else ())]
    said = [f"{mean} [{low}, {high}]" if low else mean for mean, low, high in parts if mean]
    return "; at equal time ".join(said)


def _alike(seed: int, run: RunRecord) -> str:
    parts = (run.recipe.get("model") or {}, run.recipe.get("training", {}).get("optimizer") or {})
    stated = [{key: value for key, value in part.items() if value is not None} for part in parts]
    return json.dumps(
        [seed, run.data_sha256, *stated], sort_keys=True
    )  # records of other versions state other defaults

"""Synthetic comparisons: numbers made by formula and a seed, so that every state of the page can be drawn."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from difftransformer_lab.analysis import Records
from difftransformer_lab.evals.scores import details, mean, proportion
from difftransformer_lab.results import (
    ArmSize,
    BaselineNll,
    CostRow,
    Curve,
    Grid,
    ItemScore,
    Measurement,
    RunRecord,
    StudyArm,
    TaskResult,
    headline_figures,
)
from difftransformer_lab.studies.records import run_figures
from tests.support.environment import ENVIRONMENT
from tests.support.simulated_study import study
from tests.support.task_results import task_result as plain_result

LABELS = {"diff": "DIFF", "softmax": "Transformer", "diff_v2": "DIFF V2"}
STEPS = 600


def task_result(task: str, model: str, measurements: list[Measurement], **parts: Any) -> TaskResult:
    result = plain_result(task, model, measurements, data="validation", **parts)
    made = {"choices": ["A choice."], "command": f"difftransformer eval {task}", "created": "2026-01-02T03:04:05+00:00"}
    return dataclasses.replace(result, environment=ENVIRONMENT, **made)


def loss_result(model: str, loss: float, rng: np.random.Generator) -> TaskResult:
    """Eight windows of 512 tokens, of one byte each."""
    nats = [512 * (loss + rng_of(k).normal(0, 0.1) + rng.normal(0, 0.01)) for k in range(8)]
    bits = [value / math.log(2) for value in nats]
    figures = [
        mean("nll", "nats/token", nats, {}, weights=[512.0] * 8, better="lower"),
        mean("bits per byte", "bits/byte", bits, {}, weights=[512.0] * 8, better="lower"),
    ]
    for start in [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]:
        value = loss + 2.0 / math.sqrt(start + 1) + float(rng.normal(0, 0.01))
        at = {"start": start, "end": 2 * start or 1}
        figures += details([mean("nll by position", "nats/token", [value] * 2, at, better="lower")])
    items = [
        ItemScore(name=name, item=f"window {k}", score=score, weight=512.0)
        for name, scores in (("nll", nats), ("bits per byte", bits))
        for k, score in enumerate(scores)
    ]
    return task_result("perplexity", model, figures, scores=items)


def needle_result(
    model: str, accuracy: float, counts: int, lengths: tuple[int, ...], rng: np.random.Generator
) -> TaskResult:
    """Cells of 20 trials for each needle asked, and all of a kind of city together."""
    cells: dict[str, list[bool]] = {"seen": [], "unseen": []}
    rows = []
    for length in lengths:
        for count, asked in [(1, 1), (2, 2), (4, 2), (6, 2)][:counts]:
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                for cities, found in cells.items():
                    p = np.clip(accuracy - 0.06 * (count - 1) + 0.1 * depth - (0.15 if cities == "unseen" else 0), 0, 1)
                    right = rng.random(20 * asked) < p
                    found += right.tolist()
                    at = {"cities": cities, "needles": count, "asked": asked, "length_tokens": length, "depth": depth}
                    rows += details([proportion("accuracy", right.tolist(), at)])
    heads = [proportion("accuracy", found, {"cities": cities}) for cities, found in cells.items()]
    return task_result("needle", model, [*heads, *rows], digits=4)


def allocation_result(model: str, rng: np.random.Generator) -> TaskResult:
    rows = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        for form in ("signed", "absolute", "positive"):
            focus = {"diff": 0.32, "softmax": 0.05}.get(model, 0.2) * (0.6 if form != "signed" else 1.0) + 0.05 * depth
            noise = (1 - focus) * ({"diff": -0.04, "softmax": 0.5}.get(model, 0.1) if form == "signed" else 0.4)
            rest = 1 - focus - noise
            around = noise / 2
            shares = {"first": 0.4 * rest, "before": around, "answer": focus, "after": around, "query": 0.6 * rest}
            for segment, share in shares.items():
                values = (share + rng.normal(0, 0.004, 4)).tolist()
                at = {"depth": depth, "form": form, "segment": segment}
                rows += details([mean("attention share", "share", values, at)])
    head = mean("signed attention on the answer", "share", rng.normal(0.3, 0.01, 4).tolist(), {}, better="higher")
    at = {"depth": 0.5, "form": "absolute", "segment": "answer"}
    grid = Grid(name="attention by layer and head", at=at, values=[[0.1, 0.2], [0.3, 0.4]])
    return task_result("allocation", model, [head, *rows], documents=50, needles=6, grids=[grid])


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng(list(seed))


def make_run(
    model: str, seed: int, loss: float, layers: int, evaluations: Callable[[np.random.Generator], dict[str, TaskResult]]
) -> RunRecord:
    rng = rng_of(seed, len(model))
    loss += float(rng.normal(0, 0.004))

    def curve(every: int, noise: float) -> Curve:
        steps = list(range(0, STEPS + 1, every))
        fall = [(5.5 - loss) * math.exp(-step / 60) + 0.25 * math.exp(-step / 300) for step in steps]
        return Curve(steps=steps, values=[loss + one + float(rng.normal(0, noise)) for one in fall])

    lambdas = [] if model == "softmax" else [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(layers)]
    found = {"perplexity": loss_result(model, loss, rng), **evaluations(rng)}
    return RunRecord(
        recipe={
            "name": "bytes-small",
            "model": {"attention_type": model, "num_hidden_layers": layers},
            "training": {"steps": STEPS, "learning_rate": 0.001, "betas": [0.9, 0.95], "seed": seed},
        },
        data_sha256="0" * 64,
        created="2026-01-02T03:04:05+00:00",
        environment=ENVIRONMENT,
        parameters=SIZES[model],
        train_tokens=4_915_200,
        train_seconds=301.5 + seed,
        step_seconds=0.5,
        total_seconds=310.0,
        figures=[figure for name, result in found.items() for figure in run_figures(name, result)],
        curves={
            "train_loss_nats": curve(2, 0.03),
            "validation_loss_nats": curve(30, 0.002),
            **{
                f"lambda {layer}": Curve(steps=[0, STEPS], values=[value, value + 0.1 * math.sin(3 * layer + seed)])
                for layer, value in enumerate(lambdas)
            },
        },
        evaluations=found,
    )


SIZES = {"diff": 3_157_224, "softmax": 3_157_000, "diff_v2": 3_400_000}


def make_costs(models: tuple[str, ...]) -> list[CostRow]:
    costs = [
        CostRow(
            model=model,
            label=LABELS[model],
            parameters=SIZES[model],
            train_step_seconds=0.412 + 0.05 * (model == "diff"),
            prefill_tokens_per_second=10234.5,
            decode_tokens_per_second=151.25,
            peak_training_bytes=912_345_678,
            weights_and_kv_bytes_4k=2 * SIZES[model] + 4096 * 3072,
            weights_and_kv_bytes_64k=2 * SIZES[model] + 65536 * 3072,
        )
        for model in models
    ]
    unmeasured = ("train_step_seconds", "prefill_tokens_per_second", "decode_tokens_per_second", "peak_training_bytes")
    smaller = {"model": "diff_62", "label": "DIFF at 62 %", "parameters": 1_957_340} | dict.fromkeys(unmeasured)
    return [*costs, dataclasses.replace(costs[0], **smaller)]


def make_comparison(
    seeds: int = 3,
    advantage: float = 0.05,
    needle: bool = True,
    allocation: bool = True,
    models: tuple[str, ...] = ("diff", "softmax"),
    layers: int = 6,
    needle_counts: int = 4,
    lengths: tuple[int, ...] = (512,),
) -> Records:
    """A comparison in which models[0] is better by `advantage` nats a token, and finds more needles if so."""

    def make(model: str, point: tuple[str, ...], seed: int) -> RunRecord:
        behind = advantage * min(models.index(model), 1)

        def evaluations(rng: np.random.Generator) -> dict[str, TaskResult]:
            found = {}
            if needle:
                found["needle"] = needle_result(model, 0.75 - 6 * behind, needle_counts, lengths, rng)
            if allocation:
                found["allocation"] = allocation_result(model, rng)
            return found

        return make_run(model, seed, 0.87 + behind, layers, evaluations)

    arms = [StudyArm(name=model, label=LABELS[model]) for model in models]
    per_token = {"train_flops_per_token": 19_267_584, "kv_bytes_per_token": 3072}
    sizes = [ArmSize(arm=model, attention_type=model, parameters=SIZES[model], **per_token) for model in models]
    return study(
        arms,
        headline_figures(make(models[0], (), 0).evaluations),
        seeds,
        make,
        name="bytes-small",
        preset="compare",
        question="DIFF against Transformer: bytes-small",
        command=f"difftransformer compare recipes/bytes-small.yaml --seeds {seeds}",
        sizes=sizes,
        costs=make_costs(models),
        baselines=[BaselineNll(name="byte bigram", bits_per_byte=3.4521)],
    )


@pytest.fixture(scope="session")
def make() -> Callable[..., Records]:
    return make_comparison


@pytest.fixture(scope="session")
def comparison() -> Records:
    """Three seeds; DIFF wins."""
    return make_comparison()

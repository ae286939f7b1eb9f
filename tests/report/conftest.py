"""Synthetic comparisons: numbers made by formula and a seed, so that every state of the report can be drawn."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from difftransformer.results import (
    AllocationResult,
    AllocationShare,
    BaselineNll,
    Comparison,
    CostRow,
    Curve,
    DocumentNll,
    Environment,
    MetricComparison,
    ModelSummary,
    NeedleCell,
    NeedleResult,
    NllResult,
    PositionBucket,
    RunResult,
)
from difftransformer.statistics import bootstrap_difference, mean_and_standard_error, paired_difference

ENVIRONMENT = Environment(
    difftransformer="0.1.0",
    python="3.11.2",
    torch="2.13.0+cpu",
    transformers="5.17.0",
    platform="Linux-6.1-x86_64",
    processor="Example CPU, 2 cores",
    device="cpu",
    threads=2,
)
LABELS = {"diff": "DIFF", "softmax": "Transformer", "diff_v2": "DIFF V2"}
STEPS = 600


def make_run(
    model: str,
    seed: int,
    loss: float,
    accuracy: float,
    layers: int,
    needle: bool,
    allocation: bool,
    needle_counts: int,
    lengths: tuple[int, ...],
) -> RunResult:
    rng = np.random.default_rng([seed, len(model)])
    loss += float(rng.normal(0, 0.004))

    def at(step: float, noise: float) -> float:
        return loss + (5.5 - loss) * math.exp(-step / 60) + 0.25 * math.exp(-step / 300) + float(rng.normal(0, noise))

    train, validation = list(range(0, STEPS + 1, 2)), list(range(0, STEPS + 1, 30))
    starts = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    lambdas = [] if model == "softmax" else [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(layers)]
    lambda_steps = list(range(0, STEPS + 1, 50)) if lambdas else []
    pairs = [(1, 1), (2, 2), (4, 2), (6, 2)][:needle_counts]
    cells = []
    for length in lengths:
        for count, asked in pairs:
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                for cities in ("seen", "unseen"):
                    p = np.clip(accuracy - 0.06 * (count - 1) + 0.1 * depth - (0.15 if cities == "unseen" else 0), 0, 1)
                    trials = 20 * asked
                    cells.append(
                        NeedleCell(
                            length_tokens=length,
                            depth=depth,
                            needles=count,
                            asked=asked,
                            cities=cities,
                            correct=int(rng.binomial(trials, p)),
                            trials=trials,
                        )
                    )
    shares = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        for form in ("signed", "absolute", "positive"):
            focus = {"diff": 0.32, "softmax": 0.05}.get(model, 0.2) * (0.6 if form != "signed" else 1.0) + 0.05 * depth
            noise = (1 - focus) * ({"diff": -0.04, "softmax": 0.5}.get(model, 0.1) if form == "signed" else 0.4)
            rest = 1 - focus - noise
            parts = {
                "first": 0.4 * rest,
                "before": noise * 0.5,
                "answer": focus,
                "after": noise * 0.5,
                "query": 0.6 * rest,
            }
            shares += [
                AllocationShare(
                    depth=depth,
                    form=form,
                    segment=segment,
                    share=share + float(rng.normal(0, 0.004)),
                    standard_error=0.006,
                )
                for segment, share in parts.items()
            ]
    return RunResult(
        model=model,
        seed=seed,
        run=f"runs/example/{model}-seed{seed}",
        train_loss_nats=Curve(steps=train, values=[at(step, 0.03) for step in train]),
        validation_loss_nats=Curve(steps=validation, values=[at(step, 0.002) for step in validation]),
        lambda_steps=lambda_steps,
        lambda_values=[
            [value + 0.1 * math.sin(3 * layer + seed) * step / STEPS for layer, value in enumerate(lambdas)]
            for step in lambda_steps
        ],
        train_tokens=4_915_200,
        train_seconds=301.5 + seed,
        nll=NllResult(
            nll_nats_per_token=loss,
            bits_per_byte=loss / math.log(2),
            tokens=4096,
            bytes=4096,
            context_tokens=512,
            by_position=[
                PositionBucket(
                    start_tokens=start,
                    end_tokens=2 * start or 1,
                    tokens=100,
                    nll_nats_per_token=loss + 2.0 / math.sqrt(start + 1) + float(rng.normal(0, 0.01)),
                )
                for start in starts
            ],
            documents=[
                DocumentNll(
                    nll_nats=512 * (loss + float(np.random.default_rng(k).normal(0, 0.1)) + float(rng.normal(0, 0.01))),
                    tokens=512,
                    bytes=512,
                )
                for k in range(8)
            ],
        ),
        needle=NeedleResult(digits=4, chance=1e-4, cells=cells) if needle else None,
        allocation=AllocationResult(length_tokens=512, needles=6, documents=50, shares=shares) if allocation else None,
    )


def make_comparison(
    seeds: int = 3,
    advantage: float = 0.03,
    needle: bool = True,
    allocation: bool = True,
    models: tuple[str, ...] = ("diff", "softmax"),
    layers: int = 6,
    needle_counts: int = 4,
    lengths: tuple[int, ...] = (512,),
) -> Comparison:
    """A comparison in which models[0] is better by `advantage` nats a token, and finds more needles if so."""
    runs = [
        make_run(
            model,
            seed,
            0.87 + advantage * min(place, 1),
            0.75 - 6 * advantage * min(place, 1),
            layers,
            needle,
            allocation,
            needle_counts,
            lengths,
        )
        for seed in range(seeds)
        for place, model in enumerate(models)
    ]

    def metric(name: str, unit: str, better: str, value: Callable[[RunResult], float]) -> MetricComparison:
        values = {model: [value(run) for run in runs if run.model == model] for model in models}
        first, second = values[models[0]], values[models[min(1, len(models) - 1)]]
        if seeds == 1 and "bits" in name:
            a, b = runs[0].nll.documents, runs[1].nll.documents
            difference = bootstrap_difference(
                [d.nll_nats / math.log(2) for d in a],
                [d.nll_nats / math.log(2) for d in b],
                [d.bytes for d in a],
                seed=0,
            )
        else:
            difference = paired_difference(first, second)
        summary = {model: mean_and_standard_error(numbers) for model, numbers in values.items()}
        return MetricComparison(metric=name, unit=unit, better=better, models=summary, difference=difference)

    def accuracy(cities: str) -> Callable[[RunResult], float]:
        def share(run: RunResult) -> float:
            cells = [cell for cell in run.needle.cells if cell.cities == cities or not cities]
            return sum(cell.correct for cell in cells) / sum(cell.trials for cell in cells)

        return share

    metrics = [metric("validation_bits_per_byte", "bits/byte", "lower", lambda run: run.nll.bits_per_byte)]
    if needle:
        metrics += [metric("needle_accuracy", "share", "higher", accuracy(""))]
        metrics += [metric(f"needle_accuracy_{c}", "share", "higher", accuracy(c)) for c in ("seen", "unseen")]
    sizes = {"diff": 3_157_224, "softmax": 3_157_000, "diff_v2": 3_400_000}
    costs = [
        CostRow(
            model=model,
            label=LABELS[model],
            parameters=sizes[model],
            train_step_seconds=0.412 + 0.05 * (model == "diff"),
            prefill_tokens_per_second=10234.5,
            decode_tokens_per_second=151.25,
            peak_training_bytes=912_345_678,
            weights_and_kv_bytes_4k=2 * sizes[model] + 4096 * 3072,
            weights_and_kv_bytes_64k=2 * sizes[model] + 65536 * 3072,
        )
        for model in models
    ]
    costs.append(
        CostRow(
            model="diff_62",
            label="DIFF at 62 %",
            parameters=1_957_340,
            train_step_seconds=None,
            prefill_tokens_per_second=None,
            decode_tokens_per_second=None,
            peak_training_bytes=None,
            weights_and_kv_bytes_4k=2 * 1_957_340 + 4096 * 2048,
            weights_and_kv_bytes_64k=2 * 1_957_340 + 65536 * 2048,
        )
    )
    return Comparison(
        name="bytes-small",
        command=f"difftransformer compare recipes/bytes-small.yaml --seeds {seeds}",
        created="2026-01-02T03:04:05+00:00",
        environment=ENVIRONMENT,
        recipe={
            "data": {"source": "stdlib", "tokenizer": "bytes"},
            "model": {"hidden_size": 192, "num_hidden_layers": layers},
            "train": {"steps": STEPS, "learning_rate": 0.001, "betas": [0.9, 0.95]},
        },
        seeds=list(range(seeds)),
        models=[
            ModelSummary(
                model=model,
                label=LABELS[model],
                attention_type=model,
                parameters=sizes[model],
                train_flops_per_token=19_267_584,
                kv_bytes_per_token=3072,
            )
            for model in models
        ],
        baselines=[BaselineNll(name="byte bigram", bits_per_byte=3.4521)],
        runs=runs,
        costs=costs,
        metrics=metrics,
    )


@pytest.fixture(scope="session")
def make() -> Callable[..., Comparison]:
    return make_comparison


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    """Three seeds; DIFF wins."""
    return make_comparison()

"""The comparison: a model and its same-size twin, trained on identical batches for each seed, and set side by side."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..attention import label
from ..bench import measure_costs
from ..data import Shards, byte_bigram_bits_per_byte, prepare_shards
from ..errors import ConfigError
from ..evals import check_evaluation
from ..model import DiffTransformerConfig, count
from ..results import (
    BaselineNll,
    Cities,
    Comparison,
    Curve,
    DocumentNll,
    Evaluation,
    MetricComparison,
    ModelSummary,
    RunResult,
    read_result,
    write_result,
)
from ..statistics import bootstrap_difference, mean_and_standard_error, paired_difference
from ..train import read_metrics
from ..train.metrics import METRICS_FILE
from .environment import command_line, environment, now
from .jobs import Job, run_jobs
from .recipe import Recipe, recipe_dict
from .run import EVALUATION_FILE, found_evaluation, is_trained, start_run

RESULTS_FILE = "results.json"
CURVE_POINTS = 400  # of a training curve that a results file keeps
BOOTSTRAP_SEED = 0


def compare(
    recipe: Recipe,
    folder: Path,
    *,
    watch: Callable[[Sequence[Job]], None] = lambda jobs: None,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train, evaluate and compare; write results.json. What is whole in the folder already is not done again.

    Args:
        recipe: What to train, evaluate and compare.
        folder: For runs/, results.json.
        watch: Called again and again with the jobs while they run.
        say: Told what is being done.

    Raises:
        DiffTransformerError: a run failed; its message.
        Interrupted: a signal; every run has saved a checkpoint.
    """
    for attention_type in recipe.compare.models:
        recipe.with_model(attention_type).model_config(vocab_size=1)
    if recipe.evaluation.nll is None:
        raise ConfigError("evaluation.nll: null leaves out the validation loss, which a comparison always needs")
    shards = prepare_shards(recipe.data, log=say)
    check_evaluation(shards, recipe.evaluation, context_tokens=recipe.training.context_tokens)
    seeds = [recipe.training.seed + index for index in range(recipe.compare.seeds)]
    threads = max(1, torch.get_num_threads() // recipe.compare.jobs)
    jobs = []
    for seed in seeds:
        for attention_type in recipe.compare.models:
            run = recipe.with_model(attention_type).with_seed(seed)
            place = folder / "runs" / f"{attention_type}-seed{seed}"
            start_run(place, run)
            jobs.append(
                Job(
                    label=f"{label(attention_type)}, seed {seed}",
                    folder=place,
                    steps=run.training.steps,
                    threads=threads,
                    done=is_trained(place, run) and found_evaluation(place) is not None,
                )
            )
    say(f"training {len(jobs)} runs, {recipe.compare.jobs} at a time with {threads} threads each")
    run_jobs(jobs, at_once=recipe.compare.jobs, watch=watch)
    say("measuring cost")
    comparison = _collect(recipe, folder, shards, seeds)
    write_result(comparison, folder / RESULTS_FILE)
    return comparison


def _collect(recipe: Recipe, folder: Path, shards: Shards, seeds: list[int]) -> Comparison:
    models = recipe.compare.models
    runs = [run_result(folder, model, seed) for model in models for seed in seeds]
    configs = {model: recipe.with_model(model).model_config(vocab_size=shards.tokenizer.vocab_size) for model in models}
    train_text, validation_text = shards.text_bytes("train"), shards.text_bytes("validation")
    return Comparison(
        name=recipe.name,
        command=command_line(),
        created=now(),
        environment=environment(),
        recipe=recipe_dict(recipe),
        seeds=seeds,
        models=[summary(model, config, recipe.training.context_tokens) for model, config in configs.items()],
        baselines=[
            BaselineNll(name="byte bigram", bits_per_byte=byte_bigram_bits_per_byte(train_text, validation_text))
        ],
        runs=runs,
        costs=measure_costs(
            configs,
            rows=max(1, recipe.training.batch_tokens // recipe.training.context_tokens),
            context_tokens=recipe.training.context_tokens,
            labels={model: label(model) for model in models},
        ),
        metrics=compare_metrics(runs, models),
    )


def summary(model: str, config: DiffTransformerConfig, context_tokens: int) -> ModelSummary:
    """What a model is, by formula."""
    counts = count(config, context_tokens=context_tokens)
    return ModelSummary(
        model=model,
        label=label(model),
        attention_type=config.attention_type,
        parameters=counts.parameters,
        train_flops_per_token=counts.train_flops_per_token,
        kv_bytes_per_token=counts.kv_bytes_per_token,
    )


def run_result(folder: Path, model: str, seed: int) -> RunResult:
    """A run's curves and evaluation, from its folder."""
    place = folder / "runs" / f"{model}-seed{seed}"
    steps, validations = read_metrics(place / METRICS_FILE)
    evaluation = read_result(place / EVALUATION_FILE, Evaluation)
    kept = steps[:: max(1, math.ceil(len(steps) / CURVE_POINTS))]
    if kept[-1] is not steps[-1]:
        kept.append(steps[-1])
    assert evaluation.nll is not None  # compare always measures the loss
    return RunResult(
        model=model,
        seed=seed,
        run=str(place.relative_to(folder)),
        train_loss_nats=Curve(steps=[line.step for line in kept], values=[line.loss_nats for line in kept]),
        validation_loss_nats=Curve(
            steps=[line.step for line in validations], values=[line.validation_loss_nats for line in validations]
        ),
        lambda_steps=[line.step for line in kept if line.lambdas],
        lambda_values=[line.lambdas for line in kept if line.lambdas],
        train_tokens=steps[-1].tokens,
        train_seconds=steps[-1].seconds,
        nll=evaluation.nll,
        needle=evaluation.needle,
        allocation=evaluation.allocation,
    )


def _bits_per_byte(run: RunResult) -> float | None:
    return run.nll.bits_per_byte


def _nats_per_token(run: RunResult) -> float | None:
    return run.nll.nll_nats_per_token


def _needle_accuracy(cities: Cities) -> Callable[[RunResult], float | None]:
    def accuracy(run: RunResult) -> float | None:
        if run.needle is None:
            return None
        cells = [cell for cell in run.needle.cells if cell.cities == cities]
        return sum(cell.correct for cell in cells) / sum(cell.trials for cell in cells)

    return accuracy


@dataclass(frozen=True)
class _Metric:
    """A row of the table. `weight` is what a document's nats are divided by, where the figure is a loss."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    value: Callable[[RunResult], float | None]
    weight: Callable[[DocumentNll], float] | None = None


METRICS = (
    _Metric("validation_bits_per_byte", "bits/byte", "lower", _bits_per_byte, lambda d: d.bytes * math.log(2)),
    _Metric("validation_nll_nats_per_token", "nats/token", "lower", _nats_per_token, lambda d: d.tokens),
    _Metric("needle_accuracy_seen", "share", "higher", _needle_accuracy("seen")),
    _Metric("needle_accuracy_unseen", "share", "higher", _needle_accuracy("unseen")),
)


def compare_metrics(runs: Sequence[RunResult], models: Sequence[str]) -> list[MetricComparison]:
    """The table: mean and standard error of each model, and the difference of the first and the second.

    With two or more seeds the interval is Student's t over the per-seed differences. With one seed, seeds say nothing: the
    losses get a bootstrap over evaluation documents (windows of text), retrieval gets no interval.
    """
    first, second = models
    rows = []
    for metric in METRICS:
        chosen = {model: [run for run in runs if run.model == model] for model in models}
        found = {model: [metric.value(run) for run in chosen[model]] for model in models}
        values = {model: [value for value in found[model] if value is not None] for model in models}
        if any(len(values[model]) < len(found[model]) for model in models):
            continue
        difference = paired_difference(values[first], values[second])
        if len(values[first]) == 1 and metric.weight is not None:
            a, b = (chosen[model][0].nll.documents for model in models)
            difference = bootstrap_difference(
                [document.nll_nats for document in a],
                [document.nll_nats for document in b],
                [metric.weight(document) for document in a],
                seed=BOOTSTRAP_SEED,
            )
        rows.append(
            MetricComparison(
                metric=metric.name,
                unit=metric.unit,
                better=metric.better,
                models={model: mean_and_standard_error(values[model]) for model in models},
                difference=difference,
            )
        )
    return rows

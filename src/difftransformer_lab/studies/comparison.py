"""The comparison of a model and its same-size twin, trained on identical batches for each seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from difftransformer.attention import label
from difftransformer.data import Shards, byte_bigram_bits_per_byte, prepare_shards
from difftransformer.families import DifferentialFields, count_family
from difftransformer.files import locked
from difftransformer.model import count
from difftransformer.train import read_metrics
from difftransformer.train.metrics import METRICS_FILE

from ..bench import measure_costs
from ..evals.engine import Task
from ..report.metrics import compare_metrics
from ..results import BaselineNll, Comparison, Curve, ModelSummary, RunResult, write_result
from .environment import command_line, environment, now
from .evaluation import draw_tasks
from .jobs import Job, run_jobs
from .recipe import Recipe, recipe_dict
from .run import is_done, run_results, start_run

RESULTS_FILE = "results.json"
CURVE_POINTS = 400  # points of a training curve that a results file keeps


def compare(
    recipe: Recipe,
    folder: Path,
    *,
    progress: Callable[[Sequence[Job]], None] = lambda jobs: None,
    log: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train, evaluate and compare; write results.json. What is complete in the folder already is not done again.

    Args:
        recipe: The recipe.
        folder: Folder for runs/ and results.json.
        progress: Called again and again with the jobs while they run.
        log: Called with what is being done.

    Raises:
        DiffTransformerError: a run failed, or a task is impossible; its message.
        Interrupted: a signal; every run has saved a checkpoint.
    """
    for attention_type in recipe.compare.models:
        recipe.with_model(attention_type).model_config(vocab_size=1)
    shards = prepare_shards(recipe.data, log=log)
    tasks = draw_tasks(recipe, shards)
    seeds = [recipe.training.seed + index for index in range(recipe.compare.seeds)]
    runs = [
        (seed, model, recipe.with_model(model).with_seed(seed)) for seed in seeds for model in recipe.compare.models
    ]
    threads = max(1, torch.get_num_threads() // recipe.compare.jobs)
    jobs = []
    for seed, model, run in runs:
        place = run_folder(folder, model, seed)
        with locked(place, wait=True):  # as its process does, which ends soon after this one if this one is killed
            start_run(place, run)
        done = is_done(place, run, tasks, log)
        title = f"{label(model)}, seed {seed}"
        job = Job(
            label=title,
            folder=place,
            shards=shards.folders,
            steps=run.training.steps,
            threads=threads,
            done=done,
        )
        jobs.append(job)
    log(f"training {len(jobs)} runs, {recipe.compare.jobs} at a time with {threads} threads each")
    run_jobs(jobs, at_once=recipe.compare.jobs, progress=progress)
    log("measuring cost")
    runs.sort(key=lambda run: recipe.compare.models.index(run[1]))
    results = [run_result(folder, model, run, tasks) for _, model, run in runs]
    comparison = _collect(recipe, shards, seeds, results)
    write_result(comparison, folder / RESULTS_FILE)
    return comparison


def run_folder(folder: Path, model: str, seed: int) -> Path:
    """Return the folder of a run in a study's folder."""
    return folder / "runs" / f"{model}-seed{seed}"


def _collect(recipe: Recipe, shards: Shards, seeds: list[int], runs: list[RunResult]) -> Comparison:
    models = recipe.compare.models
    configs = {model: recipe.with_model(model).model_config(vocab_size=shards.tokenizer.vocab_size) for model in models}
    baselines = []
    if not shards.records:  # examples need not be text
        bits = byte_bigram_bits_per_byte(shards.text_bytes("train"), shards.text_bytes("validation"))
        baselines.append(BaselineNll(name="byte bigram", bits_per_byte=bits))
    return Comparison(
        name=recipe.name,
        command=command_line(),
        created=now(),
        environment=environment(),
        recipe=recipe_dict(recipe),
        seeds=seeds,
        models=[summary(model, config, recipe.training.context_tokens) for model, config in configs.items()],
        runs=runs,
        metrics=compare_metrics(runs, models),
        baselines=baselines,
        costs=measure_costs(
            configs,
            rows=max(1, recipe.training.batch_tokens // recipe.training.context_tokens),
            context_tokens=recipe.training.context_tokens,
            labels={model: label(model) for model in models},
        ),
    )


def summary(model: str, config: Any, context_tokens: int) -> ModelSummary:
    """Return the size and cost of a model of this package, or of another family with differential attention."""
    counts = (count_family if isinstance(config, DifferentialFields) else count)(config, context_tokens=context_tokens)
    return ModelSummary(
        model=model,
        label=label(model),
        attention_type=config.attention_type,
        parameters=counts.parameters,
        train_flops_per_token=counts.train_flops_per_token,
        kv_bytes_per_token=counts.kv_bytes_per_token,
    )


def run_result(folder: Path, model: str, recipe: Recipe, tasks: Mapping[str, Task]) -> RunResult:
    """Read a run's curves and evaluations from its folder."""
    place = run_folder(folder, model, recipe.training.seed)
    steps, validations = read_metrics(place / METRICS_FILE)
    kept = steps[:: max(1, math.ceil(len(steps) / CURVE_POINTS))]
    if kept[-1] is not steps[-1]:
        kept.append(steps[-1])
    return RunResult(
        model=model,
        seed=recipe.training.seed,
        run=str(place.relative_to(folder)),
        train_loss_nats=Curve(steps=[line.step for line in kept], values=[line.loss_nats for line in kept]),
        validation_loss_nats=Curve(
            steps=[line.step for line in validations], values=[line.validation_loss_nats for line in validations]
        ),
        lambda_steps=[line.step for line in kept if line.lambdas],
        lambda_values=[line.lambdas for line in kept if line.lambdas],
        train_tokens=steps[-1].tokens,
        train_seconds=steps[-1].seconds,
        evaluations=run_results(place, recipe, tasks),
    )

"""The upcycling study: a pretrained model converted to several differential forms, each trained on like the model itself."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from difftransformer.attention import label
from difftransformer.data import Shards, prepare_shards
from difftransformer.errors import ConfigError
from difftransformer.families.upcycle import upcycle_folder
from difftransformer.files import locked
from difftransformer.hub import folder_sha256, source_folder
from difftransformer_lab.evals.drift import measure_drift

from ..report.metrics import compare_metrics
from ..results import Drift, RunResult, TaskResult, Upcycling, kept_result, write_result
from .comparison import run_folder, run_result, summary
from .environment import command_line, environment, now
from .evaluation import draw_tasks, evaluate_checkpoint
from .jobs import Job, run_jobs
from .recipe import Recipe, recipe_dict
from .run import is_done, start_run

PLAIN = "softmax"
RESULTS_FILE, BEFORE = "results.json", "before"
DRIFT_TOKENS = 2000


def upcycling_study(
    recipe: Recipe,
    source: str,
    folder: Path,
    *,
    to: Sequence[str],
    progress: Callable[[Sequence[Job]], None] = lambda jobs: None,
    log: Callable[[str], None] = lambda text: None,
) -> Upcycling:
    """Convert, compare logits, evaluate, train each model on the same batches, evaluate; write results.json.

    What is complete in the folder already is not done again.

    Args:
        recipe: The recipe of the training; its model is empty, its tokenizer the source's.
        source: The pretrained model: a folder, a GGUF file, or owner/name on the hub.
        folder: Folder for models/, runs/ and results.json.
        to: Targets of `upcycle_folder` besides the plain model, which is always trained too.
        progress: Called again and again with the jobs while they run.
        log: Called with what is being done.

    Raises:
        DiffTransformerError: the source cannot be converted, or a run failed; its message.
        Interrupted: a signal; every run has saved a checkpoint.
    """
    if recipe.start_from is not None:
        raise ConfigError(f"start_from={recipe.start_from!r}: the study starts from the converted models; leave it out")
    names = [*(name for name in dict.fromkeys(to) if name != PLAIN), PLAIN]
    models = {name: folder / "models" / name for name in names}
    with source_folder(source) as pretrained:
        for name, place in models.items():
            if not place.exists():
                log(f"making {name}")
                upcycle_folder(pretrained, place, to=name)
        recipe = dataclasses.replace(
            recipe, start_from=str(models[PLAIN]), data=dataclasses.replace(recipe.data, tokenizer=str(models[PLAIN]))
        )
        shards = prepare_shards(recipe.data, log=log)
        tasks = draw_tasks(recipe, shards)
        drift = {}
        for name, place in models.items():
            log(f"comparing the logits of {name} with the source's")
            drift[name] = _drift(pretrained, place, folder / "drift" / f"{name}.json", shards, log)
    log("evaluating before training")
    before = evaluate_checkpoint(models[PLAIN], recipe, shards, folder / BEFORE, log=log)
    runs = {name: dataclasses.replace(recipe, start_from=str(place)) for name, place in models.items()}
    jobs = []
    threads = max(1, torch.get_num_threads() // recipe.compare.jobs)
    for name, run in runs.items():
        at = run_folder(folder, name, recipe.training.seed)
        with locked(at, wait=True):
            start_run(at, run)
        done = is_done(at, run, tasks, log)
        steps = recipe.training.steps
        job = Job(label=_label(name), folder=at, shards=shards.folders, steps=steps, threads=threads, done=done)
        jobs.append(job)
    log(f"training {len(jobs)} models, {recipe.compare.jobs} at a time")
    run_jobs(jobs, at_once=recipe.compare.jobs, progress=progress)
    ends = [run_result(folder, name, run, tasks) for name, run in runs.items()]
    result = _collect(recipe, source, folder, models, ends, drift, before)
    write_result(result, folder / RESULTS_FILE)
    return result


def _label(name: str) -> str:
    plain, _, matched = name.partition("+")
    if plain != PLAIN:
        return label(name)
    return f"unconverted, MLP wider by what {label(matched)} adds" if matched else "unconverted"


def _drift(source: Path, target: Path, cached: Path, shards: Shards, log: Callable[[str], None]) -> Drift:
    ids = shards.tokens("validation")[:DRIFT_TOKENS].astype("int64")
    of = f"{folder_sha256(source)} {folder_sha256(target)} {hashlib.sha256(ids.tobytes()).hexdigest()}"
    drift = kept_result(cached, Drift, log)
    if drift is None or drift.of != of:
        drift = dataclasses.replace(measure_drift(source, target, torch.from_numpy(ids)), of=of)
        write_result(drift, cached)
    return drift


def _collect(
    recipe: Recipe,
    source: str,
    folder: Path,
    models: dict[str, Path],
    runs: list[RunResult],
    drift: dict[str, Drift],
    before: dict[str, TaskResult],
) -> Upcycling:
    configs = {name: AutoConfig.from_pretrained(place) for name, place in models.items()}
    summaries = [
        dataclasses.replace(summary(name, config, recipe.training.context_tokens), label=_label(name))
        for name, config in configs.items()
    ]
    plain = summaries[-1].parameters
    document = recipe_dict(recipe)
    del document["start_from"]  # each run has its own, in its folder
    return Upcycling(
        name=recipe.name,
        command=command_line(),
        created=now(),
        environment=environment(),
        recipe=document,
        seeds=[recipe.training.seed],
        models=summaries,
        runs=runs,
        metrics=compare_metrics(runs, list(models)),
        source=Path(source).name,
        added_parameters={row.model: row.parameters - plain for row in summaries},
        drift=drift,
        before=before,
    )

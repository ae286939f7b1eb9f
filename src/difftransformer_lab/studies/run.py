"""One run of a study in a process of its own: train, then evaluate.

The folder holds the resolved recipe. Complete parts are not done again, so a stopped study continues.
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from difftransformer.data import Shards, Tokenizer, prepare_shards
from difftransformer.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    CheckpointError,
    ConfigError,
    DataError,
    DiffTransformerError,
    Diverged,
)
from difftransformer.files import locked, write_text_atomically
from difftransformer.hub import open_deferred
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.sources import DIRECTORY_FILE, RECIPE_FILE
from difftransformer.train import Interrupted, checkpoints, train
from difftransformer.train.checkpoint import folder_of_step, latest_checkpoint, step_of, verify_checkpoint
from difftransformer.train.metrics import METRICS_FILE, read_metrics
from difftransformer.train.optim import stable_steps
from difftransformer.train.parallel import DeferredModel, Mesh, Processes
from difftransformer.train.speed import keep_freed_memory
from difftransformer.typed import ADJUSTABLE, ASIDE, plain

from ..environment import now
from ..evals.engine import Task
from ..evals.evaluate import stored_result
from ..results import TaskResult
from .evaluation import EvaluateCheckpoints, evaluate_checkpoint, evaluations_folder
from .recipe import Recipe, load_recipe, save_recipe

logger = logging.getLogger(__name__)

BEGAN_FILE = "began"
"""The file of a run's folder that says when it was first started."""


def start_run(folder: Path, recipe: Recipe) -> None:
    """Put a recipe into a run folder; a run in a folder with checkpoints continues if its recipe trains the same.

    Where a new run is begun is recorded: relative paths begin there. Fields that are `ASIDE` or `ADJUSTABLE` may change.

    Raises:
        CheckpointError: The folder holds a run of another recipe; the message names the first difference. Or the checkpoint to
            go on from is missing or damaged.
        ConfigError: It is not before the last step.
    """
    path, there = folder / RECIPE_FILE, continued_recipe(folder, recipe)
    if there != recipe:
        save_recipe(recipe, path)
    if there is None or not (folder / DIRECTORY_FILE).exists():  # which earlier releases did not write
        here, run = Path.cwd(), folder.resolve()
        place = os.path.relpath(here, run) if run.is_relative_to(here) else here  # a run below moves with its project
        write_text_atomically(folder / DIRECTORY_FILE, f"{place}\n")
    if there is None and recipe.branch_from is not None:
        _copy_checkpoint(Path(recipe.branch_from), folder, recipe.training.steps)


def continued_recipe(folder: Path, recipe: Recipe) -> Recipe | None:
    """Return the recipe of the run in a folder, which `recipe` continues; None if it has no checkpoint or there is none."""
    path = folder / RECIPE_FILE
    if not path.exists():
        if others := sorted(one.name for one in folder.glob("[!.]*")):
            raise CheckpointError(f"{folder}: holds {others[0]} and no run; name a new folder, or a run, as --out")
        return None
    there = load_recipe(path)
    if not checkpoints(folder):
        return None
    before, after = (plain(one, without=[ASIDE, ADJUSTABLE]) for one in (there, recipe))
    if difference := _difference(before, after):
        advice = "choose another --out, or delete the folder"
        if recipe.training.steps > there.training.steps:
            advice = (
                f"in another --out, difftransformer train goes on from it with --set branch_from={folder} (weights, moments, "
                "place in the data) or start_from (weights alone)"
            )
        raise CheckpointError(f"{folder}: holds a run of another recipe ({difference}); {advice}")
    return there


def share_stable_part(folder: Path, recipe: Recipe, shards: Shards, others: Iterable[Path]) -> None:
    """Begin a new run of the schedule "wsd" with what it shares with a whole run among others.

    Runs that differ in their numbers of steps alone are equal, bit for bit, until one of them decays. Each is known by its
    recipe, its data and the sums of its files. What is of another run, or damaged, is left where it is.
    """
    training, shared = recipe.training, []
    if training.schedule.shape != "wsd" or checkpoints(folder):
        return
    for run in others:
        with suppress(DiffTransformerError, OSError):
            other = load_recipe(run / RECIPE_FILE)
            if is_trained(run, other) and _without_length(other) == _without_length(recipe):
                last = min(stable_steps(one.steps, one.schedule) for one in (training, other.training))
                shared += [(step_of(one), one, run) for one in checkpoints(run) if step_of(one) <= last]
    for step, checkpoint, run in sorted(shared, reverse=True):
        try:
            state, (lines, _) = verify_checkpoint(checkpoint), read_metrics(run / METRICS_FILE)
            is_same_text = state.loader.get("fingerprint") == shards.manifest.fingerprint
            if not is_same_text or [line.step for line in lines[:step]] != [*range(1, step + 1)]:
                continue
            for name in (BEGAN_FILE, METRICS_FILE):  # training writes the lines after the checkpoint again
                shutil.copy(run / name, folder / name)
            _copy_folder(checkpoint, folder_of_step(folder, step))
        except (DiffTransformerError, OSError) as error:
            logger.warning("%s is not shared: %s", checkpoint, error)
            continue
        logger.info("steps 1 to %d are those of %s", step, run)
        return


def _without_length(recipe: Recipe) -> dict[str, Any]:
    """Return what a run trains, without its number of steps."""
    document = plain(recipe, without=[ASIDE, ADJUSTABLE])
    del document["training"]["steps"], document["training"]["schedule"]["decay_steps"]
    return document


def _copy_checkpoint(source: Path, folder: Path, steps: int) -> None:
    """Copy a checkpoint of another run into a run folder, to continue from."""
    source = latest_checkpoint(source)
    step = verify_checkpoint(source).step
    if step >= steps:
        raise ConfigError(
            f"branch_from: {source} has step {step}, and training.steps is {steps}; train further than that"
        )
    _copy_folder(source, folder_of_step(folder, step))


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a checkpoint, whole or not at all."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    shutil.copytree(source, temporary)
    temporary.rename(target)


def train_run(
    folder: Path, recipe: Recipe, shards: Shards, *, mesh: Mesh | None = None, **options: Any
) -> DiffTransformerForCausalLM:
    """Train the recipe's model in a run folder, or continue where it was stopped; in one process if there is no mesh."""
    keep_freed_memory()
    mesh = mesh or Mesh(parallel=recipe.parallel)
    with ExitStack() as stack:
        with mesh.processes.fail_together():
            start = _start(recipe, shards.tokenizer, stack, verify=mesh.processes.is_first)
            config = _new_config(recipe, shards.tokenizer) if start is None else start.network.config
        if recipe.logs.evaluate_every:
            options["callbacks"] = [*options.get("callbacks", ()), EvaluateCheckpoints(recipe, shards)]
        return train(recipe.training, config, shards, folder, start=start, mesh=mesh, logs=recipe.logs, **options)


def _new_config(recipe: Recipe, tokenizer: Tokenizer) -> DiffTransformerConfig:
    return recipe.model_config(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.end_of_text,
        eos_token_id=tokenizer.end_of_text,
        pad_token_id=tokenizer.pad,
    )


def _start(recipe: Recipe, tokenizer: Tokenizer, stack: ExitStack, *, verify: bool) -> DeferredModel | None:
    """Return the model that training starts from, or None. Its files stay open with `stack`."""
    if recipe.start_from is None:
        return None

    def adapt(own: DiffTransformerConfig) -> DiffTransformerConfig:
        if own.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"data.tokenizer has {tokenizer.vocab_size} tokens and the model of start_from {own.vocab_size}; use the "
                "model's own tokenizer"
            )
        return _of_another_length(own, recipe) if recipe.model else own

    start = stack.enter_context(open_deferred(recipe.start_from, adapt, verify=verify))
    with suppress(DataError, CheckpointError):  # a folder without a tokenizer, or none of this machine
        folder = latest_checkpoint(Path(recipe.start_from))
        if other := tokenizer.first_other(Tokenizer.load(folder)):
            raise ConfigError(
                f"token {other[0]} is {other[1]!r} in data.tokenizer and {other[2]!r} in start_from: the model would read "
                f"other words; set data.tokenizer to {folder}"
            )
    return start


def _of_another_length(own: DiffTransformerConfig, recipe: Recipe) -> DiffTransformerConfig:
    """Return the recipe's configuration, with the special tokens of the model that it starts from."""
    special = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = recipe.model_config(vocab_size=own.vocab_size, **special)
    before, after = own.to_dict(), config.to_dict()
    for name in DiffTransformerConfig.field_types():
        if name not in ("max_position_embeddings", "rope_parameters") and before.get(name) != after.get(name):
            raise ConfigError(
                f"model.{name} is {after.get(name)!r}, and {before.get(name)!r} in start_from {recipe.start_from}; only "
                "max_position_embeddings and rope_parameters may change, or use model: {}"
            )
    return config


def run_results(folder: Path, recipe: Recipe, tasks: Mapping[str, Task]) -> dict[str, TaskResult]:
    """Return the results of the newest checkpoint that still answer the recipe's tasks, by name."""
    results = evaluations_folder(checkpoints(folder)[-1])
    stored = {
        spec.name: stored_result(results / f"{spec.name}.json", spec, tasks[spec.name]) for spec in recipe.evaluation
    }
    return {name: result for name, result in stored.items() if result is not None}


def is_done(folder: Path, recipe: Recipe, tasks: Mapping[str, Task]) -> bool:
    """Whether a run is trained and has every result of its recipe (see `run_results`)."""
    return is_trained(folder, recipe) and len(run_results(folder, recipe, tasks)) == len(recipe.evaluation)


def is_trained(folder: Path, recipe: Recipe) -> bool:
    """Whether the run has the checkpoint of its last step."""
    steps = checkpoints(folder)
    return bool(steps) and steps[-1].name == f"step-{recipe.training.steps:06d}"


def main(arguments: list[str]) -> int:
    """Train and evaluate in FOLDER with THREADS threads on DEVICE with SHARDS ...; errors are one line on standard error."""
    folder, threads, device = Path(arguments[0]), int(arguments[1]), arguments[2]
    made = [Path(word) for word in arguments[3:]]
    torch.set_num_threads(threads)
    try:
        recipe = load_recipe(folder / RECIPE_FILE)
        shards = prepare_shards(recipe.data, made=made)
        with locked(folder, wait=True):
            if not is_trained(folder, recipe):
                if not (folder / BEGAN_FILE).exists() and not checkpoints(folder):  # else it began elsewhere, or before
                    write_text_atomically(folder / BEGAN_FILE, now())
                train_run(folder, recipe, shards, mesh=Mesh(Processes(device=device), recipe.parallel))
            newest = checkpoints(folder)[-1]
            out = evaluations_folder(newest)  # for `eval RUN`
            evaluate_checkpoint(newest, recipe, shards, out, wait=True, device=device)
    except Interrupted as stopped:
        sys.stderr.write(f"{stopped}\n")
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except DiffTransformerError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_DIVERGED if isinstance(error, Diverged) else EXIT_ERROR
    except OSError as error:
        free = shutil.disk_usage(folder).free
        with suppress(OSError):  # the log's disk may be full too
            sys.stderr.write(f"{error.filename or folder}: {error.strerror} ({free / 2**20:.0f} MiB free)\n")
            sys.stderr.flush()
        return EXIT_ERROR
    return 0


def _difference(before: object, after: object, key: str = "") -> str | None:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            if difference := _difference(before.get(name), after.get(name), f"{key}.{name}".removeprefix(".")):
                return difference
        return None
    return None if before == after else f"{key} was {before!r} and is now {after!r}"

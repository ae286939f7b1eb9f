"""One run of a study in a process of its own: train, then evaluate.

The folder holds the resolved recipe; what is whole in it already is not done again, so a study that was stopped goes on.
"""

import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from difftransformer.data import Shards, Tokenizer, prepare_shards
from difftransformer.errors import EXIT_ERROR, EXIT_INTERRUPTED, CheckpointError, ConfigError, DiffTransformerError
from difftransformer.files import locked
from difftransformer.hub import open_deferred
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.train import Interrupted, checkpoints, train
from difftransformer.train.checkpoint import folder_of_step, latest_checkpoint, verify_checkpoint
from difftransformer.train.parallel import DeferredModel, Mesh, Processes
from difftransformer.train.run_summary import RECIPE_FILE
from difftransformer.train.speed import keep_freed_memory
from difftransformer.typed import ADJUSTABLE, ASIDE, plain

from ..evals.engine import Task
from ..results import TaskResult
from .evaluation import EvaluateCheckpoints, evaluate_checkpoint, evaluations_folder, found_results
from .recipe import Recipe, load_recipe, save_recipe


def start_run(folder: Path, recipe: Recipe) -> None:
    """Put a recipe into a run folder; a run in a folder with checkpoints continues if its recipe trains the same.

    Fields that are `ASIDE` or `ADJUSTABLE` may change.

    Raises:
        CheckpointError: The folder holds a run of another recipe; the message names the first difference. Or the checkpoint to
            go on from is missing or damaged.
        ConfigError: It is not before the last step.
    """
    path = folder / RECIPE_FILE
    if not path.exists() or not checkpoints(folder):
        save_recipe(recipe, path)
        if recipe.branch_from is not None:
            _copy_checkpoint(Path(recipe.branch_from), folder, recipe.training.steps)
        return
    there = load_recipe(path)
    before, after = (plain(one, without=[ASIDE, ADJUSTABLE]) for one in (there, recipe))
    if difference := _difference(before, after):
        raise CheckpointError(
            f"{folder}: holds a run of another recipe ({difference}); choose another --out, or delete the folder"
        )
    if there != recipe:
        save_recipe(recipe, path)


def _copy_checkpoint(source: Path, folder: Path, steps: int) -> None:
    """Put a checkpoint of another run into a run folder, from where training continues as from one of its own."""
    source = latest_checkpoint(source)
    step = verify_checkpoint(source).step
    if step >= steps:
        raise ConfigError(
            f"branch_from: {source} has step {step}, and training.steps is {steps}; train further than that"
        )
    target = folder_of_step(folder, step)
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
    """Return the model that training starts from, or None. Its files stay open with `stack`.

    Raises:
        ConfigError: It has fewer tokens than the tokenizer, or the recipe's model differs in more than positions and rotary
            settings.
    """
    if recipe.start_from is None:
        return None

    def adapt(own: DiffTransformerConfig) -> DiffTransformerConfig:
        if own.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"data.tokenizer has {tokenizer.vocab_size} tokens and the model of start_from {own.vocab_size}; use the "
                "model's own tokenizer"
            )
        return _of_another_length(own, recipe) if recipe.model else own

    return stack.enter_context(open_deferred(recipe.start_from, adapt, verify=verify))


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
    return found_results(evaluations_folder(checkpoints(folder)[-1]), recipe, tasks)


def is_done(folder: Path, recipe: Recipe, tasks: Mapping[str, Task]) -> bool:
    """Whether a run is trained and has every result of its recipe (see `found_results`)."""
    return is_trained(folder, recipe) and len(run_results(folder, recipe, tasks)) == len(recipe.evaluation)


def is_trained(folder: Path, recipe: Recipe) -> bool:
    """Whether the run's newest checkpoint is that of the last step."""
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
                train_run(folder, recipe, shards, mesh=Mesh(Processes(device=device), recipe.parallel))
            newest = checkpoints(folder)[-1]
            evaluate_checkpoint(
                newest, recipe, shards, evaluations_folder(newest), wait=True, device=device
            )  # for `eval RUN`
    except Interrupted as stopped:
        sys.stderr.write(f"{stopped}\n")
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except DiffTransformerError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_ERROR
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

"""difftransformer train."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..recipe_files import read_recipe
from .arguments import check_positive, use_threads
from .console import resumable, show, show_next
from .members import run_together
from .progress import evaluation_progress, training_progress, watch_steps

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes

    from ..studies import Recipe


def run(
    recipe: str,
    out: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    processes: int | None = None,
    set: list[str] | None = None,
    dry_run: bool = False,
    profile: int | None = None,
) -> int:
    """Train one model. A run that was stopped continues from its newest checkpoint.

    Args:
        recipe: YAML file with model, data and training.
        out: Run folder. Defaults to runs/NAME, with the recipe's name.
        seed: Training seed that replaces the recipe's.
        device: cpu or cuda.
        threads: Number of CPU threads of each process. Defaults to all. Losses are bitwise equal for equal numbers of threads.
        processes: Number of processes of this machine, which the recipe's `parallel` divides. torchrun starts more machines.
        dry_run: Say what would be trained and what is missing, and train nothing.
        profile: Write a trace of this number of steps to RUN/profile, for ui.perfetto.dev.
    """
    read_recipe(recipe)
    check_positive(processes=processes, profile=profile)
    overrides = list(set or []) + ([f"training.seed={seed}"] if seed is not None else [])
    if dry_run:
        from ..studies import load_recipe

        return _describe(load_recipe(recipe, overrides))
    return run_together(partial(_train, recipe, overrides, out, threads, profile), device, processes)


def _train(
    recipe: str,
    overrides: list[str],
    out: str | None,
    threads: int | None,
    profile: int | None,
    processes: "Processes",
) -> int:
    from difftransformer.data import Shards, prepare_shards
    from difftransformer.train import Interrupted, checkpoints
    from difftransformer.train.metrics import METRICS_FILE, read_metrics
    from difftransformer.train.parallel import Mesh
    from difftransformer.train.profiling import Profile

    from ..studies import load_recipe, start_run, train_run
    from ..studies.run import is_trained

    with processes.fail_together():
        loaded = load_recipe(recipe, overrides)
        use_threads(threads)
        mesh = Mesh(processes, loaded.parallel)
        mesh.check(loaded.model_config(vocab_size=1), loaded.training)
    folder = Path(out or f"runs/{loaded.name}")
    callbacks = [Profile(profile)] if profile else []

    def prepare() -> Shards:
        if not processes.is_first:
            return prepare_shards(loaded.data)
        start_run(folder, loaded)
        with evaluation_progress("tokenising"):
            return prepare_shards(loaded.data)

    with processes.locked(folder):
        shards = processes.rank0_first(prepare)
        if not processes.is_first:
            try:
                train_run(folder, loaded, shards, mesh=mesh, callbacks=callbacks)
            except Interrupted as stopped:
                return stopped.status
            return 0
        was_trained = is_trained(folder, loaded)
        with resumable(), training_progress() as progress:
            on_metrics = watch_steps(progress, loaded.name, loaded.training.steps)
            train_run(folder, loaded, shards, mesh=mesh, on_metrics=on_metrics, callbacks=callbacks)
    newest, steps = checkpoints(folder)[-1], f"all {loaded.training.steps:,} steps"
    show(f"{'Trained before, ' + steps if was_trained else 'Trained ' + steps}: {newest}")
    _, validations = read_metrics(folder / METRICS_FILE)
    if validations:
        show(f"Validation loss: {validations[-1].validation_loss_nats:.4f} nats/token")
    show_next("eval", folder)
    return 0


def _describe(recipe: "Recipe") -> int:
    """Print what a recipe trains, and what it names that is not there."""
    from difftransformer.model import count

    missing = recipe.missing()
    if recipe.model or recipe.start_from is None or not missing:
        config, training = recipe.planned_config(), recipe.training
        stages = ", ".join(str(long) for _, long in training.context_stages)
        tokens = f"{training.batch_tokens:,} tokens, {training.steps * training.batch_tokens:,} in all"
        show(f"{recipe.name}: {config.attention_type}, {count(config).parameters:,} parameters")
        show(f"{training.steps:,} steps of {tokens}; rows of {stages} tokens")
    for line in missing:
        show(f"missing: {line}")
    return 0

"""difftransformer train."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..files import locked
from ..sources import read_recipe
from .arguments import SET, check_device, use_threads
from .console import log, resumable, show
from .progress import training_progress, watch_steps

if TYPE_CHECKING:
    from ..studies import Recipe

ARGUMENTS = SET | {
    "--dry-run": {
        "action": "store_true",
        "dest": "dry_run",
        "help": "Say what would be trained and what is missing, and train nothing.",
    }
}


def run(
    recipe: str,
    out: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    set: list[str] | None = None,
    dry_run: bool = False,
) -> int:
    """Train one model. A run that was stopped continues from its newest checkpoint.

    Args:
        recipe: YAML file with model, data and training.
        out: Run folder. Defaults to runs/NAME, with the recipe's name.
        seed: Training seed that replaces the recipe's.
        device: cpu or cuda.
        threads: Number of CPU threads. Defaults to all. Losses are bitwise equal for equal numbers of threads.
    """
    read_recipe(recipe)
    from ..data import prepare_shards
    from ..studies import load_recipe, start_run, train_run
    from ..train import checkpoints

    overrides = list(set or []) + ([f"training.seed={seed}"] if seed is not None else [])
    loaded = load_recipe(recipe, overrides)
    if dry_run:
        return _describe(loaded)
    use_threads(threads)
    check_device(device)
    folder = Path(out or f"runs/{loaded.name}")
    with locked(folder):
        start_run(folder, loaded)
        shards = prepare_shards(loaded.data, log=log)
        with resumable(), training_progress() as progress:
            on_metrics = watch_steps(progress, loaded.name, loaded.training.steps)
            train_run(folder, loaded, shards, device=device, on_metrics=on_metrics)
    show(f"Trained: {checkpoints(folder)[-1]}")
    return 0


def _describe(recipe: "Recipe") -> int:
    """Print what a recipe trains, and what it names that is not there."""
    from ..model import count

    missing = recipe.missing()
    if recipe.model or recipe.start_from is None or not missing:
        config, training = recipe.planned_config(), recipe.training
        tokens, stages = (
            training.steps * training.batch_tokens,
            ", ".join(str(long) for _, long in training.context_stages),
        )
        show(f"{recipe.name}: {config.attention_type}, {count(config).parameters:,} parameters")
        show(
            f"{training.steps:,} steps of {training.batch_tokens:,} tokens, {tokens:,} in all; rows of {stages} tokens"
        )
    for line in missing:
        show(f"missing: {line}")
    return 0

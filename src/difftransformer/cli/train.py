"""difftransformer train."""

from pathlib import Path

from ..files import locked
from ..sources import read_recipe
from .arguments import SET, check_device, use_threads
from .console import log, resumable, show
from .progress import evaluation_progress, training_progress, watch_steps

ARGUMENTS = SET


def run(
    recipe: str,
    out: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    set: list[str] | None = None,
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
    use_threads(threads)
    check_device(device)
    folder = Path(out or f"runs/{loaded.name}")
    with locked(folder):
        start_run(folder, loaded)
        with evaluation_progress("tokenising") as tokenised:
            shards = prepare_shards(loaded.data, log=log, progress=tokenised)
        with resumable(), training_progress() as progress:
            on_metrics = watch_steps(progress, loaded.name, loaded.training.steps)
            train_run(folder, loaded, shards, device=device, on_metrics=on_metrics)
    show(f"Trained: {checkpoints(folder)[-1]}")
    return 0

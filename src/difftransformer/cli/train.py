"""difftransformer train."""

import shlex
import sys
from pathlib import Path

from ..data import prepare_shards
from ..studies import load_recipe, start_run, train_run
from ..train import Interrupted, checkpoints
from .console import console, say
from .hardware import check_device, use_threads
from .progress import training_progress, watch_steps


def run(
    recipe: str,
    out: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    set: list[str] | None = None,
) -> int:
    """Train one model. A run folder that was stopped goes on from its newest checkpoint.

    Args:
        recipe: YAML file that says what to train.
        out: Run folder; runs/NAME of the recipe by default.
        seed: Training seed in place of the recipe's.
        device: cpu or cuda.
        threads: CPU threads; all by default. Losses are bitwise the same for the same number.
        set: Other values for keys of the recipe, such as training.steps=100 or model.attention_type=softmax.
    """
    overrides = list(set or []) + ([f"training.seed={seed}"] if seed is not None else [])
    loaded = load_recipe(recipe, overrides)
    use_threads(threads)
    check_device(device)
    folder = Path(out or f"runs/{loaded.name}")
    start_run(folder, loaded)
    shards = prepare_shards(loaded.data, log=say)
    try:
        with training_progress() as progress:
            train_run(
                folder,
                loaded,
                shards,
                device=device,
                on_metrics=watch_steps(progress, loaded.name, loaded.training.steps),
            )
    except Interrupted as stopped:
        again = shlex.join(["difftransformer", *sys.argv[1:]])
        console.print(
            f"Stopped after step {stopped.step}; saved {stopped.checkpoint}. Go on with: {again}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return 130
    console.print(f"Trained: {checkpoints(folder)[-1]}", markup=False, highlight=False, soft_wrap=True)
    return 0

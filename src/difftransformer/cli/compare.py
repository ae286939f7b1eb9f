"""difftransformer compare."""

import shlex
import sys
from pathlib import Path

from ..ops import build
from ..report import print_study, write_report
from ..studies import compare, load_recipe
from ..train import Interrupted
from .console import console, say
from .progress import training_progress, watch_jobs


def run(
    recipe: str, out: str | None = None, seeds: int | None = None, jobs: int | None = None, set: list[str] | None = None
) -> int:
    """Compare a model with its same-size twin.

    Args:
        recipe: YAML file that says what to train, evaluate and compare.
        out: Folder for runs, results.json and the report; reports/NAME of the recipe by default.
        seeds: Number of seeds in place of the recipe's.
        jobs: Runs that train at the same time, in place of the recipe's; each gets an equal share of the threads.
        set: Other values for keys of the recipe, such as training.steps=100.
    """
    overrides = list(set or [])
    overrides += [f"compare.{key}={value}" for key, value in (("seeds", seeds), ("jobs", jobs)) if value is not None]
    loaded = load_recipe(recipe, overrides)
    folder = Path(out or f"reports/{loaded.name}")
    build.load()  # here, where its line is seen, and not in a run
    try:
        with training_progress() as bars:
            comparison = compare(loaded, folder, progress=watch_jobs(bars), log=say)
    except Interrupted:
        again = shlex.join(["difftransformer", *sys.argv[1:]])
        console.print(
            f"Stopped; every run is saved. Go on with: {again}", markup=False, highlight=False, soft_wrap=True
        )
        return 130
    page = write_report(comparison, folder)
    print_study(comparison, console)
    console.print(f"Report: {page}\nResults: {folder / 'results.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0

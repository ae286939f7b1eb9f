"""difftransformer compare."""

from pathlib import Path

from difftransformer.files import locked

from ..recipe_files import read_recipe
from .progress import training_shown


def run(
    recipe: str,
    out: str | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    set: list[str] | None = None,
    no_costs: bool = False,
) -> int:
    """Compare a model with its same-size twin.

    Args:
        recipe: YAML file that says what to train, evaluate and compare.
        out: Folder for runs, results.json and the report; reports/NAME of the recipe by default.
        seeds: Number of seeds in place of the recipe's.
        jobs: Runs that train at the same time, in place of the recipe's; each gets an equal share of the threads.
        no_costs: Leave out time and memory, measured at the end.
    """
    read_recipe(recipe)
    from difftransformer.ops import build

    from ..analysis import read_studies
    from ..studies import compare, load_recipe
    from .report import show_study

    overrides = list(set or [])
    overrides += [f"compare.{key}={value}" for key, value in (("seeds", seeds), ("jobs", jobs)) if value is not None]
    loaded = load_recipe(recipe, overrides)
    folder = Path(out or f"reports/{loaded.name}")
    build.load()  # here, where its line is seen, and not in a run
    with locked(folder):
        with training_shown(loaded.name):
            compare(loaded, folder, costs=not no_costs)
        return show_study(read_studies(folder)[0], folder, "compare")

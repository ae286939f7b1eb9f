"""difftransformer eval."""

from pathlib import Path

from rich.table import Table

from ..errors import ConfigError
from ..results import TaskResult, summary_rows
from ..sources import check_model
from .arguments import SET, check_device
from .console import Gaps, console, log, resumable, show
from .progress import evaluation_progress

ARGUMENTS = SET


def run(
    model: str, recipe: str | None = None, out: str | None = None, device: str = "cpu", set: list[str] | None = None
) -> int:
    """Evaluate a trained model with the tasks of its recipe.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, or saved model folder.
        recipe: YAML file that names data and tasks; the run's own by default.
        out: Folder for results; evals/STEP in the run folder by default.
        device: cpu or cuda.
    """
    check_model(model)
    from ..data import prepare_shards
    from ..studies import evaluate_checkpoint, load_recipe
    from ..studies.evaluation import evaluations_folder
    from ..train import latest_checkpoint
    from ..train.run_summary import RECIPE_FILE

    check_device(device)
    checkpoint = latest_checkpoint(Path(model))
    run_folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
    source = Path(recipe) if recipe else run_folder / RECIPE_FILE
    if recipe is None and not source.exists():
        raise ConfigError(f"{run_folder}: no {RECIPE_FILE} here to say what to evaluate on; pass --recipe FILE")
    loaded = load_recipe(source, set)
    shards = prepare_shards(loaded.data, log=log)
    folder = Path(out) if out else evaluations_folder(checkpoint)
    with resumable("stopped; every answer is saved"):
        found = evaluate_checkpoint(
            checkpoint, loaded, shards, folder, device=device, progress_bar=evaluation_progress, log=log
        )
    console.print(_table(str(checkpoint), list(found.values())))
    show(f"Results: {folder}")
    gaps = Gaps("eval")
    for name, result in found.items():
        for gap in result.gaps:
            gaps(f"{name}: {gap}")
    return gaps.status


def _table(title: str, results: list[TaskResult]) -> Table:
    table = Table(title=title)
    table.add_column("measure")
    table.add_column("value", justify="right")
    for result in results:
        for name, value in summary_rows(result):
            table.add_row(name, value)
    return table

"""difftransformer eval MODEL: the tasks of a run's recipe."""

from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from difftransformer.errors import ConfigError
from difftransformer.sources import RECIPE_FILE, check_model, shipped_models, where_begun

from ..results import TaskResult, summary_rows
from .console import resumable, show, show_next, show_table, told_gaps
from .members import run_together
from .progress import evaluation_progress

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes


def run(
    model: str,
    recipe: str | None = None,
    out: str | None = None,
    device: str = "cpu",
    processes: int | None = None,
    set: list[str] | None = None,
) -> int:
    """Evaluate a trained model with the tasks of its recipe.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, or saved model folder.
        recipe: YAML file that names data and tasks; the run's own by default.
        out: Folder for results; evals/STEP in the run folder by default.
        device: cpu or cuda.
        processes: Number of processes of this machine, which divide the questions; torchrun starts more machines.
    """

    def evaluate(crew: "Processes") -> int:
        from difftransformer.data import prepare_shards
        from difftransformer.train import latest_checkpoint

        from ..studies import evaluate_checkpoint, load_recipe
        from ..studies.evaluation import evaluations_folder

        checkpoint = latest_checkpoint(Path(model))
        run_folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
        is_shipped = checkpoint in shipped_models().values()
        if is_shipped and recipe is None:  # its tokenizer was trained on another Python's sources than those here
            source, changes = Path("demo"), [f"data.tokenizer={checkpoint}", *(set or [])]
        else:
            source, changes = Path(recipe) if recipe else run_folder / RECIPE_FILE, list(set or [])
        if recipe is None and not is_shipped and not source.exists():
            raise ConfigError(f"{run_folder}: no {RECIPE_FILE} here to say what to evaluate on; pass --recipe FILE")
        loaded = load_recipe(source, changes)
        usual = Path("evals", checkpoint.name, "recipe") if is_shipped else evaluations_folder(checkpoint)
        folder, place = Path(out or usual), Path() if recipe or is_shipped else where_begun(run_folder)
        if place != Path():
            checkpoint, folder = checkpoint.absolute(), folder.absolute()
        with chdir(place):
            shards = crew.rank0_first(lambda: prepare_shards(loaded.data))
            with resumable("stopped; every answer is saved"), evaluation_progress():
                results = evaluate_checkpoint(checkpoint, loaded, shards, folder, device=device, processes=crew)
        return _show(model, str(checkpoint), results, folder) if crew.is_first else 0

    return run_together(evaluate, device, processes, lambda: check_model(model))


def _show(model: str, title: str, results: dict[str, TaskResult], folder: Path) -> int:
    from ..table import Table, columns

    gaps = [f"{label}: {gap}" for label, result in results.items() for gap in result.gaps]
    rows = [[name, value] for result in results.values() for name, value in summary_rows(result, errors=True)]
    notes = ["± is one standard error over items; it does not cover another training seed."]
    show_table(Table("measures", title, columns("measure", "value"), rows, notes))
    show(f"Results: {folder}")
    if not gaps:
        show_next("maps", model)
    return told_gaps("eval", gaps)

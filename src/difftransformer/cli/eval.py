"""difftransformer eval."""

from pathlib import Path

from rich.table import Table

from ..data import prepare_shards
from ..errors import ConfigError
from ..evals import evaluate
from ..hub import open_model
from ..hub.summary import evaluation_rows
from ..results import Evaluation, write_result
from ..studies import load_recipe
from ..studies.environment import command_line, environment, now
from ..train import latest_checkpoint
from ..train.run_summary import RECIPE_FILE
from .arguments import SET, check_device
from .console import console, log, show

ARGUMENTS = SET


def run(
    model: str, recipe: str | None = None, out: str | None = None, device: str = "cpu", set: list[str] | None = None
) -> int:
    """Evaluate a trained model.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, or saved model folder.
        recipe: YAML file that says on what and how; the run's own by default.
        out: Results file; evals/STEP.json in the run folder by default.
        device: cpu or cuda.
    """
    check_device(device)
    checkpoint = latest_checkpoint(Path(model))
    folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
    source = Path(recipe) if recipe else folder / RECIPE_FILE
    if recipe is None and not source.exists():
        raise ConfigError(f"{folder}: no {RECIPE_FILE} here to say what to evaluate on; pass --recipe FILE")
    loaded = load_recipe(source, set)
    shards = prepare_shards(loaded.data, log=log)
    trained = open_model(checkpoint, model_type="difftransformer").to(device)
    vocabulary = shards.tokenizer.vocab_size
    if trained.config.vocab_size != vocabulary:
        raise ConfigError(
            f"{checkpoint}: vocabulary of {trained.config.vocab_size}, but the recipe's tokenizer has {vocabulary} tokens; "
            "pass the recipe that the model was trained with"
        )
    measured = evaluate(trained, shards, loaded.evaluation, context_tokens=loaded.training.context_tokens, say=log)
    result = Evaluation(
        checkpoint=str(checkpoint),
        command=command_line(),
        created=now(),
        environment=environment(device),
        nll=measured.nll,
        needle=measured.needle,
        allocation=measured.allocation,
    )
    path = write_result(result, Path(out) if out else folder / "evals" / f"{checkpoint.name}.json")
    console.print(_table(result))
    show(f"Results: {path}")
    return 0


def _table(result: Evaluation) -> Table:
    table = Table(title=result.checkpoint)
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in evaluation_rows(result):
        table.add_row(name, value)
    return table

"""Summary of a run at a given step, for the model card, from the recipe and the metrics in the run folder."""

from pathlib import Path

from ..errors import CheckpointError
from ..model.card import Training
from ..reading import parse_yaml
from .metrics import METRICS_FILE, read_metrics

RECIPE_FILE = "config.yaml"


def training_summary(run: Path, step: int) -> Training | None:
    """Return the recipe and figures of a run after a step, or None for a folder without a recipe.

    Raises:
        CheckpointError: The recipe or the metrics cannot be read.
    """
    path = run / RECIPE_FILE
    if not path.is_file():
        return None
    try:
        recipe = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); copy it again") from None
    if not isinstance(recipe, dict):
        raise CheckpointError(f"{path} holds a {type(recipe).__name__}, expected a recipe, a mapping; copy it again")
    metrics = run / METRICS_FILE
    steps, validations = read_metrics(metrics) if metrics.exists() else ([], [])
    figures = []
    if done := [line for line in steps if line.step <= step]:
        last = done[-1]
        figures += [
            ("steps", f"{last.step:,}"),
            ("tokens", f"{last.tokens:,}"),
            ("seconds in training steps", f"{last.seconds:,.1f}"),
            ("training loss of the last step, nats/token", f"{last.loss_nats:.4f}"),
        ]
        if last.lambdas:
            words = ("not finite" if value is None else f"{value:.3f}" for value in last.lambdas)
            figures.append(("lambda of each layer", ", ".join(words)))
    if seen := [line for line in validations if line.step <= step]:
        figures.append(
            (f"validation loss at step {seen[-1].step:,}, nats/token", f"{seen[-1].validation_loss_nats:.4f}")
        )
    return Training(figures=figures, recipe=recipe)

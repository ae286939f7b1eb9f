"""Summary of a run at a given step, for the model card, from the recipe and the metrics in the run folder."""

from pathlib import Path

from ..errors import CheckpointError
from ..model.card import Training
from ..reading import parse_yaml
from ..sources import RECIPE_FILE
from ..typed import build
from .metrics import METRICS_FILE, StepMetrics, ValidationMetrics, read_lines


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
    done = seen = None
    for line in read_lines(metrics) if metrics.exists() else ():  # at every checkpoint, so only two lines are built
        if line["step"] <= step:
            seen = line if "validation_loss_nats" in line else seen
            done = line if "loss_nats" in line else done
    figures = []
    if done is not None:
        last = build(StepMetrics, done, source=str(metrics), error=CheckpointError)
        figures += [
            ("steps", f"{last.step:,}"),
            ("tokens", f"{last.tokens:,}"),
            ("seconds in training steps", f"{last.seconds:,.1f}"),
            ("training loss of the last step, nats/token", f"{last.loss_nats:.4f}"),
        ]
        if last.lambdas:
            words = ("not finite" if value is None else f"{value:.3f}" for value in last.lambdas)
            figures.append(("lambda of each layer", ", ".join(words)))
    if seen is not None:
        validation = build(ValidationMetrics, seen, source=str(metrics), error=CheckpointError)
        figures.append(
            (f"validation loss at step {validation.step:,}, nats/token", f"{validation.validation_loss_nats:.4f}")
        )
    return Training(figures=figures, recipe=recipe)

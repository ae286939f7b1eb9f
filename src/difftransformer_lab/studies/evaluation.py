"""The evaluations of a study: the recipe's tasks, asked of a run's checkpoint."""

from pathlib import Path
from typing import Any

import torch

from difftransformer.data import Shards, validation_rows
from difftransformer.errors import ConfigError
from difftransformer.train import Callback, Trainer
from difftransformer.train.checkpoint import STATE_FILE, folder_of_step, read_average
from difftransformer.train.metrics import EvaluationMetrics
from difftransformer.train.parallel import ALONE, Processes

from ..evals.engine import Task
from ..evals.evaluate import kept_or_asked
from ..evals.models.causal import UNBOUNDED
from ..evals.opening import open_language_model
from ..evals.prompts.texts import TaskContext
from ..evals.tasks import task_kind
from ..results import TaskResult
from .recipe import Recipe

EVALUATIONS = "evals"


def draw_tasks(recipe: Recipe, shards: Shards) -> dict[str, Task]:
    """Draw every task of a recipe, so that an impossible one is refused before training.

    Raises:
        ConfigError: options that the task does not take, or that cannot be met.
        DataError: text or data that cannot be read, or is too short.
    """
    training = recipe.training
    validation_rows(shards, training.context_tokens, training.validation_windows)  # training asks for these
    context = TaskContext(
        tokenizer=shards.tokenizer,
        context_tokens=training.context_tokens,
        longest=recipe.model_config(vocab_size=shards.tokenizer.vocab_size).max_position_embeddings,
        validation=lambda: shards.tokens("validation"),
        data=lambda: recipe.data,
    )
    return {spec.name: task_kind(spec.task).make(spec.built(), context) for spec in recipe.evaluation}


def evaluate_checkpoint(
    checkpoint: Path,
    recipe: Recipe,
    shards: Shards,
    folder: Path,
    *,
    wait: bool = False,
    device: str = "cpu",
    processes: Processes = ALONE,
) -> dict[str, TaskResult]:
    """Ask a model the recipe's tasks. Tasks with a result in the folder are not asked again.

    A run with `training.ema` answers with the average of its weights.

    Args:
        folder: Folder for results, FOLDER/NAME.json.
        wait: Whether to wait for another process that is working in the folder.
        processes: All processes, each with the model. The first one writes.

    Returns:
        The results by the tasks' names.

    Raises:
        ConfigError: the data's tokenizer is not the model's.
        CheckpointError: the folder holds no model, or a damaged one.
        FolderInUse: another process is working in the folder, and `wait` is False.
    """
    tasks = processes.rank0_first(lambda: draw_tasks(recipe, shards))
    # A recipe may ask beyond the trained context. A study's own models are small, and rows side by side are faster for them
    # than a common prefix, but not for a pretrained model.
    with (
        open_language_model(
            str(checkpoint),
            device=device,
            dtype=recipe.evaluation_dtype,
            batch_tokens=recipe.evaluation_batch_tokens,
            context_tokens=UNBOUNDED,
            prefix_caching=recipe.start_from is not None,
        ) as opened,
        processes.locked(folder, wait=wait),
    ):
        own, wanted = opened.language_model.tokenizer, shards.tokenizer
        sizes = own.vocab_size, wanted.vocab_size
        differs = f"has {sizes[1]} tokens" if sizes[0] != sizes[1] else ""
        if not differs and (other := own.first_other(wanted)):
            differs = f"has {other[2]!r} as token {other[0]}, which is {other[1]!r} there"
        if differs:
            raise ConfigError(
                f"{checkpoint}: vocabulary of {sizes[0]}, but the recipe's tokenizer {differs}; pass the recipe that the model "
                "was trained with"
            )
        if recipe.training.ema is not None and (checkpoint / STATE_FILE).exists():
            read_average(checkpoint, opened.language_model.model)
        results = {}
        for spec in recipe.evaluation:
            task = tasks[spec.name]
            results[spec.name] = kept_or_asked(spec, opened, folder, task, processes=processes)
            if processes.is_first:
                for answers in folder.glob(f"{spec.name}.answers.jsonl*"):  # they have served
                    answers.unlink()
    return results


class EvaluateCheckpoints(Callback):
    """Asks checkpoints of a run the recipe's tasks while it trains.

    Results are in the folder where `eval RUN` finds them, and figures without details in the run's metrics.

    Args:
        recipe: Names the tasks, and how often they are asked (`logs.evaluate_every`).
    """

    def __init__(self, recipe: Recipe, shards: Shards) -> None:
        self._recipe, self._shards = recipe, shards

    def on_checkpoint(self, trainer: Trainer) -> None:
        due = trainer.step % self._recipe.logs.evaluate_every == 0 and trainer.step > trainer.evaluated
        if not due or trainer.stopping or not trainer.finish_saving():
            return
        checkpoint = folder_of_step(trainer.folder, trainer.step)
        folder, group = evaluations_folder(checkpoint), trainer.processes
        with torch.random.fork_rng():
            how: dict[str, Any] = {"device": group.device, "processes": group}
            results = evaluate_checkpoint(checkpoint, self._recipe, self._shards, folder, **how)
        figures = {
            "/".join((name, measured.name, *(f"{key} {value}" for key, value in measured.at.items()))): measured.value
            for name, result in results.items()
            for measured in result.measurements
            if not measured.detail
        }
        trainer.report(EvaluationMetrics(step=trainer.step, evaluation=figures))
        trainer.evaluated = trainer.step


def evaluations_folder(checkpoint: Path) -> Path:
    """Return the folder for a checkpoint's results: evals/STEP of its run, or evals of a saved model's folder."""
    if checkpoint.parent.name == "checkpoints":
        return checkpoint.parent.parent / EVALUATIONS / checkpoint.name
    return checkpoint / EVALUATIONS

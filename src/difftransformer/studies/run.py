"""One run of a study in a process of its own: train, then evaluate. `python -m difftransformer.studies.run FOLDER`.

The folder holds the resolved recipe; what is whole in it already is not done again, so a study that was stopped goes on.
"""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from ..data import Shards, prepare_shards
from ..errors import EXIT_ERROR, EXIT_INTERRUPTED, CheckpointError, ConfigError, DiffTransformerError, ResultsError
from ..evals import evaluate
from ..hub import open_model
from ..model import DiffTransformerForCausalLM
from ..results import Evaluation, read_result, write_result
from ..train import Interrupted, checkpoints, train
from ..train.run_summary import RECIPE_FILE
from .environment import command_line, environment, now
from .recipe import Recipe, load_recipe, recipe_dict, save_recipe

EVALUATION_FILE = "evals/results.json"


def start_run(folder: Path, recipe: Recipe) -> None:
    """Put a recipe into a run folder; a folder with checkpoints goes on if its recipe trains the same.

    Raises:
        CheckpointError: the folder holds a run of another recipe; the message names the first difference.
    """
    path = folder / RECIPE_FILE
    if not path.exists() or not checkpoints(folder):
        save_recipe(recipe, path)
        return
    before, after = recipe_dict(load_recipe(path)), recipe_dict(recipe)
    for document in (before, after):
        del document["data"]["folder"]  # where shards lie does not change what is trained
    for part in ("model", "data", "training", "start_from"):
        if difference := _difference(before[part], after[part], part):
            raise CheckpointError(
                f"{folder}: holds a run of another recipe ({difference}); choose another --out, or delete the folder"
            )
    if before != after:
        save_recipe(recipe, path)
    if before["evaluation"] != after["evaluation"]:
        (folder / EVALUATION_FILE).unlink(missing_ok=True)


def train_run(folder: Path, recipe: Recipe, shards: Shards, **options: object) -> DiffTransformerForCausalLM:
    """Train the recipe's model in a run folder, or go on where it was stopped."""
    tokenizer = shards.tokenizer
    start = None if recipe.start_from is None else open_model(recipe.start_from, model_type="difftransformer")
    if start is not None and start.config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens and the model of start_from {start.config.vocab_size}; "
            "use the model's own tokenizer"
        )
    config = recipe.model_config(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.end_of_text,
        eos_token_id=tokenizer.end_of_text,
        pad_token_id=tokenizer.pad,
    )
    return train(recipe.training, config, shards, folder, start=start, **options)  # type: ignore[arg-type]


def found_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation of a run's newest checkpoint, if there is one that can be read."""
    try:
        found = read_result(folder / EVALUATION_FILE, Evaluation)
    except ResultsError:
        return None
    return found if found.checkpoint == checkpoints(folder)[-1].name else None


def evaluate_run(folder: Path, recipe: Recipe, shards: Shards, model: DiffTransformerForCausalLM | None) -> Evaluation:
    """Evaluate a run's newest checkpoint, or read the evaluation that is there."""
    if found := found_evaluation(folder):
        return found
    checkpoint = checkpoints(folder)[-1]
    measured = evaluate(
        model or open_model(checkpoint, model_type="difftransformer"),
        shards,
        recipe.evaluation,
        context_tokens=recipe.training.context_tokens,
    )
    result = Evaluation(
        checkpoint=checkpoint.name,
        command=command_line(),
        created=now(),
        environment=environment(),
        nll=measured.nll,
        needle=measured.needle,
        allocation=measured.allocation,
    )
    write_result(result, folder / EVALUATION_FILE)
    return result


def is_trained(folder: Path, recipe: Recipe) -> bool:
    """Whether the run's newest checkpoint is that of the last step."""
    found = checkpoints(folder)
    return bool(found) and found[-1].name == f"step-{recipe.training.steps:06d}"


def main(arguments: list[str]) -> int:
    """Train and evaluate in FOLDER with THREADS threads; errors go to standard error on one line."""
    folder, threads = Path(arguments[0]), int(arguments[1])
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        recipe = load_recipe(folder / RECIPE_FILE)
        shards = prepare_shards(recipe.data)
        model = None if is_trained(folder, recipe) else train_run(folder, recipe, shards)
        evaluate_run(folder, recipe, shards, model)
    except Interrupted as stopped:
        sys.stderr.write(f"{stopped}\n")
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except DiffTransformerError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_ERROR
    except OSError as error:
        free = shutil.disk_usage(folder).free
        sys.stderr.write(f"{error.filename or folder}: {error.strerror} ({free / 2**20:.0f} MiB free)\n")
        return EXIT_ERROR
    return 0


def _stop_with_parent(parent: int) -> None:
    """Ask this process to stop, with a checkpoint, when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGINT)


def _difference(before: object, after: object, key: str) -> str | None:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() | after.keys():
            if found := _difference(before.get(name), after.get(name), f"{key}.{name}"):
                return found
        return None
    return None if before == after else f"{key} was {before!r} and is now {after!r}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise ConfigError("usage: python -m difftransformer.studies.run FOLDER THREADS")
    raise SystemExit(main(sys.argv[1:]))

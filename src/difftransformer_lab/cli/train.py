"""difftransformer train."""

import os
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from difftransformer.sources import RECIPE_FILE, where_begun

from ..recipe_files import read_recipe, shipped_recipes
from .arguments import check_device, check_positive, use_threads
from .console import resumable, show, show_next
from .members import run_together
from .progress import Bars, evaluation_progress, step_bar
from .text_recipe import is_text, write_recipe

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes

    from ..studies import Recipe


def run(
    recipe: str,
    out: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    processes: int | None = None,
    set: list[str] | None = None,
    dry_run: bool = False,
    profile: int | None = None,
) -> int:
    """Train one model. A run that was stopped continues from its newest checkpoint.

    Args:
        recipe: YAML file with model, data and training; a run, to go on with it; or a folder or file of text, to write a
            recipe for it.
        out: Run folder. Defaults to runs/NAME, with the recipe's name.
        seed: Training seed that replaces the recipe's.
        device: cpu or cuda.
        threads: Number of CPU threads of each process. Defaults to all. Losses are bitwise equal for equal numbers of threads.
        processes: Number of processes of this machine, which the recipe's `parallel` divides. torchrun starts more machines.
        dry_run: Say what would be trained and what is missing, and train nothing.
        profile: Write a trace of this number of steps to RUN/profile, for ui.perfetto.dev.
    """
    named, place = Path(recipe), Path()
    if recipe not in shipped_recipes() | shipped_recipes("paper"):
        if (folder := _run_of(named)) is not None:
            recipe, out, place = str(folder / RECIPE_FILE), out or str(folder), where_begun(folder)
            if place != Path():
                recipe, out = os.path.abspath(recipe), os.path.abspath(out)
        elif is_text(named):
            path = write_recipe(named)
            show(f"{path}: a recipe for the text in {named}")
            show_next("train", path)
            return 0
    read_recipe(recipe)
    check_positive(processes=processes, profile=profile)
    overrides = list(set or []) + ([f"training.seed={seed}"] if seed is not None else [])
    if dry_run:
        check_device(device)
        with chdir(place):
            return _describe(recipe, overrides, out, threads, processes)

    def train(crew: "Processes") -> int:
        with chdir(place):
            return _train(recipe, overrides, out, threads, profile, crew)

    return run_together(train, device, processes)


def _run_of(path: Path) -> Path | None:
    """Return the folder of a run, named by itself or by the recipe in it; None for other paths."""
    if path.is_dir():
        return path if (path / RECIPE_FILE).is_file() else None
    return path.parent if path.name == RECIPE_FILE and (path.parent / "checkpoints").is_dir() else None


def _train(
    recipe: str,
    overrides: list[str],
    out: str | None,
    threads: int | None,
    profile: int | None,
    processes: "Processes",
) -> int:
    from difftransformer.data import Shards, prepare_shards
    from difftransformer.train import Callback, Interrupted, checkpoints
    from difftransformer.train.metrics import METRICS_FILE, read_metrics
    from difftransformer.train.parallel import Mesh
    from difftransformer.train.profiling import Profile

    from ..studies import load_recipe, start_run, train_run
    from ..studies.run import is_trained

    with processes.fail_together():
        loaded = load_recipe(recipe, overrides)
        use_threads(threads)
        mesh = Mesh(processes, loaded.parallel)
        mesh.check(loaded.model_config(vocab_size=1), loaded.training)
    folder = _folder(loaded, out)
    callbacks: list[Callback] = [Profile(profile)] if profile else []

    def prepare() -> Shards:
        if not processes.is_first:
            return prepare_shards(loaded.data)
        start_run(folder, loaded)
        with evaluation_progress("tokenising"):
            return prepare_shards(loaded.data)

    _show_needle_rows(loaded, overrides)
    with processes.locked(folder):
        shards = processes.rank0_first(prepare)
        if not processes.is_first:
            try:
                train_run(folder, loaded, shards, mesh=mesh, callbacks=callbacks)
            except Interrupted as stopped:
                return stopped.status
            return 0
        was_trained = is_trained(folder, loaded)
        with resumable(), Bars() as bars:
            callbacks.append(step_bar(bars, loaded.name, loaded.training.steps))
            train_run(folder, loaded, shards, mesh=mesh, callbacks=callbacks)
    newest, steps = checkpoints(folder)[-1], f"all {loaded.training.steps:,} steps"
    show(f"{'Trained before, ' + steps if was_trained else 'Trained ' + steps}: {newest}")
    _, validations = read_metrics(folder / METRICS_FILE)
    if validations:
        show(f"Validation loss: {validations[-1].validation_loss_nats:.4f} nats/token")
    show_next("eval", folder)
    return 0


def _describe(recipe: str, overrides: list[str], out: str | None, threads: int | None, processes: int | None) -> int:
    """Print what a recipe trains and which of its files are missing. Refuse what training would refuse."""
    from difftransformer.data.text import check_split
    from difftransformer.model import count
    from difftransformer.train.parallel import Mesh, Processes

    from ..studies import load_recipe
    from ..studies.run import continued_recipe

    loaded = load_recipe(recipe, overrides)
    use_threads(threads)
    mesh = Mesh(Processes(count=processes or 1), loaded.parallel)
    continued_recipe(_folder(loaded, out), loaded)
    missing = loaded.missing()
    if loaded.model or loaded.start_from is None or not missing:
        config, training = loaded.planned_config(), loaded.training
        mesh.check(config, training)
        stages = ", ".join(str(long) for _, long in training.context_stages)
        tokens = f"{training.batch_tokens:,} tokens, {training.steps * training.batch_tokens:,} in all"
        show(f"{loaded.name}: {config.attention_type}, {count(config).parameters:,} parameters")
        show(f"{training.steps:,} steps of {tokens}; rows of {stages} tokens")
    _show_needle_rows(loaded, overrides)
    for line in missing:
        show(f"missing: {line}")
    if not missing:
        data = loaded.data
        for source in [one.source for one in data.mixture] or [data.source]:
            if Path(source).exists():
                check_split(source, validation_share=data.validation_share, seed=data.split_seed)
    return 0


def _folder(recipe: "Recipe", out: str | None) -> Path:
    return Path(out or f"runs/{recipe.name}")


def _show_needle_rows(recipe: "Recipe", overrides: list[str]) -> None:
    """Say that rows of needle documents stay when the text is replaced."""
    keys = [change.partition("=")[0] for change in overrides]
    is_stated = any(key.startswith("training.retrieval") for key in keys)
    if recipe.training.retrieval is not None and not is_stated and {"data.source", "data.mixture"} & {*keys}:
        show(
            f"{recipe.training.retrieval.share:.0%} of the rows are the recipe's needle documents, and not your text; "
            "--set training.retrieval=null leaves them out"
        )

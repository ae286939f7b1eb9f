"""difftransformer study."""

from pathlib import Path
from typing import TYPE_CHECKING

from difftransformer.errors import ConfigError, DataError
from difftransformer.files import locked
from difftransformer.typed import unknown_key

from ..recipe_files import read_mapping, shipped_recipes
from .arguments import check_device, check_positive, use_threads
from .console import show
from .progress import training_shown

if TYPE_CHECKING:
    from ..studies import Study

RESULTS = "reports/studies"


def run(
    study: str,
    preset: str = "laptop",
    seeds: int | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    source: str | None = None,
    results: str = RESULTS,
    out: str | None = None,
    set: list[str] | None = None,
    only: list[str] | None = None,
    dry_run: bool = False,
) -> int:
    """Train the runs of a study that are missing, and write its index.

    Args:
        study: Name of a study, such as controls, or a YAML file.
        preset: Size of the study.
        seeds: Number of seeds of every arm, in place of the study's.
        jobs: Runs that train at the same time. Defaults to one for each thread on the CPU, and to one on a GPU.
        threads: Number of CPU threads of all runs together.
        device: cpu or cuda.
        source: Pretrained model from which the study starts: a folder, a .gguf file, or owner/name on the hub.
        results: Folder with one subfolder for each study, such as docs/results/studies. Runs of any study there are not
            trained again.
        out: Folder for checkpoints and the page; reports/studies/NAME by default.
        only: Arms to train, to divide a study between machines. The study without --only writes the page.
        dry_run: Print the runs and the smallest effect that the seeds can detect; train nothing.
    """
    expected = "a study is a mapping with name, question, recipe, arms and figures"
    read_mapping(study, shipped_recipes("studies"), expected)
    check_positive(seeds=seeds, jobs=jobs)
    check_device(device)
    use_threads(threads)
    import torch

    from difftransformer.ops import build

    from ..analysis import read_studies
    from ..studies import Design, Study, load_study
    from .report import show_study

    loaded = load_study(study)
    at_once = jobs or (torch.get_num_threads() if device == "cpu" else 1)
    folder = Path(out or f"reports/studies/{loaded.name}")
    design = Design(loaded, preset, seeds=seeds, changes=set or [], file=study)
    whole = Study(design, Path(results), source=source, models=folder / "models")
    for arm in only or ():
        if arm not in design.arms:
            raise ConfigError(f"--only {arm}: {unknown_key(arm, design.arms)}")
    if dry_run:
        return _describe(whole, only or design.arms)
    build.load()  # here, where its line is seen, and not in a run
    with locked(folder), training_shown(f"study {loaded.name}"):
        whole.train(folder, at_once=at_once, device=device, only=only)
    if only is not None:
        show(f"Results: {whole.store.folder}")
        return 0
    return show_study(read_studies(whole.index_file)[0], folder / whole.index_file.stem, "study")


def _describe(study: "Study", arms: list[str]) -> int:
    from ..statistics import detectable

    design, seeds = study.design, study.design.seeds()
    show(f"{design.config.name}, preset {design.name}: {design.config.question}")
    try:
        tuning, rates = study.tuning(), study.rates()
        known = [*tuning, *design.reported(rates)]
        found = zip(known, study.files(known), strict=True)
        there = sum(file is not None and run.arm in arms for run, file in found)
        asked = design.reported(rates if design.is_tuned(rates) else None)
        counts = {arm: [sum(run.arm == arm for run in runs) for runs in (tuning, asked)] for arm in arms}
        count = sum(map(sum, counts.values()))
        show(f"{count} runs, {there} are there, {count - there} to train")
        for arm, (to_choose, reported) in counts.items():
            choice = f"{to_choose} to choose learning rates, " if to_choose else ""
            show(f"  {arm}: {choice}{reported} reported")
    except DataError as error:
        if design.config.source:
            raise
        show(f"{len(design.tuning) + len(design.reported())} runs; none could be looked up: {error}")
    show(
        "Smallest effect that one planned contrast shows with a probability of 0.8, in standard deviations of the differences "
        "by seed: "
        + ", ".join(f"{detectable(count):.1f} with {count} seeds" for count in sorted({*seeds}) if count > 1)
        + ("" if seeds[0] > 1 else ", none with 1 seed" if seeds[1] > 1 else "none with 1 seed")
    )
    return 0

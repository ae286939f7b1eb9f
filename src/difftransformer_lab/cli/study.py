"""difftransformer study."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from difftransformer.files import locked

from ..recipe_files import read_mapping, shipped_recipes
from .arguments import check_device, check_positive, use_threads
from .console import show
from .progress import in_words, training_shown

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
    dry_run: bool = False,
    launcher: Literal["processes", "slurm", "local"] = "processes",
    launcher_options: str = "{}",
) -> int:
    """Train the runs of a study that are missing, and write its index.

    Args:
        study: Name of a study, such as controls, or a YAML file.
        preset: Size of the study.
        seeds: Number of seeds of every arm, in place of the study's.
        jobs: Runs that train at the same time. Defaults to one for each thread on the CPU, and to one on a GPU.
        threads: Number of CPU threads of all runs together.
        device: cpu or cuda.
        source: The pretrained model of a study that starts from one: a folder, a .gguf file, or owner/name on the hub.
        results: Folder with one subfolder for each study, such as docs/results/studies. Runs that any of them has are not
            trained again.
        out: Folder for checkpoints and the page; reports/studies/NAME by default.
        dry_run: Print the runs, the time that they take and the smallest effect that the seeds can detect; train nothing.
        launcher: Where runs compute: in processes of this machine, or by submitit as jobs of Slurm or as local ones. The
            command waits for them, with --jobs at a time, and needs shared folders.
        launcher_options: Parameters of submitit, such as '{timeout_min: 600, slurm_partition: gpu}'.
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
    from ..studies.launcher import submitting
    from .report import show_study

    loaded = load_study(study)
    at_once = jobs or (torch.get_num_threads() if device == "cpu" else 1)
    folder = Path(out or f"reports/studies/{loaded.name}")
    design = Design(loaded, preset, seeds=seeds, changes=set or [], file=study)
    whole = Study(design, Path(results), source=source, models=folder / "models")
    if dry_run:
        return _describe(whole, at_once, device)
    build.load()  # here, where its line is seen, and not in a run
    title = f"study {loaded.name}"
    where: AbstractContextManager[None] = nullcontext()
    if launcher != "processes":
        where = submitting(folder / "submitit", launcher, launcher_options)
    place = folder / whole.index_file.stem
    with where, locked(folder), training_shown(title):
        whole.train(folder, at_once=at_once, device=device)
    return show_study(read_studies(whole.index_file)[0], place, "study")


def _describe(study: "Study", at_once: int, device: str) -> int:
    import torch

    from ..statistics import detectable
    from ..studies import estimate
    from ..table import counted

    threads = max(1, torch.get_num_threads() // at_once)
    design = study.design
    seeds = design.seeds()
    expected = estimate(study, at_once=at_once, threads=threads, device=device)
    show(f"{study.design.config.name}, preset {study.design.name}: {study.design.config.question}")
    show(f"{expected.runs} runs, {expected.runs - expected.missing} are there, {expected.missing} to train")
    if expected.absent:
        show(f"No run could be looked up: {expected.absent}")
    if expected.longest is not None:
        title, longest = expected.longest
        show(
            f"about {in_words(expected.seconds)}, {at_once} at a time with {counted(threads, 'thread')} each, "
            f"by {expected.basis}; the longest run, {title}, {in_words(longest)}"
        )
    show(
        "Smallest effect that one planned contrast shows with a probability of 0.8, in standard deviations of the differences "
        "by seed: "
        + ", ".join(f"{detectable(count):.1f} with {count} seeds" for count in sorted({*seeds}) if count > 1)
        + ("" if seeds[0] > 1 else ", none with 1 seed" if seeds[1] > 1 else "none with 1 seed")
    )
    return 0

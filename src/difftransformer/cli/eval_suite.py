"""difftransformer eval suite."""

from pathlib import Path

from ..errors import EXIT_ERROR, ConfigError
from ..model.dtypes import WeightsDtype
from ..report.tasks import measurement_table
from ..report.tasks.page import write_suite
from ..report.terminal import _rich
from ..studies.suite import load_suite, run_suite
from .arguments import check_device
from .console import console, log, resumable, show
from .progress import evaluation_progress

ARGUMENTS = {
    "models": {
        "nargs": "+",
        "help": "Runs, checkpoints, folders of saved models, .gguf files, or owner/name on the hub.",
    }
}


def run(
    models: list[str],
    preset: str = "quick",
    out: str = "reports/suite",
    device: str = "cpu",
    dtype: WeightsDtype = "auto",
    batch_tokens: int = 16_384,
    accelerate: bool = True,
) -> int:
    """Run a set of experiments on one or more models and write one report.

    Args:
        preset: quick, paper, or a YAML file of your own.
        out: Folder for results and index.html. A suite that was stopped goes on there.
        device: cpu or cuda.
        dtype: Of the weights; auto is what they were saved in.
        batch_tokens: Most tokens of rows side by side.
        accelerate: Whether other models' attention goes through this package's kernels, where these can say it.
    """
    check_device(device)
    if batch_tokens < 1:
        raise ConfigError(f"--batch_tokens {batch_tokens}: give at least 1")
    if len(set(models)) < len(models):
        raise ConfigError("a model was named twice; name each once")
    suite, folder = load_suite(preset), Path(out)
    with resumable("stopped; every answer is saved"):
        found, missing = run_suite(
            suite,
            models,
            folder,
            device=device,
            dtype=dtype,
            batch_tokens=batch_tokens,
            accelerated=accelerate,
            progress=evaluation_progress,
            say=log,
        )
    for results in found.values():
        if results:
            console.print(_rich(measurement_table(results, brief=True)))
    reasons = [(row.name, row.model, row.reason) for row in missing]
    page = write_suite(suite.name, found, reasons, folder)
    show(f"Report: {page}")
    return 0 if any(found.values()) else EXIT_ERROR

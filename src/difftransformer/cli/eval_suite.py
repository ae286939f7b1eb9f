"""difftransformer eval suite."""

from pathlib import Path

from ..errors import ConfigError
from ..model.dtypes import WeightsDtype
from ..report import write_suite
from ..report.tasks import measurement_table
from ..report.terminal import rich_table
from ..studies.suite import load_suite, run_suite
from .arguments import check_device, check_positive
from .console import Gaps, console, log, resumable, show
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
    """Run several tasks on one or more models and write one report.

    Args:
        preset: quick, paper, or your own YAML file.
        out: Folder for results and index.html. An interrupted suite continues there.
        device: cpu or cuda.
        dtype: Dtype of the weights; auto keeps the one in which they were saved.
        batch_tokens: Maximum number of tokens of a batch.
        accelerate: Whether to compute the attention of other models with this package's kernels, where these support it.
    """
    check_device(device)
    check_positive(batch_tokens=batch_tokens)
    if len(set(models)) < len(models):
        raise ConfigError("a model is given twice; give each model once")
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
            progress_bar=evaluation_progress,
            log=log,
        )
    for results in found.values():
        if results:
            console.print(rich_table(measurement_table(results, brief=True)))
    reasons = [(row.name, row.model, row.reason) for row in missing]
    gaps = Gaps("eval suite")
    page = write_suite(suite.name, found, reasons, folder, on_gap=gaps)
    show(f"Report: {page}")
    return gaps.status

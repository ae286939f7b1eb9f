"""difftransformer eval suite."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftransformer.errors import ConfigError
from difftransformer.typed import WeightsDtype

from ..evals.engine import no_progress
from .arguments import check_positive
from .console import Gaps, console, log, resumable, show
from .members import run_together
from .progress import evaluation_progress

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes

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
    processes: int | None = None,
    divide_weights: bool = False,
) -> int:
    """Run several tasks on one or more models and write one report.

    Args:
        preset: quick, paper, or your own YAML file.
        out: Folder for results and index.html. An interrupted suite continues there.
        device: cpu or cuda.
        dtype: Dtype of the weights; auto keeps the one in which they were saved.
        batch_tokens: Maximum number of tokens of a batch.
        accelerate: Whether to compute the attention of other models with this package's kernels, where these support it.
        processes: Number of processes of this machine, which divide the questions; torchrun starts more machines.
        divide_weights: Whether the processes divide the weights of one model that does not fit one device, and all compute
            every question. Otherwise each has its own model.
    """
    from ..studies.suite import load_suite, run_suite

    folder = Path(out)

    def check() -> None:
        check_positive(batch_tokens=batch_tokens)
        if len(set(models)) < len(models):
            raise ConfigError("a model is given twice; give each model once")
        load_suite(preset)

    def evaluate(crew: "Processes") -> int:
        suite, first = load_suite(preset), crew.is_first
        with crew.locked(folder), resumable("stopped; every answer is saved"):
            found, missing = run_suite(
                suite,
                models,
                folder,
                device=device,
                dtype=dtype,
                batch_tokens=batch_tokens,
                accelerated=accelerate,
                processes=crew,
                divide_weights=divide_weights,
                progress_bar=evaluation_progress if first else lambda label: nullcontext(no_progress),
                log=log if first else lambda text: None,
            )
        return _show(suite.name, found, missing, folder) if first else 0

    return run_together(evaluate, device, processes, check)


def _show(name: str, found: dict[str, Any], missing: list[Any], folder: Path) -> int:
    """Print the results, write the page, and return the exit status."""
    from ..report import write_suite
    from ..report.tasks import measurement_table
    from ..report.terminal import rich_table

    for results in found.values():
        if results:
            console.print(rich_table(measurement_table(results, brief=True)))
    reasons = [(row.name, row.model, row.reason) for row in missing]
    gaps = Gaps("eval suite")
    page = write_suite(name, found, reasons, folder, on_gap=gaps)
    show(f"Report: {page}")
    return gaps.status

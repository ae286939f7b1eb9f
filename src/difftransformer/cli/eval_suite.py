"""difftransformer eval suite."""

import shlex
import sys
from pathlib import Path
from typing import Literal

from ..errors import ConfigError
from ..report import write_suite
from ..report.tasks import measurement_table
from ..report.terminal import rich_table
from ..studies.suite import load_suite, run_suite
from .console import console, say
from .hardware import check_device
from .progress import evaluation_progress

EXIT_INTERRUPTED = 130
SEVERAL_POSITIONALS = {"models": "Runs, checkpoints, folders of saved models, .gguf files, or owner/name on the hub."}


def run(
    models: list[str],
    preset: str = "quick",
    out: str = "reports/suite",
    device: str = "cpu",
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    batch_tokens: int = 16_384,
    accelerate: bool = True,
) -> int:
    """Run several tasks on one or more models and write one report.

    Args:
        models: Runs, checkpoints, folders of saved models, .gguf files, or owner/name on the hub.
        preset: quick, paper, or your own YAML file.
        out: Folder for results and index.html. An interrupted suite continues there.
        device: cpu or cuda.
        dtype: Dtype of the weights; auto keeps the one in which they were saved.
        batch_tokens: Maximum number of tokens of a batch.
        accelerate: Whether to compute the attention of other models with this package's kernels, where these support it.
    """
    check_device(device)
    if batch_tokens < 1:
        raise ConfigError(f"--batch_tokens {batch_tokens}: give at least 1")
    if len(set(models)) < len(models):
        raise ConfigError("a model is given twice; give each model once")
    suite, folder = load_suite(preset), Path(out)
    try:
        found, missing = run_suite(
            suite,
            models,
            folder,
            device=device,
            dtype=dtype,
            batch_tokens=batch_tokens,
            accelerated=accelerate,
            progress_bar=evaluation_progress,
            log=say,
        )
    except KeyboardInterrupt:
        say(f"Stopped; every answer is saved. Go on with: {shlex.join(['difftransformer', *sys.argv[1:]])}")
        return EXIT_INTERRUPTED
    for results in found.values():
        if results:
            console.print(rich_table(measurement_table(results, brief=True)))
    reasons = [(row.name, row.model, row.reason) for row in missing]
    page = write_suite(suite.name, found, reasons, folder)
    console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    return 0 if any(found.values()) else 2

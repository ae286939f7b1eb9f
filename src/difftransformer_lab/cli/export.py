"""difftransformer export."""

from pathlib import Path
from typing import Any, Literal

from difftransformer.errors import DamagedResult, ResultsError
from difftransformer.sources import check_model

from ..results import RunRecord, TaskResult, read_result, summary_rows
from .console import log, show, show_next

RECORD_FILE = "record.json"
"""What a study or a comparison writes beside a run."""


def run(
    model: str,
    out: str,
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
    to: Literal["difftransformer", "diffllama", "llama"] = "difftransformer",
    license: str | None = None,
    with_code: bool = False,
    untie: bool = False,
    average: bool = False,
) -> int:
    """Write a run or a saved model to a clean Hugging Face folder: weights, tokenizer, model card with recipe and figures.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, or folder of a saved model.
        out: Folder to write. It must not exist, or be empty.
        dtype: Floating-point type of the weights. auto keeps the type that they were saved in.
        to: Layout. diffllama, and llama for a softmax twin or a DEX model, open in stock transformers, without this package.
        license: Licence identifier for the card, such as mit or apache-2.0.
        with_code: Add Python code with which transformers opens the folder without this package (trust_remote_code=True).
        untie: With --to, write a tied output layer as a matrix of its own. A model with an embedding multiplier needs this.
        average: Write the average of the weights over steps, which a run with training.ema keeps.
    """
    check_model(model)
    from difftransformer.hub import export_folder
    from difftransformer.train import latest_checkpoint

    figures = [] if average else _evaluations(latest_checkpoint(Path(model)))
    how: dict[str, Any] = {"dtype": dtype, "to": to, "untie": untie, "average": average}
    done = export_folder(model, out, license=license, with_code=with_code, figures=figures, **how)
    for note in done.notes:
        log(note)
    if done.kept_card:
        log("README.md was edited by hand and is copied unchanged")
    show(f"{done.folder}: {done.source} as {done.layout}, {done.bytes:,} bytes in {len(done.files)} files")
    show_next("maps", out)
    return 0


def _evaluations(checkpoint: Path) -> list[tuple[str, str]]:
    """Read the figures of a checkpoint from evals/CHECKPOINT of its run; other folders have none."""
    run = checkpoint.absolute().parents[1]
    rows = []
    if (run / RECORD_FILE).is_file():
        record = read_result(run / RECORD_FILE, RunRecord)
        if record.recipe["data"]["source"] == "python-stdlib":
            library = f"the standard library of Python {record.environment.python}"
            rows.append(("text", f"{library}; other versions give other figures"))
    for path in sorted((run / "evals" / checkpoint.name).glob("*.json")):
        try:
            rows += summary_rows(read_result(path, TaskResult))
        except DamagedResult:
            raise
        except ResultsError:  # another kind of file
            pass
    return rows

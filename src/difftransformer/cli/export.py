"""difftransformer export."""

from typing import Literal

from ..hub import export_folder
from .console import say


def run(
    model: str,
    out: str,
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
    to: Literal["difftransformer", "diffllama"] = "difftransformer",
    license: str | None = None,
) -> int:
    """Write a run or a saved model as a clean Hugging Face folder: weights, tokenizer, model card with recipe and figures.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, or saved model folder.
        out: Folder to make; it must not exist yet, or be empty.
        dtype: Of the weights; auto keeps what they were saved in.
        to: Layout; diffllama opens in stock transformers, with no code of ours.
        license: For the card, such as mit or apache-2.0.
    """
    done = export_folder(model, out, dtype=dtype, to=to, license=license)
    for note in done.notes:
        say(note)
    if done.kept_card:
        say("README.md was changed by a person and is carried as it is")
    print(f"{done.folder}: {done.source} as {done.layout}, {done.bytes:,} bytes: {', '.join(done.files)}")
    return 0

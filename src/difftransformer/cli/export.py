"""difftransformer export."""

from typing import Literal

from ..sources import check_model
from .console import log, show

ARGUMENTS = {
    "--with-code": {
        "dest": "with_code",
        "action": "store_true",
        "help": "Add Python code with which transformers opens the folder without this package (trust_remote_code=True).",
    },
    "--untie": {
        "action": "store_true",
        "help": "With --to, write a tied output layer as a matrix of its own. A model with an embedding multiplier needs this.",
    },
}


def run(
    model: str,
    out: str,
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
    to: Literal["difftransformer", "diffllama", "llama"] = "difftransformer",
    license: str | None = None,
    with_code: bool = False,
    untie: bool = False,
) -> int:
    """Write a run or a saved model to a clean Hugging Face folder: weights, tokenizer, model card with recipe and figures.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, or folder of a saved model.
        out: Folder to write. It must not exist, or be empty.
        dtype: Floating-point type of the weights. auto keeps the type that they were saved in.
        to: Layout. diffllama, and llama for a softmax twin, open in stock transformers, without this package.
        license: Licence identifier for the card, such as mit or apache-2.0.
    """
    check_model(model)
    from ..hub import export_folder

    done = export_folder(model, out, dtype=dtype, to=to, license=license, with_code=with_code, untie=untie)
    for note in done.notes:
        log(note)
    if done.kept_card:
        log("README.md was edited by hand and is copied unchanged")
    show(f"{done.folder}: {done.source} as {done.layout}, {done.bytes:,} bytes: {', '.join(done.files)}")
    return 0

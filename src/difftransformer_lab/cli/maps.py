"""difftransformer maps."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from difftransformer.sources import check_model, name_of
from difftransformer.typed import WeightsDtype

from .arguments import check_device, check_positive, check_text
from .console import log, show, show_needle_next

ARGUMENTS = {"prompt": {"nargs": "?", "help": "The text. Defaults to one in which a number must be found."}}


def run(
    model: str,
    prompt: str | None = None,
    beside: str | None = None,
    out: str | None = None,
    tokens: int = 128,
    device: str = "cpu",
    dtype: WeightsDtype = "auto",
) -> int:
    """Write the attention maps of every head to one HTML page, which a browser opens from disk.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, folder of any causal language model that transformers opens
            without custom code, .gguf file, or owner/name on the Hugging Face hub.
        beside: A second model to compare with, such as the twin.
        out: The page, a name that ends in .html; evals/MODEL/maps.html by default.
        tokens: Most tokens of the text, up to 1024. What follows is cut off, and the page says so.
        device: cpu or cuda.
        dtype: Dtype of the weights; auto keeps the one in which they were saved.
    """
    check_positive(tokens=tokens)
    check_device(device)
    if prompt is not None:
        check_text(prompt)
    names = [name for name in (model, beside) if name is not None]
    for name in names:
        check_model(name)
    from difftransformer.hub import open_model, open_tokenizer, source_folder
    from difftransformer.model.transformers_errors import quietly

    from ..explorer import maps

    pairs: list[tuple[Any, Any]] = []
    with ExitStack() as stack, quietly():
        for name in names:
            folder = stack.enter_context(source_folder(name))
            pairs.append((open_model(folder, dtype=dtype).to(device), open_tokenizer(folder)))
        second = pairs[1] if beside is not None else None
        page = maps(*pairs[0], prompt=prompt, beside=second, tokens=tokens, names=tuple(names))
    path = Path(out or Path("evals", name_of(model), "maps.html"))
    if path.suffix != ".html":
        path = path.with_name(f"{path.name}.html")
    if path.is_file() and path.read_text(encoding="utf-8") != page.html:
        log(f"{path}: replaces the maps that were there; another --out keeps both")
    path = page.save(path)
    log(f"{len(page.html) / 1e6:.2f} MB")
    show(f"{path}: open it in a browser")
    show_needle_next(*names)
    return 0

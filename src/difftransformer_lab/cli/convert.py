"""difftransformer convert."""

from pathlib import Path

from difftransformer.errors import ConfigError
from difftransformer.sources import check_model, shipped_models

from ..table import counted
from .console import log, show, show_next


def run(source: str, target: str, to: str | None = None, from_: str | None = None, untie: bool = False) -> int:
    """Convert a model's folder to another layout, tokenizer and chat template included.

    Args:
        source: Folder with config.json and safetensors, or a run folder (its newest checkpoint).
        target: Folder to write. It must not exist, or be empty.
        to: Layout to write: difftransformer, diffllama, or llama for a softmax twin or a DEX model.
        from_: Layout to read. Defaults to the one that config.json names.
        untie: Write a tied output layer as a matrix of its own. A model with an embedding multiplier needs this.
    """
    from difftransformer.families import convert_folder
    from difftransformer.families.conversion import FOLDER_LAYOUTS
    from difftransformer.train import checkpoints, latest_checkpoint

    if to is None:
        raise ConfigError(f"--to is missing; choose one of {', '.join(FOLDER_LAYOUTS)}")
    check_model(source)
    folder = latest_checkpoint(Path(source)) if checkpoints(Path(source)) or source in shipped_models() else source
    done = convert_folder(folder, target, to=to, source_layout=from_, untie=untie)
    for note in done.notes:
        log(note)
    if done.left_behind:
        log(f"Not copied: {', '.join(done.left_behind)}")
    copied = f"; {counted(len(done.carried), 'other file')} copied" if done.carried else ""
    show(f"{done.folder}: {done.layout}, {done.tensors} tensors, {done.bytes:,} bytes{copied}")
    show_next("check", "causality", target)
    return 0

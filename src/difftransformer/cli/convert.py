"""difftransformer convert."""

from ..convert import convert_folder
from ..convert.registry import FOLDER_LAYOUTS
from ..errors import ConfigError
from .console import say


def run(source: str, target: str, to: str | None = None, from_: str | None = None) -> int:
    """Convert a model's folder to another layout, tokenizer and chat template included.

    Args:
        source: A folder with config.json and safetensors.
        target: The folder to make; it must not exist yet, or be empty.
        to: The layout to write: difftransformer or diffllama.
        from_: The layout to read; by default the one that config.json states.
    """
    if to is None:
        raise ConfigError(f"--to is missing; choose one of {', '.join(FOLDER_LAYOUTS)}")
    done = convert_folder(source, target, to=to, source_layout=from_)
    for note in done.notes:
        say(note)
    if done.left_behind:
        say(f"Left behind: {', '.join(done.left_behind)}")
    carried = f"; carried along: {', '.join(done.carried)}" if done.carried else ""
    print(f"{done.folder}: {done.layout}, {done.tensors} tensors, {done.bytes:,} bytes{carried}")
    return 0

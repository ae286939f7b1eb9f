"""Parts of `difftransformer generate` that need torch: a prompt's tokens, the room after it, and text that comes in pieces."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TextStreamer

from difftransformer.errors import CheckpointError, ConfigError, DataError, on_one_line
from difftransformer.model.transformers_errors import FOREIGN_FAULTS, bounded

from ..printable import printable


class PrintedText(TextStreamer):  # type: ignore[misc]
    """Prints text as it comes; what a model writes must not steer the terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


def token_ids(tokenizer: Any, text: str, chat: bool, folder: Path) -> Tensor:
    """Tokenize the prompt to ids of shape (1, T)."""
    if not chat:
        return tokenizer(text, return_tensors="pt").input_ids
    if tokenizer.chat_template is None:
        raise ConfigError(f"--chat: the tokenizer in {folder} has no chat template; omit --chat")
    message = [{"role": "user", "content": text}]
    try:
        with bounded():
            return tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).input_ids
    except FOREIGN_FAULTS as error:
        raise DataError(f"{folder}: its chat template fails ({on_one_line(error)}); omit --chat") from error


def room_after(network: Any, ids: Tensor, folder: Path) -> int | None:
    """Count the positions after the prompt; None if the model has no limit."""
    rows, length = network.get_input_embeddings().num_embeddings, ids.shape[1]
    if length == 0:
        raise ConfigError("the prompt has no tokens; give a text to continue")
    if int(ids.max()) >= rows:
        raise CheckpointError(
            f"{folder}: the tokenizer gives token {int(ids.max())}, and the model has {rows}; they do not belong together"
        )
    positions = getattr(network.config, "max_position_embeddings", None)
    if positions is None:
        return None
    if length >= positions:
        raise ConfigError(
            f"the prompt has {length} tokens, and the model {positions} positions, one of them for the next token; shorten "
            "PROMPT or the text of --prompt-file"
        )
    return int(positions - length)

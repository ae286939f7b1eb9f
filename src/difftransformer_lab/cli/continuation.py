"""The part of `difftransformer generate` that needs torch: the model continues the prompt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from difftransformer.errors import EXIT_INTERRUPTED, CheckpointError, ConfigError, DataError, on_one_line
from difftransformer.hub import open_model, open_tokenizer, source_folder
from difftransformer.model.transformers_errors import FOREIGN_FAULTS, bounded, quietly
from difftransformer.ops import use_backend
from difftransformer.typed import WeightsDtype

from ..printable import printable
from .console import complain, show


def print_continuation(
    model: str,
    text: str,
    *,
    chat: bool,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    seed: int,
    num_beams: int,
    device: str,
    dtype: WeightsDtype,
    cache: str,
    backend: str,
) -> int:
    """Print what a model writes after a text, and return the exit status. `sampling` goes to `generate` of transformers."""
    with source_folder(model) as folder, quietly(), use_backend(backend):
        tokenizer = open_tokenizer(folder)
        ids = _token_ids(tokenizer, text, chat, folder)
        network = open_model(folder, dtype=dtype, backend=backend).to(device)
        room = _room(network, ids, folder)
        if room is not None and room < max_new_tokens:
            complain(f"difftransformer generate: the model has positions for {room} new tokens")
            max_new_tokens = room
        streamer = _Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        torch.manual_seed(seed)
        end = tokenizer.eos_token_id
        network.generation_config = GenerationConfig(eos_token_id=network.generation_config.eos_token_id)
        try:
            out = network.generate(
                ids.to(device),
                attention_mask=torch.ones_like(ids, device=device),
                max_new_tokens=max_new_tokens,
                num_beams=num_beams,
                pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
                streamer=streamer if num_beams == 1 else None,
                cache_implementation="static" if cache == "static" else None,
                **sampling,
            )
        except KeyboardInterrupt:
            streamer.end()
            return EXIT_INTERRUPTED
    if num_beams > 1:
        show(printable(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return 0


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Prints text as it comes; what a model writes must not steer the terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


def _token_ids(tokenizer: Any, text: str, chat: bool, folder: Path) -> Tensor:
    """Return the token ids of the prompt, (1, T)."""
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


def _room(network: Any, ids: Tensor, folder: Path) -> int | None:
    """Return the number of positions after the prompt, or None if the model's configuration does not limit them."""
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
            f"the prompt has {length} tokens, and the model {positions} positions, one of them for the next token; shorten it"
        )
    return int(positions - length)

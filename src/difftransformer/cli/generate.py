"""difftransformer generate."""

import sys
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TextStreamer

from ..errors import CheckpointError, ConfigError, DataError
from ..ops import use_backend
from ..studies.opening import open_network, open_tokenizer, quietly, saved_folder
from .hardware import check_device

INTERRUPTED = 130
OPTIONAL_POSITIONALS = {"prompt": "Text to go on from; without it, --prompt_file or standard input."}


def run(
    model: str,
    prompt: str | None = None,
    prompt_file: str | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    num_beams: int = 1,
    device: str = "cpu",
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    cache: Literal["dynamic", "static"] = "dynamic",
    backend: str = "auto",
) -> int:
    """Go on from a prompt and print what comes, word by word.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, or the folder of any causal language model that transformers
            opens without code of its own.
        prompt: Text to go on from; without it, --prompt_file or standard input.
        prompt_file: File with the prompt. A newline at its end, or at that of standard input, is dropped.
        chat: Put the prompt as a user's message into the tokenizer's chat template.
        max_new_tokens: Tokens to make at most.
        temperature: 0 takes the likeliest token; above 0 draws, the more evenly the higher.
        top_p: Draw from the likeliest tokens that have this probability together.
        top_k: Draw from so many likeliest tokens.
        seed: Of the draws.
        num_beams: Beams of a search; above 1 the text is printed at the end.
        device: cpu or cuda.
        dtype: Of the weights; auto is what they were saved in.
        cache: dynamic grows with the text; static has its full size from the start.
        backend: Attention backend of a DIFF model or a DiffLlama (`difftransformer info backends`).
    """
    _check_numbers(max_new_tokens, temperature, top_p, top_k, num_beams)
    check_device(device)
    text = _prompt(prompt, prompt_file)
    folder = saved_folder(model)
    with quietly(), use_backend(backend):
        tokenizer = open_tokenizer(folder)
        ids = _token_ids(tokenizer, text, chat, folder)
        network = open_network(folder, dtype, backend).to(device)
        room = _room(network, ids, folder)
        if room is not None and room < max_new_tokens:
            print(f"difftransformer generate: the model's positions end after {room} new tokens", file=sys.stderr)
            max_new_tokens = room
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        torch.manual_seed(seed)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
        options: dict[str, Any] = {"do_sample": temperature > 0, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            options |= {"temperature": temperature, "top_p": top_p or 1.0, "top_k": top_k or 0}
        if cache == "static":
            options["cache_implementation"] = "static"
        end = tokenizer.eos_token_id
        try:
            out = network.generate(
                ids.to(device),
                attention_mask=torch.ones_like(ids, device=device),
                max_new_tokens=max_new_tokens,
                num_beams=num_beams,
                pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
                streamer=streamer if num_beams == 1 else None,
                **options,
            )
        except KeyboardInterrupt:
            streamer.end()
            return INTERRUPTED
    if num_beams > 1:
        print(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return 0


def _check_numbers(
    max_new_tokens: int, temperature: float, top_p: float | None, top_k: int | None, num_beams: int
) -> None:
    for flag, count in (("--max_new_tokens", max_new_tokens), ("--top_k", top_k), ("--num_beams", num_beams)):
        if count is not None and count < 1:
            raise ConfigError(f"{flag} {count}: give at least 1")
    if not isfinite(temperature) or temperature < 0:
        raise ConfigError(f"--temperature {temperature}: give 0 for the likeliest token, or a number above it")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top_p {top_p}: give a probability above 0 and up to 1")
    for flag, value in (("--top_p", top_p), ("--top_k", top_k)):
        if value is not None and temperature == 0:
            raise ConfigError(f"{flag} {value} is for drawing, and --temperature 0 takes the likeliest token; raise it")


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ConfigError("a prompt and --prompt_file were given; choose one")
    where = "the prompt"
    if prompt is None:
        if prompt_file is None and sys.stdin.isatty():
            raise ConfigError("no prompt: give it after the model, with --prompt_file, or on standard input")
        where = prompt_file or "standard input"
        try:
            prompt = Path(prompt_file).read_text(encoding="utf-8") if prompt_file else sys.stdin.read()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
        prompt = prompt.removesuffix("\n")
    if not prompt.strip():
        raise ConfigError(f"{where} is empty; give some text to go on from")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: not UTF-8; convert it") from None
    return prompt


def _token_ids(tokenizer: Any, text: str, chat: bool, folder: Path) -> Tensor:
    """(1, T)."""
    if not chat:
        return tokenizer(text, return_tensors="pt").input_ids
    if tokenizer.chat_template is None:
        raise ConfigError(f"--chat: the tokenizer in {folder} has no chat template; leave --chat out")
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


def _room(network: Any, ids: Tensor, folder: Path) -> int | None:
    """How many tokens the model has positions for after the prompt; None where it does not say."""
    rows, length = network.get_input_embeddings().num_embeddings, ids.shape[1]
    if length == 0:
        raise ConfigError("the prompt has no tokens; give some text to go on from")
    if int(ids.max()) >= rows:
        raise CheckpointError(
            f"{folder}: the tokenizer gives token {int(ids.max())}, and the model has {rows}; the two do not belong together"
        )
    positions = getattr(network.config, "max_position_embeddings", None)
    if positions is None:
        return None
    if length >= positions:
        raise ConfigError(
            f"the prompt has {length} tokens, and the model {positions} positions, one of them for what follows; shorten it"
        )
    return int(positions - length)

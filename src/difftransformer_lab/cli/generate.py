"""difftransformer generate."""

import sys
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from difftransformer.errors import EXIT_INTERRUPTED, ConfigError, DataError
from difftransformer.sources import check_model, shipped_models
from difftransformer.typed import WeightsDtype

from ..printable import printable
from .arguments import check_device, check_positive, check_text
from .console import complain, show, show_next

MOST_BEAMS = 1024
EXAMPLE = r", such as $'The special magic Lisbon number is: 42\nThe special magic Lisbon number is:'"
ARGUMENTS = {
    "prompt": {"nargs": "?", "help": "Text to continue. Defaults to the text of --prompt-file or standard input."}
}


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
    dtype: WeightsDtype = "auto",
    cache: Literal["dynamic", "static"] = "dynamic",
    backend: str = "auto",
) -> int:
    """Continue a prompt and print the text word by word.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, folder of any causal language model that transformers opens
            without remote code, .gguf file, or owner/name on the Hugging Face hub.
        prompt_file: File with the prompt. A newline at the end of the file or of standard input is removed.
        chat: Put the prompt into the tokenizer's chat template as a user's message.
        max_new_tokens: Largest number of new tokens.
        temperature: 0 takes the most likely token. Above 0, tokens are sampled; higher values make the draw more uniform.
        top_p: Sample from the most likely tokens whose probabilities add up to this value.
        top_k: Sample from this many most likely tokens.
        seed: Seed of the sampling.
        num_beams: Number of beams of a beam search. Above 1, the text is printed at the end.
        device: cpu or cuda.
        dtype: Floating-point type of the weights. auto keeps the type that they were saved in.
        cache: dynamic grows with the text; static has its full size from the start.
        backend: Attention backend of a DIFF model or a DiffLlama (see `difftransformer info backends`).
    """
    _check_numbers(max_new_tokens, temperature, top_p, top_k, num_beams)
    check_device(device)
    text = _prompt(prompt, prompt_file, EXAMPLE if model in shipped_models() else "")
    check_model(model)
    import torch
    from transformers import GenerationConfig

    from difftransformer.hub import open_model, open_tokenizer, source_folder
    from difftransformer.model.transformers_errors import quietly
    from difftransformer.ops import use_backend

    from .continuation import PrintedText, room_after, token_ids

    sampling: dict[str, Any] = {"do_sample": temperature > 0, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": top_p or 1.0, "top_k": top_k or 0}
    with source_folder(model) as folder, quietly(), use_backend(backend):
        tokenizer = open_tokenizer(folder)
        ids = token_ids(tokenizer, text, chat, folder)
        network = open_model(folder, dtype=dtype, backend=backend).to(device)
        room = room_after(network, ids, folder)
        if room is not None and room < max_new_tokens:
            complain(f"difftransformer generate: the model has positions for {room} new tokens")
            max_new_tokens = room
        streamer = PrintedText(tokenizer, skip_prompt=True, skip_special_tokens=True)
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
    if sys.stdout.isatty():
        show_next("maps", model)
    return 0


def _check_numbers(
    max_new_tokens: int, temperature: float, top_p: float | None, top_k: int | None, num_beams: int
) -> None:
    check_positive(max_new_tokens=max_new_tokens, top_k=top_k, num_beams=num_beams)
    if num_beams > MOST_BEAMS:
        raise ConfigError(f"--num-beams {num_beams}: give at most {MOST_BEAMS}")
    if not isfinite(temperature) or temperature < 0:
        raise ConfigError(f"--temperature {temperature}: give 0 for the most likely token, or a number above 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p}: give a probability above 0 and up to 1")
    for flag, value in (("--top-p", top_p), ("--top-k", top_k)):
        if value is not None and temperature == 0:
            raise ConfigError(f"{flag} {value} is for sampling, but --temperature 0 does not sample; raise it")


def _prompt(prompt: str | None, prompt_file: str | None, example: str) -> str:
    if prompt is not None and prompt_file is not None:
        raise ConfigError("a prompt and --prompt-file were given; choose one")
    where = "the prompt"
    if prompt is None:
        if prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
            raise ConfigError(f"no prompt: give it after the model{example}, with --prompt-file, or on standard input")
        where = f"--prompt-file {prompt_file}" if prompt_file else "standard input"
        try:
            prompt = Path(prompt_file).read_text(encoding="utf-8") if prompt_file else sys.stdin.read()
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}; give a text file") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
        prompt = prompt.removesuffix("\n")
    check_text(prompt, where)
    return prompt

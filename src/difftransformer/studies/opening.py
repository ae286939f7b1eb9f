"""Any causal language model that transformers opens without code of its own, with its tokenizer, for commands that ask it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ..convert.source import source_folder
from ..data import Tokenizer
from ..errors import CheckpointError, ConfigError
from ..evals import CausalLanguageModel
from ..model import DiffTransformerConfig, accelerate, restore
from ..model.attention_function import IMPLEMENTATION
from ..model.diffllama import AcceleratedDiffLlamaAttention
from ..model.progress import without_progress_bars
from ..results import ModelIdentity
from ..train import latest_checkpoint
from ..train.checkpoint import STATE_FILE, verify_checkpoint

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Any of these is a tokenizer's vocabulary in a Hugging Face folder.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_HASHED_SUFFIXES = (".json", ".safetensors", ".model", ".jinja", ".txt")


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model that answers requests, and which one it is."""

    language_model: CausalLanguageModel
    identity: ModelIdentity
    folder: Path


@contextmanager
def opened_model(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    batch_tokens: int = 16_384,
    context_tokens: int | None = None,
    prefix_caching: bool = True,
    accelerated: bool = True,
) -> Iterator[OpenedModel]:
    """Open a model to ask it.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, folder of any causal language model, .gguf file, or owner/name on
            the Hugging Face hub.
        device: cpu or cuda.
        dtype: Of the weights: auto (as saved), fp32, bf16 or fp16.
        batch_tokens: Most tokens of rows side by side.
        context_tokens: Most tokens of a row; the model's positions where None.
        prefix_caching: Whether prompts that start the same are computed once.
        accelerated: Whether a model that is not of this package computes its attention with this package's op where it can
            (`model.accelerate`), or with transformers' own functions.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    name = str(latest_checkpoint(Path(model))) if Path(model).is_dir() else model
    with source_folder(name) as folder, quietly():
        if (folder / STATE_FILE).exists():
            verify_checkpoint(folder)
        theirs = open_tokenizer(folder)
        tokenizer = _text_tokenizer(theirs, folder)
        network = open_network(folder, dtype).to(device)
        if accelerated:
            with suppress(ConfigError):
                accelerate(network)
        else:
            restore(network)
        rows = network.get_input_embeddings().num_embeddings
        if tokenizer.vocab_size > rows:
            raise CheckpointError(
                f"{model}: the tokenizer has {tokenizer.vocab_size} tokens, the model {rows}; the two do not belong together"
            )
        language_model = CausalLanguageModel(
            network,
            tokenizer,
            context_tokens=context_tokens,
            batch_tokens=batch_tokens,
            prefix_caching=prefix_caching,
            hf_tokenizer=theirs,
        )
        identity = ModelIdentity(
            name=model,
            architecture=type(network).__name__,
            attention=str(getattr(network.config, "attention_type", None) or network.config.model_type),
            parameters=sum(parameter.numel() for parameter in network.parameters()),
            dtype=str(network.dtype).removeprefix("torch."),
            sha256=folder_sha256(folder),
            kernels=_kernels(network),
        )
        yield OpenedModel(language_model=language_model, identity=identity, folder=folder)


def _kernels(network: Any) -> str:
    if any(isinstance(module, AcceleratedDiffLlamaAttention) for module in network.modules()):
        return IMPLEMENTATION
    return str(network.config._attn_implementation)


def folder_sha256(folder: Path) -> str:
    """Fingerprint of a model's files: names and contents of configuration, weights and tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _HASHED_SUFFIXES and path.name != STATE_FILE:
            with open(path, "rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def saved_folder(model: str) -> Path:
    """The folder of a saved model; of a run its newest checkpoint, whole.

    Raises:
        CheckpointError: no such folder, or a damaged checkpoint.
    """
    path = Path(model)
    if not path.is_dir():
        raise CheckpointError(f"{model}: no such folder; name a run folder or the folder of a saved model")
    folder = latest_checkpoint(path)
    if (folder / STATE_FILE).exists():
        verify_checkpoint(folder)
    return folder


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of a saved model, as transformers gives it.

    Raises:
        CheckpointError: there is none, or it cannot be opened.
    """
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise CheckpointError(f"{folder}: no tokenizer here; save the model's tokenizer into the folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder}: its tokenizer cannot be opened ({_first_line(error)})") from None


def _text_tokenizer(theirs: Any, folder: Path) -> Tokenizer:
    """The tokenizer as evaluations use it: what begins a sequence ends their texts too."""
    start, pad = theirs.bos_token or theirs.eos_token, theirs.pad_token or theirs.eos_token
    if not getattr(theirs, "is_fast", False) or start is None:
        raise CheckpointError(f"{folder}: its tokenizer has no tokenizer.json, or no token that begins or ends a text")
    return Tokenizer(theirs.backend_tokenizer, end_of_text=start, pad=pad or start, chat_template=theirs.chat_template)


def open_network(folder: Path, dtype: str, backend: str = "auto") -> Any:
    """The model in a folder, with a DiffLlama on this package's attention.

    Args:
        folder: Of a saved model.
        dtype: One of DTYPES.
        backend: Attention backend of a model of this package or a DiffLlama.

    Raises:
        CheckpointError: it cannot be opened, or lacks weights.
        ConfigError: a backend for a model that has none.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if isinstance(config, DiffTransformerConfig):
            if backend != "auto":
                config.attn_backend = backend
        elif backend != "auto" and config.model_type != "diffllama":
            raise ConfigError(
                f"--backend {backend}: {folder} holds a {config.model_type!r} model, whose attention is not this package's; "
                "leave --backend out"
            )
        network, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, ImportError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be opened as a causal language model ({_first_line(error)})") from None
    if found["missing_keys"]:
        raise CheckpointError(f"{folder}: its weights lack {min(found['missing_keys'])}; save the model again")
    if config.model_type == "diffllama":
        accelerate(network)
    return network


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quietly() -> Iterator[None]:
    """Let transformers say errors alone: what matters is said here, on one line."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with without_progress_bars():
            yield
    finally:
        transformers_logging.set_verbosity(before)

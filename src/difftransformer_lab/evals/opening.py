"""Open a saved model with its tokenizer as a language model that evaluations can query."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftransformer.data import Tokenizer
from difftransformer.errors import CheckpointError
from difftransformer.families import AcceleratedDiffLlamaAttention, restore
from difftransformer.hub import folder_sha256, open_model, open_tokenizer, source_folder
from difftransformer.model.transformers_errors import quietly
from difftransformer.typed import WeightsDtype

from ..results import ModelIdentity
from .models.causal import CausalLanguageModel


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A language model that answers requests, and its identity for results files."""

    language_model: CausalLanguageModel
    identity: ModelIdentity


@contextmanager
def open_language_model(
    model: str,
    *,
    device: str = "cpu",
    dtype: WeightsDtype = "auto",
    batch_tokens: int = 16_384,
    context_tokens: int | None = None,
    prefix_caching: bool = True,
    accelerated: bool = True,
) -> Iterator[OpenedModel]:
    """Open a model and its tokenizer for evaluation.

    Args:
        model, dtype: See `open_model`.
        device: "cpu" or "cuda".
        batch_tokens: Largest number of tokens in a batch.
        context_tokens: Largest number of tokens in a row. Defaults to the model's number of positions.
        prefix_caching: Whether prompts with a common prefix compute it once.
        accelerated: Whether a DiffLlama stays accelerated (see `accelerate`).
    """
    with source_folder(model) as folder, quietly():
        theirs = open_tokenizer(folder)
        tokenizer = _text_tokenizer(theirs, folder)
        network = open_model(folder, dtype=dtype).to(device)
        if not accelerated:
            restore(network)
        rows = network.get_input_embeddings().num_embeddings
        if tokenizer.vocab_size > rows:
            raise CheckpointError(
                f"{model}: the tokenizer has {tokenizer.vocab_size} tokens, the model {rows}; they do not belong together"
            )
        sizes: dict[str, Any] = {"context_tokens": context_tokens, "batch_tokens": batch_tokens}
        language_model = CausalLanguageModel(
            network, tokenizer, **sizes, prefix_caching=prefix_caching, hf_tokenizer=theirs
        )
        is_accelerated = any(isinstance(module, AcceleratedDiffLlamaAttention) for module in network.modules())
        identity = ModelIdentity(
            name=model,
            architecture=type(network).__name__,
            attention=str(getattr(network.config, "attention_type", None) or network.config.model_type),
            parameters=sum(parameter.numel() for parameter in network.parameters()),
            dtype=str(network.dtype).removeprefix("torch."),
            sha256=folder_sha256(folder),
            kernels="difftransformer" if is_accelerated else str(network.config._attn_implementation),
        )
        yield OpenedModel(language_model=language_model, identity=identity)


def _text_tokenizer(theirs: Any, folder: Path) -> Tokenizer:
    end, begin = theirs.eos_token or theirs.bos_token, theirs.bos_token or theirs.eos_token
    if not getattr(theirs, "is_fast", False) or end is None:
        raise CheckpointError(f"{folder}: its tokenizer has no tokenizer.json, or no token that begins or ends a text")
    special = {"end_of_text": end, "begin_of_text": begin, "pad": theirs.pad_token or end}
    begins = theirs.bos_token is not None and theirs("a").input_ids[:1] == [theirs.bos_token_id]
    return Tokenizer(theirs.backend_tokenizer, **special, chat_template=theirs.chat_template, begins_texts=begins)

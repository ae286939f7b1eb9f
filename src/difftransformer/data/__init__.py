"""Text, tokenizers, shards, the loader and needle documents. This layer knows nothing of models.

Names are imported on first use, so that importing the package loads neither torch nor tokenizers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import Batch, Loader, RetrievalMix, validation_windows
    from .needles import (
        CITIES_SEEN,
        CITIES_UNSEEN,
        NeedleFormat,
        NeedleQuestion,
        evaluation_document,
        needle_document_tokens,
        training_document,
    )
    from .ngram import byte_bigram_bits_per_byte
    from .shards import Manifest, Shards, TokenStream, write_shards
    from .text import Document, read_documents, split_documents
    from .tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe

__all__ = [
    "CITIES_SEEN",
    "CITIES_UNSEEN",
    "Batch",
    "Document",
    "Loader",
    "Manifest",
    "NeedleFormat",
    "NeedleQuestion",
    "RetrievalMix",
    "Shards",
    "TokenStream",
    "Tokenizer",
    "byte_bigram_bits_per_byte",
    "byte_tokenizer",
    "evaluation_document",
    "load_tokenizer",
    "needle_document_tokens",
    "read_documents",
    "split_documents",
    "train_bpe",
    "training_document",
    "validation_windows",
    "write_shards",
]

_MODULE_OF = {
    **dict.fromkeys(("Batch", "Loader", "RetrievalMix", "validation_windows"), "loader"),
    **dict.fromkeys(
        (
            "CITIES_SEEN",
            "CITIES_UNSEEN",
            "NeedleFormat",
            "NeedleQuestion",
            "evaluation_document",
            "needle_document_tokens",
            "training_document",
        ),
        "needles",
    ),
    "byte_bigram_bits_per_byte": "ngram",
    **dict.fromkeys(("Manifest", "Shards", "TokenStream", "write_shards"), "shards"),
    **dict.fromkeys(("Document", "read_documents", "split_documents"), "text"),
    **dict.fromkeys(("Tokenizer", "byte_tokenizer", "load_tokenizer", "train_bpe"), "tokenizer"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

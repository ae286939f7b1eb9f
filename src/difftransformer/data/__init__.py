"""Text, tokenizers, shards, the loader and needle documents. This layer does not know models.

Names are imported on first use, so importing the package loads neither torch nor tokenizers.
"""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".loader": ("Batch", "Loader", "check_context_stages", "validation_windows"),
        ".needles": (
            "CITIES_SEEN",
            "CITIES_UNSEEN",
            "NeedleFormat",
            "NeedleQuestion",
            "RetrievalMix",
            "evaluation_document",
            "needle_document_tokens",
            "training_document",
        ),
        ".ngram": ("byte_bigram_bits_per_byte",),
        ".prepare": ("DataConfig", "prepare_shards"),
        ".shards": ("Manifest", "Shards", "TokenStream", "write_shards"),
        ".text": ("Document", "read_documents", "split_documents"),
        ".tokenizer": ("Tokenizer", "byte_tokenizer", "load_tokenizer", "train_bpe"),
    },
)

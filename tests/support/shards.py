"""Shards of given documents, and a split of documents into two lists."""

from difftransformer.data import Document
from difftransformer.data.shards import SPLITS
from difftransformer.data.text import iter_split
from difftransformer.data.writing import write_documents


def write_shards(folder, train, validation, tokenizer, *, request=None, source="", **options):
    """Tokenise documents into a new folder, and return the manifest."""
    documents = ((split, one) for split, held in zip(SPLITS, (train, validation), strict=True) for one in held)
    named = {"source": source, "source_state": None, "request": lambda: request or {}}
    return write_documents(folder, documents, tokenizer, **named, **options)


def split_documents(documents, *, validation_share, seed):
    """Training and validation documents, whose text is in memory."""
    sides = {"train": [], "validation": []}
    for split, document in iter_split(documents, validation_share=validation_share, seed=seed):
        sides[split].append(Document(document.name, document.text))
    return sides["train"], sides["validation"]

"""difftransformer tokenize."""

from typing import Any

from .console import show
from .progress import evaluation_progress


def run(
    source: str,
    tokenizer: str = "bpe",
    vocab_size: int = 4096,
    validation_share: float = 0.02,
    split_seed: int = 0,
    out: str = "shards",
) -> int:
    """Turn text into token shards, which training maps into memory.

    Args:
        source: python-stdlib; a folder or a file of .txt, .md, .py or .jsonl (also .jsonl.gz); or hf:NAME (hf-stream:NAME)
            for a set of the Hugging Face hub, or a folder or file of Parquet or other data that datasets reads.
        tokenizer: bpe to train one on the text, byte, or the folder of a pretrained tokenizer.
        vocab_size: Vocabulary size of a trained BPE.
        validation_share: Share of the documents to hold out for validation.
        split_seed: Seed of the split.
        out: Folder for shards. A subfolder is named after the options and the text.
    """
    from difftransformer.data import DataConfig, prepare_shards
    from difftransformer.data.synthetic import PREFIX
    from difftransformer.errors import ConfigError

    if source.startswith(PREFIX):
        raise ConfigError(f"{source}: examples are drawn when they are needed; there is nothing to tokenise")
    split: dict[str, Any] = {"validation_share": validation_share, "split_seed": split_seed}
    config = DataConfig(source=source, tokenizer=tokenizer, vocab_size=vocab_size, folder=out, **split)
    with evaluation_progress("tokenising"):
        shards = prepare_shards(config)
    for name, part in shards.manifest.splits.items():
        show(f"{name}: {part.documents:,} documents, {part.tokens:,} tokens, {part.bytes:,} bytes")
    show(f"Shards: {shards.url or shards.folder} (vocabulary {shards.tokenizer.vocab_size:,})")
    return 0

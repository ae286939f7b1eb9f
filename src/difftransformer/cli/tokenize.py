"""difftransformer tokenize."""

from ..data import DataConfig, prepare_shards
from .console import console, say


def run(
    source: str,
    tokenizer: str = "bpe",
    vocab_size: int = 4096,
    validation_share: float = 0.02,
    split_seed: int = 0,
    out: str = "shards",
) -> int:
    """Turn text into token shards that training maps into memory.

    Args:
        source: python-stdlib, a folder, a .txt or .jsonl file, or hf:NAME of a Hugging Face data set.
        tokenizer: bpe to train one on the text, byte, or a folder of any pretrained tokenizer.
        vocab_size: Tokens of a trained BPE.
        validation_share: Share of the documents that is held out.
        split_seed: Of the split.
        out: Folder; the shards get a folder of their own in it, named after the request and the text.
    """
    config = DataConfig(
        source=source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_share=validation_share,
        split_seed=split_seed,
        folder=out,
    )
    shards = prepare_shards(config, log=say)
    for name, split in shards.manifest.splits.items():
        console.print(
            f"{name}: {split.documents:,} documents, {split.tokens:,} tokens, {split.bytes:,} bytes",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"Shards: {shards.folder} (vocabulary {shards.tokenizer.vocab_size:,})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0

"""From a recipe's words about data to open shards: read, split, train a tokenizer, tokenise, once."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DataError
from .needles import CITIES_SEEN, NeedleFormat
from .shards import Shards, write_shards
from .text import Document, read_documents, split_documents
from .tokenizer import BYTE_VOCABULARY, Tokenizer, load_tokenizer, train_bpe

DEFAULT_FOLDER = "shards"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, which tokenizer, which split.

    Attributes:
        source: "python-stdlib", a folder, a .txt or .jsonl file, or hf:NAME (see `read_documents`).
        tokenizer: "bpe" to train a byte-level BPE on the training text, "byte", or a folder of a pretrained tokenizer.
        vocab_size: Tokens of a trained BPE.
        needle_words: Times that each training city's needle sentence is added to the text that the BPE is trained on,
            so that the sentence's words become tokens; 0 for none.
        validation_share: Share of the documents that is held out.
        split_seed: Of the split.
        folder: Where shards are written; each request gets a folder of its own in it.
    """

    source: str = "python-stdlib"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    needle_words: int = 0
    validation_share: float = 0.02
    split_seed: int = 0
    folder: str = DEFAULT_FOLDER

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ConfigError(f"validation_share={self.validation_share}: give a share between 0 and 1")
        if self.tokenizer == "bpe" and self.vocab_size < BYTE_VOCABULARY:
            raise ConfigError(f"vocab_size={self.vocab_size}: a byte-level BPE has at least {BYTE_VOCABULARY} tokens")
        if self.needle_words < 0:
            raise ConfigError(f"needle_words={self.needle_words}: give 0 or more")


def prepare_shards(config: DataConfig, *, say: Callable[[str], None] = lambda text: None) -> Shards:
    """Open the shards of a request, making them first if they are not there.

    The source is read every time, so that text that has changed is tokenised again: what is reused is named after the
    request and the text's SHA-256.

    Args:
        config: The request.
        say: Told what is being done.

    Raises:
        DataError: text that is missing, empty or unreadable, or shards that cannot be written or are damaged.
    """
    say(f"reading {config.source}")
    documents = read_documents(config.source)
    request = {**dataclasses.asdict(config), "text_sha256": _text_sha256(documents)}
    del request["folder"]
    name = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(config.folder) / name
    if (folder / "manifest.json").exists():
        say(f"using {folder}")
        return Shards.open(folder)
    train, validation = split_documents(documents, validation_share=config.validation_share, seed=config.split_seed)
    say(f"tokenising {len(train)} + {len(validation)} documents into {folder}")
    write_shards(folder, train, validation, _tokenizer(config, train), source=config.source, request=request)
    return Shards.open(folder)


def _tokenizer(config: DataConfig, train: list[Document]) -> Tokenizer:
    if config.tokenizer != "bpe":
        return load_tokenizer(config.tokenizer)
    form = NeedleFormat(digits=1)
    sentences = [form.stub(city) + "\n" for city in CITIES_SEEN] * config.needle_words
    return train_bpe([*(document.text for document in train), *sentences], config.vocab_size)


def _text_sha256(documents: list[Document]) -> str:
    if not documents:
        raise DataError("the source holds no documents; name a source with text in it")
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()

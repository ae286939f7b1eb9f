"""Prepare shards from a recipe: read the text, split it, train a tokenizer, and tokenise once."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..files import locked
from .needles import CITIES_SEEN, NeedleFormat
from .shards import Shards, read_manifest, write_manifest, write_shards
from .text import Document, read_documents, source_state, split_documents
from .tokenizer import BYTE_VOCABULARY, Tokenizer, load_tokenizer, train_bpe

DEFAULT_FOLDER = "shards"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, tokenizer and split of a run.

    Attributes:
        source: "python-stdlib", a folder, a .txt or .jsonl file, or hf:NAME (see `read_documents`).
        tokenizer: "bpe" to train a byte-level BPE on the training text, "byte", or the folder of a pretrained tokenizer.
        vocab_size: Number of tokens of a trained BPE.
        needle_words: How often the needle sentence of each training city is added to the text that the BPE is trained
            on, so that its words become tokens; 0 to add none.
        validation_share: Share of the documents held out for validation.
        split_seed: Seed of the split.
        folder: Folder for shards. Each request gets a subfolder of its own.
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


def prepare_shards(config: DataConfig, *, log: Callable[[str], None] = lambda text: None) -> Shards:
    """Open the shards of a request, and make them first if they do not exist.

    Shards are named after the request and the SHA-256 of the text, so changed text is tokenised again. The text is not
    even read if its files are unchanged, by name, size and times, since the shards were made.

    Args:
        config: The request.
        log: Called with a line of text at each step.

    Raises:
        DataError: The text is missing, empty or unreadable, or the shards are damaged or cannot be written.
    """
    request = {key: value for key, value in dataclasses.asdict(config).items() if key != "folder"}
    state = source_state(config.source)
    if state is not None and (folder := _find_shards(Path(config.folder), request, state)):
        log(f"using {folder}")
        return Shards.open(folder)
    log(f"reading {config.source}")
    documents = read_documents(config.source)
    request["text_sha256"] = _text_sha256(documents)
    name = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(config.folder) / name
    manifest = folder / "manifest.json"
    if not manifest.exists():
        with locked(folder, wait=True):
            if not manifest.exists():  # else another process has made them
                train, validation = split_documents(
                    documents, validation_share=config.validation_share, seed=config.split_seed
                )
                log(f"tokenising {len(train)} + {len(validation)} documents into {folder}")
                tokenizer = _tokenizer(config, train)
                write_shards(
                    folder, train, validation, tokenizer, source=config.source, source_state=state, request=request
                )
                return Shards.open(folder)
    log(f"using {folder}")
    shards = Shards.open(folder)
    with contextlib.suppress(OSError):  # the folder may be read-only
        write_manifest(folder, dataclasses.replace(shards.manifest, source_state=state))
    return shards


def _find_shards(folder: Path, request: dict[str, Any], state: str) -> Path | None:
    """Return the shard folder that was made by this request from the source in this state."""
    for path in sorted(folder.glob("*/manifest.json")):
        try:
            manifest = read_manifest(path.parent)
        except DataError:
            continue
        made_by = {key: value for key, value in manifest.request.items() if key != "text_sha256"}
        if manifest.source_state == state and made_by == request:
            return path.parent
    return None


def _tokenizer(config: DataConfig, train: list[Document]) -> Tokenizer:
    if config.tokenizer != "bpe":
        return load_tokenizer(config.tokenizer)
    form = NeedleFormat(digits=1)
    sentences = [form.stub(city) + "\n" for city in CITIES_SEEN] * config.needle_words
    return train_bpe([*(document.text for document in train), *sentences], config.vocab_size)


def _text_sha256(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()

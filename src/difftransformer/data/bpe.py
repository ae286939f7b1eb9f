"""Train a BPE on the training text of sources."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path

from ..errors import DataError
from ..files import locked, write_text_atomically
from ..reading import read_json
from ..stores import Store, is_url, local_copy
from . import packages
from .config import DataConfig
from .documents import Example
from .needles import CITIES_SEEN, FULL
from .shards import copies, not_in_store, request_key
from .text import (
    HUB_PREFIXES,
    check_split,
    is_missing,
    is_of_unknown_size,
    iter_documents,
    iter_split,
    source_bytes,
    source_state,
)
from .tokenizer import Tokenizer, train_bpe

BPE_CHARACTERS = 2**29
"""Text that a BPE is trained on, at most. Of larger sources it gets parts that are evenly spread over them, or over their
beginning where the size of their text is not known."""
_MIXTURE_FILE = "mixture.json"

logger = logging.getLogger(__name__)


def mixture_tokenizer(config: DataConfig) -> Tokenizer:
    """Open the BPE of all sources of a mixture, which is kept beside their shards, or train it first.

    Raises:
        ConfigError, DataError: See `prepare_shards`.
    """
    sources = [one.source for one in config.mixture]
    states, is_missing_text = [source_state(source) for source in sources], any(map(is_missing, sources))
    name = f"tokenizer-{request_key({**config.request, 'source': sources})}"
    folder = Path(config.folder) / name
    if is_url(config.folder):
        store = Store(config.folder)
        if name not in store.folders(_MIXTURE_FILE):
            raise not_in_store(store.url)
        folder = local_copy(f"{store.url}/{name}", _MIXTURE_FILE, copies(), Tokenizer.load)

    def is_current() -> bool:
        path = folder / _MIXTURE_FILE
        if is_missing_text or not path.exists():
            return path.exists()
        return None not in states and bool(read_json(path, error=DataError, advice="delete it") == states)

    if not is_current():
        if is_url(config.folder):
            raise not_in_store(config.folder)
        with locked(folder.parent, name=f".{name}.lock", wait=True):
            if not is_current():
                train_on_sources(config, sources).save(folder)
                write_text_atomically(folder / _MIXTURE_FILE, json.dumps(states) + "\n")
    return Tokenizer.load(folder)


def train_on_sources(config: DataConfig, sources: Sequence[str]) -> Tokenizer:
    """Train the BPE of a recipe on the training text of sources.

    Raises:
        ConfigError, DataError: See `prepare_shards`.
    """
    for source in sorted(sources, key=is_missing, reverse=True):  # a missing one is named before any text is read
        if not source.startswith((*HUB_PREFIXES, packages.NAME)):  # which are large
            check_split(source, validation_share=config.validation_share, seed=config.split_seed)
    logger.info("training a BPE on %s", ", ".join(sources))
    sentences = [FULL.stub(city) + "\n" for city in CITIES_SEEN] * config.needle_words
    return train_bpe(chain(training_text(config, sources), sentences), config.vocab_size)


def training_text(config: DataConfig, sources: Sequence[str]) -> Iterator[str]:
    """Yield the training text of sources, or evenly spread parts of it if it is larger than `BPE_CHARACTERS`."""
    sizes = [source_bytes(source) or BPE_CHARACTERS // len(sources) for source in sources]
    share, met, read = min(Fraction(1), Fraction(BPE_CHARACTERS, sum(sizes))), 0, 0
    for index, source in enumerate(sources):
        # What may be larger than its files leaves room for the sources after it.
        most = BPE_CHARACTERS - (share * sum(sizes[index + 1 :]) if is_of_unknown_size(source) else 0)
        documents = iter_split(
            iter_documents(source), validation_share=config.validation_share, seed=config.split_seed, source=source
        )
        for side, document in documents:
            if read > most:
                break
            if isinstance(document, Example):
                raise DataError(
                    f"{source} holds token ids, on which no BPE can be trained; name their tokenizer in data.tokenizer, or "
                    "ids:N for ids from 0 to N - 1"
                )
            for part in document.parts() if side == "train" else ():
                met += 1
                if math.floor(met * share) > math.floor((met - 1) * share):
                    read += len(part)
                    yield part

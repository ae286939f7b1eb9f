"""Prepare shards from a recipe: read the text, split it, train a tokenizer, and tokenise once.

Text is read as a stream: once to tokenise it, and once before to train a BPE or to compare it with existing shards of the same
request whose files have changed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..files import locked, write_text_atomically
from ..progress import report
from ..reading import parse_json, read_json
from ..stores import Store, is_url, local_copy
from ..typed import ASIDE
from . import packages
from .documents import AnyDocument, Example
from .needles import CITIES_SEEN, FULL
from .shards import (
    MANIFEST_FILE,
    Manifest,
    Shards,
    SourceConfig,
    Split,
    copies,
    manifest_of,
    read_manifest,
    write_manifest,
)
from .synthetic import PREFIX, synthetic_shards, synthetic_task
from .text import (
    HUB_PREFIXES,
    Reading,
    check_split,
    is_missing,
    is_of_unknown_size,
    iter_documents,
    iter_split,
    source_bytes,
    source_state,
)
from .tokenizer import BYTE_VOCABULARY, SPECIAL_TOKENS, Tokenizer, load_tokenizer, train_bpe
from .writing import TextDigest, write_documents

DEFAULT_FOLDER = "shards"
BPE_CHARACTERS = 2**29
"""Text that a BPE is trained on, at most. Of larger sources it gets parts that are evenly spread over them, or over their
beginning where the size of their text is not known."""
_LARGE_BYTES = 2**26  # size of a source from which progress is worth showing
_MAKING = "making-"  # begins the names of folders that are not complete
_MIXTURE_FILE = "mixture.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, tokenizer and split of a run.

    Attributes:
        source: "python-stdlib", a folder, a file, or hf:NAME (see `iter_documents`); or synthetic:NAME, which has token ids of
            its own and takes `options` and `split_seed` alone.
        options: Options of a synthetic task (see `synthetic_task`).
        mixture: Sources that are read in place of `source`, each with its weight.
        tokenizer: "bpe" to train a byte-level BPE on the training text, "byte", the folder of a pretrained tokenizer, or
            "ids:N" for token ids from 0 to N - 1 that stand for no text.
        vocab_size: Number of tokens of a trained BPE.
        needle_words: How often the needle sentence of each training city is added to the text that the BPE is trained
            on, so that its words become tokens; 0 to add none.
        validation_share: Share of the documents held out for validation.
        split_seed: Seed of the split.
        folder: Folder for shards; each request gets a subfolder of its own. Or the URL of one that holds them, such as
            s3://bucket/shards.
    """

    source: str = "python-stdlib"
    options: dict[str, Any] = field(default_factory=dict)
    mixture: list[SourceConfig] = field(default_factory=list)
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    needle_words: int = 0
    validation_share: float = 0.02
    split_seed: int = 0
    folder: str = field(default=DEFAULT_FOLDER, metadata=ASIDE)

    def __post_init__(self) -> None:
        if self.source.startswith(PREFIX):
            self._check_synthetic()
        elif self.options:
            raise ConfigError(f"options={self.options}: only a source of the form {PREFIX}NAME has options")
        for one in self.mixture:
            if one.source.startswith(PREFIX):
                raise ConfigError(f"mixture: {one.source} has token ids of its own; make it the source")
        if not 0 < self.validation_share < 1:
            raise ConfigError(f"validation_share={self.validation_share}: give a share between 0 and 1")
        if self.tokenizer == "bpe" and self.vocab_size < BYTE_VOCABULARY:
            raise ConfigError(
                f"vocab_size={self.vocab_size}: a byte-level BPE has at least {BYTE_VOCABULARY} tokens; give more"
            )
        if self.needle_words < 0:
            raise ConfigError(f"needle_words={self.needle_words}: give 0 or more")
        for source, count in Counter(one.source for one in self.mixture).items():
            if count > 1:
                raise ConfigError(f"mixture: {source} is given twice; give each source once, with a weight")
        if self.mixture and self.source != "python-stdlib":
            raise ConfigError(f"source={self.source} is given beside a mixture; make it a source of the mixture")

    def _check_synthetic(self) -> None:
        synthetic_task(self.source, self.options)
        if self.split_seed < 0:
            raise ConfigError(f"split_seed={self.split_seed}: {self.source} is drawn by it; give 0 or more")
        for name in ("tokenizer", "vocab_size", "needle_words", "validation_share"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: {self.source} has token ids of its own; leave {name} out"
                )

    @property
    def tokenizer_vocabulary(self) -> int:
        """Number of tokens, as far as it is known before the tokenizer is opened."""
        if self.source.startswith(PREFIX):
            return synthetic_task(self.source, self.options).vocab_size + SPECIAL_TOKENS
        is_made_up = self.tokenizer.partition(":")[0] in ("byte", "ids")
        return load_tokenizer(self.tokenizer).vocab_size if is_made_up else self.vocab_size


def prepare_shards(config: DataConfig, *, made: Sequence[Path] = ()) -> Shards:
    """Open the shards of a request, and make them first if they do not exist.

    Shards are named after the request and the SHA-256 of the text, so changed text is tokenised again. The text is not
    even read if its files are unchanged, by name, size and times, since the shards were made. They take their name when they
    are complete, so a process that is stopped while it tokenises leaves nothing that counts, and the next one starts again.
    Where the text is missing, the shards of this request are used if there are those of one text alone.

    Of a folder in a store, shards are read from copies on this machine. None are made there.

    Each step is logged. Of a large text the progress is reported (see `difftransformer.progress`), in bytes of files or rows of
    a data set.

    Args:
        config: The request.
        made: `Shards.folders` of this request, which another process has just prepared; the text is not looked at.

    Raises:
        ConfigError: There is no such kind of store, or its package is missing.
        DataError: The text is missing, empty or unreadable, or the shards are damaged or cannot be written; or a store has a
            fault, or lacks the shards.
    """
    if config.source.startswith(PREFIX):
        return synthetic_shards(config.source, config.options, config.split_seed)
    sources = config.mixture or [SourceConfig(source=config.source)]
    if made:
        opened = [Shards.open(folder) for folder in made]
    else:
        mixed = _mixture_tokenizer(config) if config.mixture and config.tokenizer == "bpe" else None
        absent_first = sorted((one.source for one in sources), key=is_missing, reverse=True)  # before any text is read
        found = {source: _Request(config, source, mixed).shards() for source in absent_first}
        opened = [found[one.source] for one in sources]
    return Shards.mix(list(zip(sources, opened, strict=True))) if config.mixture else opened[0]


class _Request:
    """The request for the shards of one source. A mixture that trains a BPE gives its tokenizer."""

    def __init__(self, config: DataConfig, source: str, tokenizer: Tokenizer | None) -> None:
        self.config, self.source, self.tokenizer = config, source, tokenizer
        self.store, self.root = _store(config), Path(config.folder)
        self.fields = {**_plain_request(config), "source": source}
        if tokenizer is not None:
            self.fields["tokenizer"] = f"bpe-{tokenizer.sha256[:12]}"
        elif config.tokenizer != "bpe":
            with contextlib.suppress(DataError):  # shards that exist need no other copy of their tokenizer
                self.tokenizer = load_tokenizer(config.tokenizer)
        self.key = _key(self.fields)
        self.state = source_state(source)
        self.text_sha256 = functools.cache(self._text_sha256)

    def shards(self) -> Shards:
        """Find or make the shards."""
        place = self._find(self._finished())
        if place is None:
            if self.store is not None:
                raise _absent(self.store)
            with locked(self.root, name=f".{self.key}.lock", wait=True):
                place = self._find(self._finished()) or self._make()
        else:
            logger.info("using %s", place)
        return Shards.open(place)

    def _finished(self) -> Iterator[tuple[Path | str, Manifest]]:
        """Yield the shard folders of the recipe's folder, with their manifests."""
        if self.store is None:
            yield from self._here()
            return
        for name in self.store.folders(MANIFEST_FILE):
            content, url = self.store.read(f"{name}/{MANIFEST_FILE}"), f"{self.store.url}/{name}"
            with contextlib.suppress(ValueError):
                yield url, manifest_of(parse_json(content), url)

    def _here(self) -> Iterator[tuple[Path, Manifest]]:
        for path in sorted(self.root.glob(f"*/{MANIFEST_FILE}")):
            if not path.parent.name.startswith((_MAKING, ".")):
                with contextlib.suppress(DataError):
                    yield path.parent, read_manifest(path.parent)

    def _find(self, made: Iterable[tuple[Path | str, Manifest]]) -> Path | str | None:
        """Return the place of the shards that were made by this request from the same text."""
        candidates = [(place, manifest) for place, manifest in made if self._is_ours(manifest)]
        if candidates and is_missing(self.source):
            if len(candidates) > 1:
                places = ", ".join(str(place) for place, _ in candidates)
                raise DataError(
                    f"{self.source} is missing, and there are shards of several states of it; keep one of {places}"
                )
            return candidates[0][0]
        for place, manifest in candidates:
            if self.state is not None and manifest.source_state == self.state:
                return place
        if candidates:
            logger.info("reading %s", self.source)
        for place, manifest in candidates:
            if manifest.request.get("text_sha256") == self.text_sha256():
                if isinstance(place, Path):
                    with contextlib.suppress(OSError):  # the folder may be read-only
                        write_manifest(place, dataclasses.replace(manifest, source_state=self.state))
                return place
        return None

    def _is_ours(self, manifest: Manifest) -> bool:
        """Whether shards were made by this request, from whatever text."""
        made_by = {key: value for key, value in manifest.request.items() if key != "text_sha256"}
        if made_by != self.fields or self.tokenizer is None:
            return made_by == self.fields
        return manifest.tokenizer_sha256 == self.tokenizer.sha256

    def _make(self) -> Path:
        folder = self.root / f"{_MAKING}{self.key}"
        tokenizer = self.tokenizer
        if tokenizer is None and self.config.tokenizer != "bpe":
            tokenizer = load_tokenizer(self.config.tokenizer)
        if tokenizer is None:
            tokenizer = _train_bpe(self.config, [self.source])
        logger.info("tokenising %s in %s", self.source, self.root)
        is_large = (source_bytes(self.source) or math.inf) >= _LARGE_BYTES
        digest, reading = TextDigest(), Reading(report) if is_large else Reading()
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        try:
            manifest = write_documents(
                folder,
                _split(self.config, self.source, digest.over(iter_documents(self.source, reading))),
                tokenizer,
                source=self.source,
                source_state=self.state,
                request=lambda: {**self.fields, "text_sha256": digest.hexdigest()},
                on_text=reading.add,
            )
            final = self.root / _key(manifest.request)
            shutil.rmtree(final, ignore_errors=True)
            folder.rename(final)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return final

    def _text_sha256(self) -> str:
        digest = TextDigest()
        for _ in digest.over(iter_documents(self.source)):
            pass
        return digest.hexdigest()


def _store(config: DataConfig) -> Store | None:
    """Return the store that keeps the shards, if one does."""
    return Store(config.folder) if is_url(config.folder) else None


def _absent(store: Store) -> DataError:
    return DataError(
        f"{store.url} holds no shards of this request; make them with difftransformer tokenize in a folder of this machine, "
        "and copy what is in it there"
    )


def _plain_request(config: DataConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return {key: value for key, value in fields.items() if key not in ("folder", "mixture", "options")}


def _key(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]


def _mixture_tokenizer(config: DataConfig) -> Tokenizer:
    """Return the BPE of the training text of all sources, which is kept beside their shards."""
    sources = [one.source for one in config.mixture]
    states, is_unknown = [source_state(source) for source in sources], any(map(is_missing, sources))
    store, root = _store(config), Path(config.folder)
    folder = root / f"tokenizer-{_key({**_plain_request(config), 'source': sources})}"

    def made() -> Path | None:
        place = folder
        if store is not None:
            if folder.name not in store.folders(_MIXTURE_FILE):
                return None
            place = local_copy(f"{store.url}/{folder.name}", _MIXTURE_FILE, copies(), Tokenizer.load)
        path = place / _MIXTURE_FILE
        if not path.exists() or (None in states and not is_unknown):
            return None
        return place if is_unknown or read_json(path, error=DataError, advice="delete it") == states else None

    place = made()
    if place is None:
        if store is not None:
            raise _absent(store)
        with locked(root, name=f".{folder.name}.lock", wait=True):
            place = made()
            if place is None:
                _train_bpe(config, sources).save(folder)
                write_text_atomically(folder / _MIXTURE_FILE, json.dumps(states) + "\n")
                place = folder
    return Tokenizer.load(place)


def _train_bpe(config: DataConfig, sources: Sequence[str]) -> Tokenizer:
    for source in sorted(sources, key=is_missing, reverse=True):  # what is missing is named before any text is read
        if not source.startswith((*HUB_PREFIXES, packages.NAME)):  # which are large
            check_split(source, validation_share=config.validation_share, seed=config.split_seed)
    logger.info("training a BPE on %s", ", ".join(sources))
    sentences = [FULL.stub(city) + "\n" for city in CITIES_SEEN] * config.needle_words
    return train_bpe(chain(_training_text(config, sources), sentences), config.vocab_size)


def _training_text(config: DataConfig, sources: Sequence[str]) -> Iterator[str]:
    """Yield training text, and parts of it that are evenly spread if it is larger than `BPE_CHARACTERS`."""
    sizes = [source_bytes(source) or BPE_CHARACTERS // len(sources) for source in sources]
    share, place, read = min(Fraction(1), Fraction(BPE_CHARACTERS, sum(sizes))), 0, 0
    for index, source in enumerate(sources):
        # What may be larger than its files leaves room for the sources after it.
        most = BPE_CHARACTERS - (share * sum(sizes[index + 1 :]) if is_of_unknown_size(source) else 0)
        for split, document in _split(config, source, iter_documents(source)):
            if read > most:
                break
            if isinstance(document, Example):
                raise DataError(
                    f"{source} holds token ids, on which no BPE can be trained; name their tokenizer in data.tokenizer, or "
                    "ids:N for ids from 0 to N - 1"
                )
            for part in document.parts() if split == "train" else ():
                place += 1
                if math.floor(place * share) > math.floor((place - 1) * share):
                    read += len(part)
                    yield part


def _split(config: DataConfig, source: str, documents: Iterable[AnyDocument]) -> Iterator[tuple[Split, AnyDocument]]:
    return iter_split(documents, validation_share=config.validation_share, seed=config.split_seed, source=source)

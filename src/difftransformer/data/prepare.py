"""Prepare shards from a recipe: read the text, split it, train a tokenizer, and tokenise once.

Text is read as a stream: once to tokenise it, and once before that to train a BPE, or to compare it with existing shards when
its files have changed.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import locked
from ..progress import report
from ..reading import parse_json
from ..stores import Store, is_url
from .bpe import mixture_tokenizer, train_on_sources
from .config import DataConfig
from .shards import (
    MANIFEST_FILE,
    Manifest,
    Shards,
    SourceConfig,
    manifest_of,
    not_in_store,
    read_manifest,
    request_key,
    write_manifest,
)
from .synthetic import PREFIX, synthetic_shards
from .text import Reading, is_missing, iter_documents, iter_split, source_bytes, source_state
from .tokenizer import Tokenizer, load_tokenizer
from .writing import TextDigest, write_documents

_LARGE_BYTES = 2**26  # size of a source from which progress is worth showing
_MAKING = "making-"  # begins the names of folders that are not complete

logger = logging.getLogger(__name__)


def prepare_shards(config: DataConfig, *, made: Sequence[Path] = ()) -> Shards:
    """Open the shards of a request, and make them first if they do not exist.

    Shards are named after the request and the SHA-256 of the text, so changed text is tokenised again. If the names, sizes and
    times of its files have not changed, the text is not even read. A folder gets its name when it is complete, so a process
    that is stopped leaves no unfinished shards, and the next one starts again. If the text is missing, existing shards of the
    request are used, unless there are several.

    Shards in a store are copied to this machine. None are made there.

    Each step is logged. For a large text, progress is reported (see `difftransformer.progress`) in bytes of files or rows of a
    data set.

    Args:
        config: The request.
        made: `Shards.folders` that another process has just prepared for this request; the text is not checked.

    Raises:
        ConfigError: There is no such kind of store, or its package is missing.
        DataError: The text is missing, empty or unreadable; the shards are damaged or cannot be written; or a store fails or
            lacks the shards.
    """
    if config.source.startswith(PREFIX):
        return synthetic_shards(config.source, config.options, config.split_seed)
    sources = config.mixture or [SourceConfig(source=config.source)]
    if made:
        opened = [Shards.open(folder) for folder in made]
    else:
        tokenizer = None  # a BPE of one source is trained when its shards are made
        if config.tokenizer != "bpe":
            with contextlib.suppress(DataError):  # shards that exist need no other copy of their tokenizer
                tokenizer = load_tokenizer(config.tokenizer)
        elif config.mixture:
            tokenizer = mixture_tokenizer(config)
        absent_first = sorted((one.source for one in sources), key=is_missing, reverse=True)  # before any text is read
        found = {source: _find_or_make(config, source, tokenizer) for source in absent_first}
        opened = [found[one.source] for one in sources]
    return Shards.mix(list(zip(sources, opened, strict=True))) if config.mixture else opened[0]


def _find_or_make(config: DataConfig, source: str, tokenizer: Tokenizer | None) -> Shards:
    """Open the shards of one source, and make them first if there are none of its text."""
    request = {**config.request, "source": source}
    if config.tokenizer == "bpe" and tokenizer is not None:
        request["tokenizer"] = f"bpe-{tokenizer.sha256[:12]}"
    state = source_state(source)

    @functools.cache
    def text_sha256() -> str:
        digest = TextDigest()
        for _ in digest.over(iter_documents(source)):
            pass
        return digest.hexdigest()

    find = functools.partial(_find, config.folder, request, tokenizer, state, text_sha256)
    found = find()
    if found is not None:
        logger.info("using %s", found)
    elif is_url(config.folder):
        raise not_in_store(config.folder)
    else:
        with locked(Path(config.folder), name=f".{request_key(request)}.lock", wait=True):
            found = find() or _make(config, request, tokenizer, state)
    return Shards.open(found)


def _find(
    folder: str,
    request: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    state: str | None,
    text_sha256: Callable[[], str],
) -> Path | str | None:
    """Find the shards that were made by a request from the same text, by the state of its files or else by its SHA-256."""
    source = request["source"]
    candidates = [
        (found, manifest)
        for found, manifest in _finished(folder)
        if {key: value for key, value in manifest.request.items() if key != "text_sha256"} == request
        and (tokenizer is None or manifest.tokenizer_sha256 == tokenizer.sha256)
    ]
    if candidates and is_missing(source):
        if len(candidates) > 1:
            several = ", ".join(str(found) for found, _ in candidates)
            raise DataError(f"{source} is missing, and there are shards of several states of it; keep one of {several}")
        return candidates[0][0]
    for found, manifest in candidates:
        if state is not None and manifest.source_state == state:
            return found
    if candidates:
        logger.info("reading %s", source)
    for found, manifest in candidates:
        if manifest.request.get("text_sha256") == text_sha256():
            if isinstance(found, Path):
                with contextlib.suppress(OSError):  # the folder may be read-only
                    write_manifest(found, dataclasses.replace(manifest, source_state=state))
            return found
    return None


def _finished(folder: str) -> Iterator[tuple[Path | str, Manifest]]:
    """Yield the shard folders inside a folder or a store, with their manifests."""
    if is_url(folder):
        store = Store(folder)
        for name in store.folders(MANIFEST_FILE):
            content, url = store.read(f"{name}/{MANIFEST_FILE}"), f"{store.url}/{name}"
            with contextlib.suppress(ValueError):
                yield url, manifest_of(parse_json(content), url)
        return
    for path in sorted(Path(folder).glob(f"*/{MANIFEST_FILE}")):
        if not path.parent.name.startswith((_MAKING, ".")):
            with contextlib.suppress(DataError):
                yield path.parent, read_manifest(path.parent)


def _make(config: DataConfig, request: dict[str, Any], tokenizer: Tokenizer | None, state: str | None) -> Path:
    """Tokenise a source into a folder, which gets its name when it is complete."""
    root, source = Path(config.folder), request["source"]
    if tokenizer is None:
        is_bpe = config.tokenizer == "bpe"
        tokenizer = train_on_sources(config, [source]) if is_bpe else load_tokenizer(config.tokenizer)
    logger.info("tokenising %s in %s", source, root)
    is_large = (source_bytes(source) or math.inf) >= _LARGE_BYTES
    digest, reading = TextDigest(), Reading(report) if is_large else Reading()
    documents = digest.over(iter_documents(source, reading))
    folder = root / f"{_MAKING}{request_key(request)}"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    try:
        manifest = write_documents(
            folder,
            iter_split(documents, validation_share=config.validation_share, seed=config.split_seed, source=source),
            tokenizer,
            source=source,
            source_state=state,
            request=lambda: {**request, "text_sha256": digest.hexdigest()},
            on_text=reading.add,
        )
        final = root / request_key(manifest.request)
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return final

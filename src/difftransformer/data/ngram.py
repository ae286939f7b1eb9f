"""A byte bigram model: the baseline that shows whether a trained model has learnt more than letter pairs."""

import numpy as np
import numpy.typing as npt

from ..errors import DataError

_CHUNK_BYTES = 2**24


def byte_bigram_bits_per_byte(train_bytes: bytes, validation_bytes: bytes) -> float:
    """Bits per byte of a byte bigram fitted to one text and scored on another.

    With c the counts in the training text of n bytes, and T(a) the number of distinct bytes that follow a there, the
    bigram is interpolated with a smoothed unigram by Witten-Bell's rule, which has nothing to tune:

        p(b)     = (c(b) + 1) / (n + 256)
        p(b | a) = (c(a, b) + T(a) p(b)) / (c(a) + T(a)), or p(b) where nothing follows a

    The first validation byte is scored by p(b), every other by p(b | a).

    Args:
        train_bytes: the text to count.
        validation_bytes: the text to score.

    Returns:
        Mean of -log2 p, in bits per byte.

    Raises:
        DataError: a text is empty.
    """
    for name, text in (("training", train_bytes), ("validation", validation_bytes)):
        if not text:
            raise DataError(f"the byte bigram baseline met an empty {name} text; give text with at least one byte")
    train, validation = np.frombuffer(train_bytes, np.uint8), np.frombuffer(validation_bytes, np.uint8)
    unigram = (np.bincount(train, minlength=256) + 1.0) / (len(train) + 256.0)
    pairs = _pair_counts(train)
    totals = pairs.sum(axis=1, keepdims=True)
    followers = np.count_nonzero(pairs, axis=1)[:, None]
    seen = np.maximum(totals + followers, 1)
    bigram = np.where(totals > 0, (pairs + followers * unigram) / seen, unigram)
    bits = -(_pair_counts(validation) * np.log2(bigram)).sum() - np.log2(unigram[validation[0]])
    return float(bits / len(validation))


def _pair_counts(text: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Counts of (byte, next byte), (256, 256)."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    for start in range(0, len(text) - 1, _CHUNK_BYTES):
        chunk = text[start : start + _CHUNK_BYTES + 1].astype(np.uint16)
        counts += np.bincount(chunk[:-1] * 256 + chunk[1:], minlength=256 * 256)
    return counts.reshape(256, 256)

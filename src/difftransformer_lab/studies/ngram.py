"""A byte bigram model, the baseline that shows whether a trained model has learned more than pairs of letters."""

import numpy as np
import numpy.typing as npt

from difftransformer.errors import DataError

_CHUNK_BYTES = 2**24


def byte_bigram_bits_per_byte(train_bytes: bytes, validation_bytes: bytes) -> float:
    """Fit a byte bigram to one text and return the mean of -log2 p on another, in bits per byte.

    The bigram is interpolated with a smoothed unigram by Witten-Bell's rule, which has no parameters. With the counts c in
    the training text of n bytes and the number T(a) of distinct bytes that follow a in it:

        p(b)     = (c(b) + 1) / (n + 256)
        p(b | a) = (c(a, b) + T(a) p(b)) / (c(a) + T(a)), or p(b) where nothing follows a

    The first validation byte is scored by p(b), all others by p(b | a).
    """
    for name, text in (("training", train_bytes), ("validation", validation_bytes)):
        if not text:
            raise DataError(f"byte bigram baseline: empty {name} text; give a text of at least one byte")
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
    """Count (byte, next byte) pairs, (256, 256)."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    for start in range(0, len(text) - 1, _CHUNK_BYTES):
        chunk = text[start : start + _CHUNK_BYTES + 1].astype(np.uint16)
        counts += np.bincount(chunk[:-1] * 256 + chunk[1:], minlength=256 * 256)
    return counts.reshape(256, 256)

"""Near-duplicates of source text, found by the lines that texts share."""

from hashlib import blake2b

_WINDOW = 5
"""Lines that are compared together."""
_SAMPLED = 8
_SHARE = 0.5
_MASK = 2**64 - 1


class NearDuplicates:
    """Tells whether a text has mostly been seen before, in one text or in several.

    Windows of 5 lines are hashed; blank lines and the space around lines don't count. Of the hashes, those divisible by 8 are
    kept (A. Broder, "On the resemblance and containment of documents", 1997). A text is a near-duplicate if at least half of
    its kept hashes are those of earlier texts. A text so short that it keeps none is compared as a whole.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, text: str) -> bool:
        """Return whether a text is a near-duplicate. Other texts are remembered."""
        hashes = _window_hashes(text)
        known = len(hashes & self._seen)
        if known >= _SHARE * len(hashes):
            return True
        self._seen |= hashes
        return False


def _window_hashes(text: str) -> set[int]:
    lines = [_hashed(line) for line in map(str.strip, text.splitlines()) if line]
    whole = _combined(lines)
    starts = range(len(lines) - _WINDOW + 1)
    windows = {_combined(lines[at : at + _WINDOW]) for at in starts}
    return {window for window in windows if window % _SAMPLED == 0} or {whole}


def _combined(hashes: list[int]) -> int:
    total = 0
    for one in hashes:
        total = (total * 3 + one) & _MASK
    return total


def _hashed(line: str) -> int:
    return int.from_bytes(blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

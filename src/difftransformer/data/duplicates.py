"""Near-duplicates of source text, found by the lines that texts share."""

from hashlib import blake2b

_WINDOW = 5
"""Lines that are compared together."""
_SHARE = 0.5
_BITS = 2**29
_MASK = 2**64 - 1


class NearDuplicates:
    """Tells whether a text has mostly been seen before, in one text or in several.

    The measure is containment (A. Broder, "On the resemblance and containment of documents", 1997): a text is a
    near-duplicate if at least half of its windows of 5 lines stand in earlier texts. Blank lines and the space around lines
    don't count. A window is remembered as one bit of 64 MiB, so in a gigabyte of text, about 4 % of new windows pass for
    known ones.
    """

    def __init__(self) -> None:
        self._seen = bytearray(_BITS // 8)

    def add(self, text: str) -> bool:
        """Return whether a text is a near-duplicate. Other texts are remembered."""
        windows = _window_hashes(text)
        known = sum(self._seen[window >> 3] >> (window & 7) & 1 for window in windows)
        if known >= _SHARE * len(windows):
            return True
        for window in windows:
            self._seen[window >> 3] |= 1 << (window & 7)
        return False


def _window_hashes(text: str) -> set[int]:
    lines = [_hashed(line) for line in map(str.strip, text.splitlines()) if line]
    size = min(_WINDOW, len(lines))
    return {_combined(lines[at : at + size]) % _BITS for at in range(len(lines) - size + 1)}


def _combined(hashes: list[int]) -> int:
    total = 0
    for one in hashes:
        total = (total * 3 + one) & _MASK
    return total


def _hashed(line: str) -> int:
    return int.from_bytes(blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

"""Mixtures: which source each row of a sequence comes from, computed without any state."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def share_of(value: float) -> Fraction:
    """Return a share or weight as the fraction that was written (0.1 is 1/10), so that rows are counted in exact integers."""
    return Fraction(value).limit_denominator(10**9)


class Allocation:
    """Divides rows 0, 1, 2 ... among sources by weight.

    Row by row, the first source takes its share of all rows, the second its share of the rest, and so on. Taken rows are
    spread evenly: of any n consecutive rows, a source takes its share of them to within the number of sources. So the
    number of a source's earlier rows is a formula, and any row can be found without its predecessors.

    Args:
        weights: Weights of the sources, each above 0.
        rng: Draws the phase of each source.
    """

    def __init__(self, weights: Sequence[float], rng: np.random.Generator) -> None:
        fractions = [share_of(weight) for weight in weights]
        self.steps = []
        for index, fraction in enumerate(fractions[:-1]):
            share, phase = fraction / sum(fractions[index:]), Fraction(int(rng.integers(2**32)), 2**32)
            # floor(rows * share + phase), over one denominator
            self.steps.append((share.numerator * phase.denominator, phase.numerator * share.denominator,
                               share.denominator * phase.denominator))  # fmt: skip

    def place(self, row: int) -> tuple[int, int]:
        """Return the source of a row, and the number of earlier rows of that source."""
        for source, (slope, phase, denominator) in enumerate(self.steps):
            before = (row * slope + phase) // denominator
            if ((row + 1) * slope + phase) // denominator > before:
                return source, before
            row -= before
        return len(self.steps), row

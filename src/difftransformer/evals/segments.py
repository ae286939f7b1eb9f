"""Sums of one row of attention weights by segment of the prompt, in three forms of a signed weight."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..results import Form

FORMS: tuple[Form, ...] = ("signed", "absolute", "positive")


def row_sums(layers: Sequence[Tensor], edges: Sequence[int]) -> list[list[list[list[float]]]]:
    """Sums of w, |w| and max(w, 0) over each segment.

    Args:
        layers: (H, T) weights of one query in each layer; H may differ.
        edges: The segments' bounds: segment i is edges[i] <= position < edges[i + 1].

    Returns:
        [layer][head][form][segment].
    """
    found = []
    for weights in layers:
        wide = weights.double()
        forms = (wide, wide.abs(), wide.clamp(min=0))
        sums = [[values[:, a:b].sum(1).tolist() for a, b in pairwise(edges)] for values in forms]
        found.append(
            [
                [[sums[form][segment][head] for segment in range(len(edges) - 1)] for form in range(len(forms))]
                for head in range(len(weights))
            ]
        )
    return found

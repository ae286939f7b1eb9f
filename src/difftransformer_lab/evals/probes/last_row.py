"""The attention weights of a row's last token, and their sums by segment of the prompt."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .hooks import combined, observing_maps, written_out


def last_row_weights(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the weights by which the last token's heads add values: A1 - lambda A2 for differential attention.

    The ids are (B, T). All tokens but the last go through the model's own kernels; only one row of each map is formed.

    Returns:
        (B, H, T) in fp32 for each layer, on the CPU; zero for tokens outside of a sliding window.

    Raises:
        EvaluationError: See `hooks.written_out`.
    """
    length, past = ids.shape[1], None
    if length > 1:
        past = model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    found: list[Tensor] = []

    def observe(layer: int, first: Tensor, second: Tensor | None, lam: Tensor | None, allowed: Tensor | None) -> None:
        weights = combined(first, second, lam)[:, :, -1].float().cpu()
        found.append(F.pad(weights, (length - weights.shape[-1], 0)))

    with written_out(model) as layers, observing_maps(layers, observe):
        model(input_ids=ids[:, -1:], past_key_values=past, use_cache=True)
    return found


def row_sums(layers: Sequence[Tensor], edges: Sequence[int]) -> list[list[list[list[float]]]]:
    """Sum w, |w| and max(w, 0) over each segment (`probes.FORMS`).

    Args:
        layers: (H, T) weights of one query in each layer; H may differ between layers.
        edges: Bounds of the segments: segment i is edges[i] <= position < edges[i + 1].

    Returns:
        [layer][head][form][segment].
    """
    found = []
    for weights in layers:
        wide = weights.double()
        forms = torch.stack((wide, wide.abs(), wide.clamp(min=0)), 1)
        found.append(torch.stack([forms[..., a:b].sum(-1) for a, b in pairwise(edges)], -1).tolist())
    return found

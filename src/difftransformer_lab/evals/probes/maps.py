"""The attention maps of a prompt, head by head, or only the weights of its last token and their sums by segment."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from difftransformer.errors import EvaluationError

from . import NEAR_ZERO
from .hooks import combined, observing_maps, written_out

_TENTH = 0.1
_HEADS_DRAWN = 4


def head_maps(model: Any, ids: Tensor, layers: Sequence[int] = (), heads: Sequence[int] = ()) -> dict[str, Any]:
    """Compute every head's share of negative weight and of weight near zero, and return the maps of some heads.

    Args:
        ids: (1, T).
        layers: Layers whose maps are returned, from 0; the first, the middle and the last by default.
        heads: Heads of a layer, from 0; the first four by default.

    Returns:
        `negative`, `near_zero`, `near_zero_first` and `lambda`, each [layer][head] (see `tasks.maps`); `lambda` is None without
        a second map. `maps` has for each chosen head `layer`, `head`, `lambda`, and the rows of `first`, `second` and
        `weights`, row t with its t + 1 keys; `second` is None without a second map.

    Raises:
        EvaluationError: See `hooks.written_out`; or the model has no such layer or head.
    """
    figures: dict[str, Any] = {"negative": [], "near_zero": [], "near_zero_first": [], "lambda": [], "maps": []}

    def observe(layer: int, first: Tensor, second: Tensor | None, lam: Tensor | None, allowed: Tensor | None) -> None:
        weights = combined(first, second, lam)
        seen = torch.ones_like(first, dtype=torch.bool) if allowed is None else allowed.expand_as(first)
        tenth = _TENTH / seen.sum(-1, keepdim=True)
        for name, values in (("near_zero", weights), ("near_zero_first", first)):
            near = (values.abs() < tenth) & seen
            figures[name].append((near.sum((0, 2, 3)) / seen.sum((0, 2, 3))).tolist())
        wide = weights.double()
        figures["negative"].append((wide.clamp(max=0).abs().sum((0, 2, 3)) / wide.abs().sum((0, 2, 3))).tolist())
        by_head = None if lam is None else lam.expand(first.shape[:3]).mean((0, 2)).tolist()
        figures["lambda"].append(by_head)
        if layer not in chosen_layers:
            return
        if heads and max(heads) >= first.shape[1]:
            raise EvaluationError(f"no head {max(heads)}: layer {layer} has {first.shape[1]}, counted from 0")
        drawn = {"first": first, "second": second, "weights": weights}
        for head in heads or range(min(_HEADS_DRAWN, first.shape[1])):
            rows = {name: None if one is None else _rows(one[0, head]) for name, one in drawn.items()}
            lam_of_head = None if by_head is None else by_head[head]
            figures["maps"].append({"layer": layer, "head": head, "lambda": lam_of_head, **rows})

    with written_out(model) as tapped:
        count = len(tapped)
        if layers and max(layers) >= count:
            raise EvaluationError(f"no layer {max(layers)}: the model has {count} with attention, counted from 0")
        chosen_layers = set(layers) or {0, count // 2, count - 1}
        with observing_maps(tapped, observe):
            model(input_ids=ids, use_cache=False)
    return figures


def _rows(square: Tensor) -> list[list[float]]:
    """Return the rows of a causal map without the later keys, with four digits."""
    return [[float(f"{value:.4g}") for value in row[: index + 1]] for index, row in enumerate(square.tolist())]


def last_row_weights(model: Any, ids: Tensor, *, whole: bool = False) -> list[Tensor]:
    """Return the weights by which the last token's heads add values: A1 - lambda A2 for differential attention.

    The ids are (B, T). All tokens but the last go through the model's own kernels, and only one row of each map is formed;
    `whole` computes them all at once, which forms the T x T maps.

    Returns:
        (B, H, T) in fp32 for each layer, on the CPU; zero for tokens outside of a sliding window.

    Raises:
        EvaluationError: See `hooks.written_out`.
    """
    length, past = ids.shape[1], None
    if length > 1 and not whole:
        past = model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    rows: list[Tensor] = []

    def observe(layer: int, first: Tensor, second: Tensor | None, lam: Tensor | None, allowed: Tensor | None) -> None:
        weights = combined(first, second, lam)[:, :, -1].float().cpu()
        rows.append(F.pad(weights, (length - weights.shape[-1], 0)))

    with written_out(model) as layers, observing_maps(layers, observe):
        model(input_ids=ids if whole else ids[:, -1:], past_key_values=past, use_cache=not whole)
    return rows


def row_sums(layers: Sequence[Tensor], edges: Sequence[int]) -> list[list[list[list[float]]]]:
    """Sum w, |w| and max(w, 0) over each segment (`probes.FORMS`), and the shares of weights near zero and of negative ones.

    Those shares are of all weights of the row (`probes.COUNTED`).

    Args:
        layers: (H, T) weights of one query in each layer; H may differ between layers.
        edges: Bounds of the segments: segment i is edges[i] <= position < edges[i + 1].

    Returns:
        [layer][head][form or share][segment].
    """
    sums = []
    for weights in layers:
        wide = weights.double()
        counted = (mask.double() / wide.shape[-1] for mask in (wide.abs() < NEAR_ZERO, wide < 0))
        forms = torch.stack((wide, wide.abs(), wide.clamp(min=0), *counted), 1)
        sums.append(torch.stack([forms[..., a:b].sum(-1) for a, b in pairwise(edges)], -1).tolist())
    return sums

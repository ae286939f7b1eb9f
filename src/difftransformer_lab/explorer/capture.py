"""The maps of every head of a model for one text, as the explorer stores them: rows of a triangle, in float32."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from difftransformer.errors import EvaluationError

from ..evals.probes.hooks import observing_maps, written_out

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerMaps:
    """What one layer computes for a text of T tokens.

    Attributes:
        rows: Row t of every map, (H, maps, t + 1): A1 and A2 of a differential head, the only map of another.
        lam: Lambda of every head, (H, T), or (H, 1) where it does not depend on the token; None with one map.
    """

    rows: list[Floats]
    lam: Floats | None

    @classmethod
    def of(cls, maps: list[Tensor], lam: Tensor | None) -> "LayerMaps":
        """Take the (1, H, T, T) maps of a layer and its lambda, which can be broadcast to (1, H, T)."""
        square = torch.stack([one[0].float() for one in maps], 1).cpu()
        if not bool(square.isfinite().all()):
            raise EvaluationError("some attention weights are not finite in this dtype; use --dtype fp32")
        if bool(square.triu(1).any()):
            raise EvaluationError("a token reads later ones; the explorer shows causal attention")
        rows = [square[:, :, t, : t + 1].numpy() for t in range(square.shape[-1])]
        return cls(rows, None if lam is None else lam[0].float().expand(square.shape[0], -1).cpu().numpy())


@torch.no_grad()
def capture(model: Any, ids: Tensor) -> list[LayerMaps]:
    """Compute the maps of every layer with attention.

    Args:
        model: A causal language model with the interface of transformers.
        ids: (1, T) token ids, on the model's device.
    """
    layers: list[LayerMaps] = []

    def observe(layer: int, first: Tensor, second: Tensor | None, lam: Tensor | None, allowed: Tensor | None) -> None:
        layers.append(LayerMaps.of([first] if second is None else [first, second], lam))

    with ExitStack() as restored:
        restored.callback(model.train, model.training)
        model.eval()
        try:
            with written_out(model) as tapped, observing_maps(tapped, observe):
                model(input_ids=ids, use_cache=False)
        except EvaluationError as error:
            return [LayerMaps.of([weights], None) for weights in _returned(model, ids, error)]
    return layers


def _returned(model: Any, ids: Tensor, error: EvaluationError) -> list[Tensor]:
    """Return the weights that a model gives with output_attentions, for one that the equations do not describe."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        attentions = model(input_ids=ids, use_cache=False, output_attentions=True).get("attentions") or ()
    except (AttributeError, TypeError, ValueError):
        raise error from None
    finally:
        model.config._attn_implementation = before
    weights = [one for one in attentions if one is not None and one.dim() == 4]
    if not weights:
        raise error
    return weights

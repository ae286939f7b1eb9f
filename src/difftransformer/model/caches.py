"""Caches of keys and values that others allocate from a configuration."""

from transformers import Cache

from ..attention import HeadLayout
from ..errors import ShapeError


def regroup(cache: Cache, layout: HeadLayout) -> None:
    """Give keys and values that were made with a configuration's heads the heads of its attention type, in place.

    PEFT's prefix tuning makes `num_key_value_heads` heads of width `head_dim`, those of the same-size Transformer. If the
    attention type caches as many values, neighbouring heads become one.

    Args:
        cache: Cache whose filled layers have keys and values of shape (B, heads, S, width).
        layout: Heads of the attention layers.

    Raises:
        ShapeError: The layers cache another number of values.
    """
    for layer in getattr(cache, "layers", ()):
        for name, width in (("keys", layout.key_width), ("values", layout.value_width)):
            states = getattr(layer, name, None)
            if states is None or states.dim() != 4 or states.shape[-1] == 0:
                continue
            batch, heads, length, theirs = states.shape
            if theirs == width and heads <= layout.cache_heads:  # fewer are those of a tensor-parallel process
                continue
            if heads * theirs != layout.cache_heads * width:
                raise ShapeError(
                    f"the cache holds {heads} heads of width {theirs} as {name}, this attention caches {layout.cache_heads} "
                    f"of width {width}; start from an empty cache (PEFT's prefix tuning does not fit this model)"
                )
            states = states.transpose(1, 2).reshape(batch, length, -1, width).transpose(1, 2)
            setattr(layer, name, states)

"""Caches of keys and values that others allocate: PEFT's prefixes, and the pages of transformers' continuous batching."""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..attention import HeadLayout
from ..errors import ShapeError
from ..ops.problem import Restrictions
from .config import DiffTransformerConfig


def dynamic_cache(config: DiffTransformerConfig) -> DynamicCache:
    """Make an empty cache that grows. `DynamicCache(config=config)` is the same, but torch.compile cannot trace it."""
    cache = DynamicCache()
    if config.sliding_window is not None:
        layers = range(config.num_hidden_layers)
        cache.layers = [DynamicSlidingWindowLayer(sliding_window=config.sliding_window) for _ in layers]
    return cache


def regroup(cache: Cache, layout: HeadLayout) -> None:
    """Give keys and values that were made with a configuration's heads the heads of its attention type, in place.

    PEFT's prefix tuning makes `num_key_value_heads` heads of width `head_dim`, as the same-size Transformer has. If the
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
            if theirs == width and heads <= layout.cache_heads:  # a tensor-parallel process has fewer
                continue
            if heads * theirs != layout.cache_heads * width:
                raise ShapeError(
                    f"the cache holds {heads} heads of width {theirs} as {name}, this attention caches {layout.cache_heads} "
                    f"of width {width}; start from an empty cache (PEFT's prefix tuning does not fit this model)"
                )
            states = states.transpose(1, 2).reshape(batch, length, -1, width).transpose(1, 2)
            setattr(layer, name, states)


class LayerCache:
    """The cache of one layer, which is found before the layer is called.

    A layer that looked itself up in the cache of all would read its own index, for which torch.compile compiles every layer.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append (B, G, T, width) keys and values, and return everything cached for the layer."""
        return self.layer.update(key_states, value_states)  # type: ignore[no-any-return]


def cache_of_layer(cache: Any, index: int) -> Any:
    """Return the object that takes a layer's keys and values: its part of a plain transformers cache, else the cache."""
    if cache is None or getattr(type(cache), "update", None) is not Cache.update or cache.offloading:
        return cache
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    return LayerCache(cache.layers[index])


class PagedRow:
    """The cache of one forward pass in continuous batching: all layers read and write the same places of their pages.

    Requests of any length stand in one row. The pages hold keys and values of one width, so the narrower is padded with zeros.
    """

    def __init__(self, layout: HeadLayout, keywords: Mapping[str, Any]) -> None:
        self.layout, self.cache = layout, keywords["cache"]
        names = ("read_index", "write_index", "cu_seq_lens_k", "max_length_k")
        self.places = {name: keywords[name] for name in names}

    @classmethod
    def of(cls, layout: HeadLayout, keywords: Mapping[str, Any]) -> Self | None:
        """Return the cache among the keywords of a forward pass, or None outside continuous batching."""
        return cls(layout, keywords) if keywords.get("cache") is not None else None

    def restrictions(self, attention_mask: Tensor) -> Restrictions:
        """Return the keys that each token may attend to, by the additive mask (1, 1, T, S) of all requests."""
        return Restrictions(attn_mask=attention_mask == 0)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write (1, G, T, width) keys and values of one layer to its pages, and return the keys and values of all requests."""
        widths = key_states.shape[-1], value_states.shape[-1]
        states = (F.pad(part, (0, max(widths) - part.shape[-1])) for part in (key_states, value_states))
        key, value = self.cache.update(*states, layer_idx, dict(self.places))
        return key[..., : widths[0]], value[..., : widths[1]]


class PagedModel:
    """A model whose configuration has the cache's heads and width, from which transformers allocates pages.

    Everything else is the model's own.
    """

    def __init__(self, model: nn.Module, config: DiffTransformerConfig) -> None:
        layout, cached = config.head_layout(), copy.copy(config)
        cached.num_key_value_heads = layout.cache_heads
        cached.head_dim = max(layout.key_width, layout.value_width)
        vars(self).update(model=model, config=cached)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""
        return self.model(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

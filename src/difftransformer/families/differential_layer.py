"""Make an attention layer of transformers differential in place.

The layer keeps its class's forward: projections, norms, rotation and cache are its own. What changes is the number of rows of
q_proj and k_proj, whose heads become (head, map), and the attention function that the forward calls, which pairs the maps and
calls the op through the variant's `attend`.

Dimensions: B batch, T query positions, S key positions, N heads as the family's forward sees them (all maps), D width of one
map, E value width.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import sdpa_mask

from ..attention import Attention, HeadLayout
from ..attention.base import PROJECTIONS
from ..errors import ConfigError
from ..model.caches import PagedRow
from ..ops.norms import rms_norm
from ..ops.problem import Restrictions, bool_mask
from ..ops.reference import weighted_values

IMPLEMENTATION = "difftransformer_family"
OUTPUTS = ("o_proj", "out_proj", "dense")  # the families' names of the output projection
_classes: dict[type[nn.Module], type[nn.Module]] = {}  # by the class that they extend


class DifferentialLayer(nn.Module):
    """What a differential layer adds to a family's attention class.

    Attributes:
        differential: The variant's layer without projections: lambda, layout and what follows attention.
        model_config: The configuration of the model. `config` may be a copy, which does not follow later changes.
    """

    differential: Attention
    layer_idx: int
    config: Any
    model_config: Any

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Run the family's forward inside that of `differential`, so that hooks of FSDP and offloading gather its weights."""
        if keywords.get("past_key_values") is not None:
            keywords["past_key_values"] = GroupedCache(keywords["past_key_values"], self.differential.layout)
            keywords["own_values"] = keywords["past_key_values"]
        return self.differential(hidden_states, partial(super().forward, hidden_states, *arguments, **keywords))


class GroupedCache:
    """The cache of a forward pass as the family sees it, with keys and values of equal heads inside, which static caches need.

    What `update` returns is grouped as the op takes it, so that no step copies all that is cached.

    Attributes:
        value: The values that the forward pass appended, (B, G, T, E).
    """

    def __init__(self, cache: Cache, layout: HeadLayout) -> None:
        self.cache, self.layout = cache, layout
        self.value: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, N', T, D) keys and (B, G, T, E) values, and return everything cached, in groups."""
        key, value = _grouped(key_states, self.layout.key_width), _grouped(value_states, self.layout.value_width)
        self.value = value
        return self.cache.update(key, value, *arguments, **keywords)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class AroundForward(nn.Module):
    """What is added to the variant's class: a forward that runs the family's."""

    def forward(self: Any, hidden_states: Tensor, family_forward: Callable[..., Any]) -> Any:
        """Run the family's forward, whose attention function also gets lambda and the gate."""
        return family_forward(head_lam=self.head_lam(hidden_states), head_gate=self.head_gate(hidden_states))


class NormOfMaps(nn.Module):
    """A norm over all heads of a projection, computed over the first maps and over the second maps separately.

    Args:
        weight: (rows,), the gain, one number for each row.
        eps: Added to the mean square.
        groups: Number of groups of heads; each group is its first maps and one second map.
        width: D.
    """

    def __init__(self, weight: Tensor, eps: float, groups: int, width: int) -> None:
        super().__init__()
        self.weight, self.eps, self.groups, self.width = nn.Parameter(weight), eps, groups, width

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., rows); same shape and dtype."""
        heads = x.unflatten(-1, (self.groups, -1, self.width))
        gains = self.weight.view(self.groups, -1, self.width)
        parts = [
            rms_norm(heads[..., part, :].flatten(-3), gains[:, part].flatten(), self.eps).unflatten(
                -1, (self.groups, -1, self.width)
            )
            for part in (slice(None, -1), slice(-1, None))
        ]
        return torch.cat(parts, -2).flatten(-3)


def make_differential(layer: Any, differential: Attention) -> None:
    """Change an attention layer of transformers in place. New weights are uninitialised.

    Args:
        layer: Attention layer with q_proj and k_proj, or with qkv_proj.
        differential: A layer of the variant with the same heads. Its projections are removed.

    Raises:
        ConfigError: the variant's heads have another total width than the layer's output projection reads.
    """
    layout = differential.layout
    output = next(getattr(layer, name) for name in OUTPUTS if hasattr(layer, name))
    if output.in_features != (width := layout.num_heads * layout.value_head_dim):
        raise ConfigError(
            f"attention_type={differential.name!r}: its {layout.num_heads} heads have {layout.value_head_dim} values each, "
            f"{width} in all, and the family's output projection reads {output.in_features}; choose other head counts or "
            "value_head_dim"
        )
    rows = {
        "q": (layout.query_groups, layout.query_width, layout.query_maps),
        "k": (layout.cache_heads, layout.key_width, layout.key_maps),
    }
    sizes = {name: groups * width for name, (groups, width, _) in rows.items()}
    for name, (groups, _, maps) in rows.items():
        if hasattr(layer, f"{name}_proj"):
            setattr(layer, f"{name}_proj", _linear(getattr(layer, f"{name}_proj"), sizes[name]))
        norm = getattr(layer, f"{name}_norm", None)
        if norm is None or norm.weight is None or norm.weight.numel() == layout.head_dim:
            continue
        if norm.weight.dim() == 2:  # a gain for each head
            norm.weight = nn.Parameter(norm.weight.new_ones(sizes[name] // layout.head_dim, layout.head_dim))
        elif maps == 2:
            gain = norm.weight.new_ones(sizes[name])
            setattr(layer, f"{name}_norm", NormOfMaps(gain, norm.variance_epsilon, groups, layout.head_dim))
    layer.model_config = layer.config
    if hasattr(layer, "qkv_proj"):
        values = layout.num_key_value_heads * layout.value_head_dim
        layer.qkv_proj = _linear(layer.qkv_proj, sizes["q"] + sizes["k"] + values)
        # The forward divides the rows by these two.
        layer.config = copy.copy(layer.config)
        layer.config.num_attention_heads = sizes["q"] // layout.head_dim
        layer.num_key_value_heads = sizes["k"] // layout.head_dim
    for name in PROJECTIONS:
        delattr(differential, name)
    if hasattr(
        layer, "q_proj"
    ):  # `local_part` sees by its weight that processes share the heads; not a module of its own
        vars(differential)["q_proj"] = layer.q_proj
    differential.__class__ = _combined(AroundForward, type(differential), type(differential).__name__)
    layer.differential = differential
    layer.__class__ = _combined(DifferentialLayer, type(layer), f"Differential{type(layer).__name__}")


def _combined(addition: type[nn.Module], base: Any, name: str) -> Any:
    if base not in _classes:
        _classes[base] = type(name, (addition, base), {"__module__": __name__, "__reduce_ex__": _reduced})
    return _classes[base]


def _reduced(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle a module by the classes that its own class is made of: the process that opens it may not have that one yet."""
    kind, reduced = type(module), object.__reduce_ex__(module, max(protocol, 2))
    return _new, (*kind.__bases__, kind.__name__), *reduced[2:]


def _new(addition: type[nn.Module], base: Any, name: str) -> Any:
    kind = _combined(addition, base, name)
    return kind.__new__(kind)


def _linear(old: nn.Linear, rows: int) -> nn.Linear:
    weight = old.weight
    return nn.Linear(old.in_features, rows, bias=old.bias is not None, device=weight.device, dtype=weight.dtype)


def attention(
    module: DifferentialLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    head_lam: Tensor | float | None = None,
    head_gate: Tensor | None = None,
    own_values: GroupedCache | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute a variant's attention, with the signature that transformers expects of an attention function.

    Args:
        module: The attention layer.
        query, key, value: (B, N, T, D), (B, N', S, D) and (B, G, S, E); heads of one group of maps stand together. Keys and
            values from a cache are grouped already.
        attention_mask: Mask that broadcasts to (B, H, T, S), bool or added to the logits (0 or -inf), or None where attention
            is only causal.
        dropout: Must be 0.
        scaling: Factor of the logits. Defaults to 1/sqrt(D).
        is_causal: Whether attention without a mask is causal. Defaults to the layer's `is_causal`.
        head_lam: The variant's lambda.
        head_gate: The variant's factors of the heads, (B, T, H E), or None.
        own_values: The cache that `value` comes from, or None where `value` holds the T positions alone.
        **options: Other arguments that the families or continuous batching pass. The latter's mask is additive. The mask
            holds the window already.

    Returns:
        (B, T, H, E), and the combined map where the backend is "reference" ("eager") or output_attentions is set, else None.

    Raises:
        ConfigError: dropout or soft-capping, which the op does not have.
        ShapeError: a mask that is added to the logits holds biases.
    """
    for name, given in (("attention_dropout", dropout), ("attn_logit_softcapping", options.get("softcap"))):
        if given:
            raise ConfigError(f"{name}={given}: differential attention does not have it; set it to 0 or None")
    variant, layout = module.differential, module.differential.layout
    if scaling is not None and scaling != layout.head_dim**-0.5:
        query = query * (scaling * layout.head_dim**0.5)
    key, value = _grouped(key, layout.key_width), _grouped(value, layout.value_width)
    own_value = value if own_values is None else own_values.value
    paged = PagedRow.of(layout, options)
    if paged is not None and attention_mask is not None:
        key, value = paged.update(key, value, module.layer_idx)
        attention_mask = attention_mask == 0
    elif attention_mask is not None:
        attention_mask = bool_mask(attention_mask, "attention_mask")
    query_BHTX, key_BGSX, value_BGSE = variant.op_heads(
        _grouped(query, layout.query_width),
        key.to(query.dtype),
        value.to(query.dtype),  # under autocast, the cache holds fp32
    )
    if isinstance(head_lam, Tensor) and head_lam.dim() == 1:
        head_lam = variant.local_part(head_lam, query_BHTX.shape[1])
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    restrictions = Restrictions(attn_mask=attention_mask, is_causal=causal and attention_mask is None)
    map_BHTS = None
    if variant.backend == "reference" or options.get("output_attentions", module.model_config.output_attentions):
        map_BHTS = variant.combined_map(query_BHTX, key_BGSX, head_lam, restrictions)
        heads_BHTE = variant.finish(weighted_values(map_BHTS, value_BGSE))
    else:
        heads_BHTE = variant.attend(query_BHTX, key_BGSX, value_BGSE, head_lam, restrictions)
    heads_BTHE = variant.with_own_value(heads_BHTE, own_value).transpose(1, 2).contiguous()
    return heads_BTHE if head_gate is None else heads_BTHE * head_gate.view(heads_BTHE.shape), map_BHTS


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """Return transformers' bool mask (B, 1, T, S), or None if it is only causal and the last query sees the last key.

    The arguments are as in transformers' `sdpa_mask`. The offsets are the positions of the first query and key; the
    `attention_mask` is (B, past + T) with 0 for padding.
    """
    is_causal = (
        allow_is_causal_skip
        and isinstance(q_offset, int)
        and q_offset + q_length == kv_offset + kv_length
        and (local_size is None or kv_length < local_size)
        and (attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())))
    )
    if is_causal:
        return None
    return sdpa_mask(  # type: ignore[no-any-return]
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **options,
    )


def _grouped(heads: Tensor, width: int) -> Tensor:
    """Convert (B, N, L, D) to (B, N D / width, L, width), without a copy where the memory is (B, L, N, D)."""
    batch, count, length, own = heads.shape
    if own == width:
        return heads
    return heads.transpose(1, 2).reshape(batch, length, count * own // width, width).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)

"""Helpers for the attention weights of other modules: sizes from shapes, layers filled with converted tensors, and the row
permutations that layouts differ by.

Rows are those of a projection's weight (rows, M) or of its bias (rows,). There are H heads with two maps each, and D is the
width of one map. Each permutation has an inverse.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..attention import DifferentialAttention, RMSNorm
from ..attention.base import PROJECTIONS
from ..attention.differential import LAMBDA_VECTORS, Differential, DifferentialOptions
from ..attention.differential import lambda_init as lambda_init_of
from ..attention.head_norm import HEAD_NORM_EPS
from ..errors import CheckpointError, ConfigError, ShapeError
from ..ops.problem import LOW_PRECISION
from .conversion import Shape, check_tensors, shapes_of

LayerT = TypeVar("LayerT", bound=Differential)
# Whose formulas are those of V1 or V2 where their options and layout are; others have the same parameters for another function.
EXPRESSIBLE = ("diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "diff_gate")
THE_OTHERS = "the shapes of the others"  # what determines the shapes of an attention without a configuration


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one attention layer: M, H, G and D."""

    embed_dim: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int


def quotient(state: Mapping[str, Tensor], name: str, width: int, what: str) -> int:
    """Return the number of groups of `width` rows in a tensor.

    Raises:
        CheckpointError: There is no such tensor.
        ShapeError: The number of rows is not a multiple of `width`.
    """
    rows = tensor_of(state, name).shape[0]
    if rows == 0 or rows % width:
        raise ShapeError(f"{name} has {rows} rows, expected a multiple of {what} = {width}")
    return rows // width


def tensor_of(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of a state dict.

    Raises:
        CheckpointError: There is no such tensor.
    """
    if name not in state:
        raise CheckpointError(
            f"{name} is missing from the attention's state dict; it has {', '.join(state) or 'nothing'}"
        )
    return state[name]


def v1_sizes(state: Mapping[str, Tensor]) -> Sizes:
    """Return the sizes of a V1 module with a q_proj and a k_proj; its lambda vectors are as wide as one map."""
    head_dim = tensor_of(state, LAMBDA_VECTORS[0]).shape[-1]
    return Sizes(
        embed_dim=tensor_of(state, "q_proj.weight").shape[-1],
        num_heads=quotient(state, "q_proj.weight", 2 * head_dim, "twice the head_dim"),
        num_key_value_heads=quotient(state, "k_proj.weight", 2 * head_dim, "twice the head_dim"),
        head_dim=head_dim,
    )


def v1_shapes(
    sizes: Sizes, *, output: str, biased: bool, state: Mapping[str, Tensor], noise_heads: int | None = None
) -> dict[str, Shape]:
    """Return names and shapes of a V1 module: q_proj, k_proj, v_proj, `output`, the lambdas and `subln.weight`.

    Args:
        sizes: Sizes of the layer.
        output: Name of the output projection.
        biased: Whether projections may have a bias; the biases in `state` are expected.
        state: The module's tensors.
        noise_heads: Queries of the second map; None means one for each head.
    """
    heads, keys = sizes.num_heads, 2 * sizes.num_key_value_heads * sizes.head_dim
    queries = (heads + (noise_heads or heads)) * sizes.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, output: sizes.embed_dim}
    shapes: dict[str, Shape] = {f"{name}.weight": (count, sizes.embed_dim) for name, count in rows.items()}
    shapes[f"{output}.weight"] = (sizes.embed_dim, 2 * heads * sizes.head_dim)
    if biased:
        shapes |= {f"{name}.bias": (count,) for name, count in rows.items() if f"{name}.bias" in state}
    return shapes | dict.fromkeys(LAMBDA_VECTORS, (sizes.head_dim,)) | {"subln.weight": (2 * sizes.head_dim,)}


def v1_layer(
    state: Mapping[str, Tensor],
    sizes: Sizes,
    *,
    layer_index: int,
    head_norm_eps: float,
    options: DifferentialOptions | None = None,
    qk_norm: bool = False,
) -> DifferentialAttention:
    """Make a V1 layer with copies of tensors under our names, biases included; `head_norm.weight` may be absent."""
    options = options or DifferentialOptions()
    if "head_norm.weight" not in state:
        options = DifferentialOptions(head_norm="plain").over(options)
    norms = {"head_norm_eps": head_norm_eps, "qk_norm": qk_norm}
    return make_layer(DifferentialAttention, sizes, state, layer_index=layer_index, options=options, **norms)


def make_layer(kind: type[LayerT], sizes: Sizes, state: Mapping[str, Tensor], **arguments: Any) -> LayerT:
    """Make a layer with copies of the tensors; a projection gets a bias if the state has one, and lambda stays fp32."""
    with torch.device("meta"):
        layer = kind(
            sizes.embed_dim,
            sizes.num_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            **arguments,
        )
    tensors = {}
    for name, tensor in state.items():
        wide = name.startswith("lambda_") and not name.startswith("lambda_proj") and tensor.dtype in LOW_PRECISION
        tensors[name] = tensor.detach().to(torch.float32 if wide else tensor.dtype, copy=True)
    for name in PROJECTIONS:
        if f"{name}.bias" in tensors:
            linear = getattr(layer, name)
            linear.register_parameter("bias", nn.Parameter(torch.empty(linear.out_features, device="meta")))
    layer.load_state_dict(tensors, assign=True)
    return layer


def refuse_other_than_v1(
    layer: Differential,
    target: str,
    *,
    eps: float | None,
    init: float | None = None,
    shared_noise: bool = False,
    qk_norm: bool = False,
) -> RMSNorm:
    """Check that a V1 module of another project can hold a layer, and return the layer's headwise norm.

    Args:
        layer: The layer.
        target: Name of the layout, for messages.
        eps: eps of the module's headwise norm; None accepts any.
        init: lambda_init of the module for this layer; None means the paper's schedule.
        shared_noise: Whether heads may share a noise head.
        qk_norm: Whether queries and keys may have a norm.

    Raises:
        ConfigError: The module cannot hold the layer; the message names the field, its value and the expected one.
    """
    layout, norm = layer.layout, layer.head_norm
    expected = lambda_init_of(layer.layer_index) if init is None else init
    if not shared_noise and layout.heads_per_second_map > 1:
        raise ConfigError(
            f"num_noise_heads={layout.query_groups}: {target} has V1 attention; expected as many as num_heads="
            f"{layout.num_heads}"
        )
    possible = {"lambda_form": "layer", "shared_key": False, "value_head_dim": 2 * layout.head_dim}
    possible |= dict.fromkeys(("lambda_value", "head_scale"))
    refuse_fields(layer, f"{target} has V1 attention", possible, qk_norm=qk_norm)
    if norm is None:
        raise ConfigError(f"head_norm='none': {target} always normalises heads; expected head_norm='gain' or 'plain'")
    if eps is not None and norm.eps != eps:
        raise ConfigError(f"head_norm_eps={norm.eps}: {target} has it fixed; expected head_norm_eps={eps}")
    if abs(layer.lambda_init - expected) > 1e-12:
        raise ConfigError(
            f"lambda_init={layer.lambda_init:.6f}: {target} computes it from the depth; expected {expected:.6f} for "
            f"layer_index={layer.layer_index}"
        )
    return norm


def refuse_fields(layer: Differential, reason: str, possible: Mapping[str, object], *, qk_norm: bool = False) -> None:
    """Raise a ConfigError if the layer is of another formula, or an option or a field of its layout has not the possible value.

    Queries and keys may have a norm only where `qk_norm` says so.
    """
    if layer.name not in EXPRESSIBLE:
        raise ConfigError(f"attention_type={layer.name!r}: {reason}; expected one of {', '.join(EXPRESSIBLE)}")
    if layer.q_norm is not None and not qk_norm:
        raise ConfigError(f"qk_norm=True: {reason}, whose queries and keys have no norm; expected qk_norm=False")
    for field, expected in ({"output_gate": False} | dict(possible)).items():
        value = getattr(layer.options if hasattr(layer.options, field) else layer.layout, field, expected)
        if field == "shared_key":
            value = bool(value)
        if value != expected:
            raise ConfigError(f"{field}={value!r}: {reason}; expected {field}={expected!r}")


def refuse_other_than_full_width(layer: Differential, target: str) -> None:
    """Raise a ConfigError if a layer's heads do not fill its width, as happens with a fixed head_dim."""
    heads, head_dim = layer.layout.num_heads, layer.layout.head_dim
    if 2 * heads * head_dim != layer.embed_dim:
        raise ConfigError(
            f"head_dim={head_dim}: {target} has embed_dim / (2 num_heads); expected head_dim="
            f"{layer.embed_dim / heads / 2:g}"
        )


def load_joined(
    state: Mapping[str, Tensor], sizes: Sizes, *, joined: str, output: str, own: Mapping[str, str], **layer: Any
) -> DifferentialAttention:
    """Make a layer of a V1 module in which one projection has the rows of q, then of k, then of v.

    Args:
        state: The module's tensors.
        sizes: Sizes of the layer.
        joined: Name of the projection of q, k and v, which may have a bias.
        output: Name of the output projection, which may have a bias.
        own: The module's names of lambdas and norms, by ours.
        **layer: Arguments of `v1_layer`.

    Raises:
        CheckpointError: A tensor is missing, or there is one too many.
        ShapeError: A shape contradicts the others.
    """
    queries, keys = 2 * sizes.num_heads * sizes.head_dim, 2 * sizes.num_key_value_heads * sizes.head_dim
    shapes: dict[str, Shape] = {
        f"{joined}.weight": (queries + 2 * keys, sizes.embed_dim),
        f"{joined}.bias": (queries + 2 * keys,),
        f"{output}.weight": (sizes.embed_dim, queries),
        f"{output}.bias": (sizes.embed_dim,),
    }
    for name, theirs in own.items():
        shapes[theirs] = (2 * sizes.head_dim if name == "head_norm.weight" else sizes.head_dim,)
    check_tensors(shapes_of(state), shapes, optional=(f"{joined}.bias", f"{output}.bias"), by=THE_OTHERS)
    ours = {name: state[theirs] for name, theirs in own.items()}
    for kind in ("weight", "bias"):
        if f"{joined}.{kind}" in state:
            parts = state[f"{joined}.{kind}"].split((queries, keys, keys))
            ours |= {f"{name}.{kind}": part for name, part in zip(PROJECTIONS, parts, strict=False)}
        if f"{output}.{kind}" in state:
            ours[f"o_proj.{kind}"] = state[f"{output}.{kind}"]
    return v1_layer(ours, sizes, head_norm_eps=HEAD_NORM_EPS, **layer)


def joined_projections(layer: Differential, *, joined: str, output: str, biased: bool) -> dict[str, Tensor]:
    """Return the two projections that `load_joined` reads; a bias that is lacking is zero.

    Args:
        layer: The layer.
        joined: Name of the projection of q, k and v.
        output: Name of the output projection.
        biased: Whether both have a bias even if the layer has none.
    """
    state = {}
    for name, linears in ((joined, [layer.q_proj, layer.k_proj, layer.v_proj]), (output, [layer.o_proj])):
        state[f"{name}.weight"] = torch.cat([linear.weight.detach() for linear in linears])
        if biased or any(linear.bias is not None for linear in linears):
            state[f"{name}.bias"] = torch.cat([_bias(linear) for linear in linears])
    return state


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is not None:
        return linear.bias.detach()
    return torch.zeros(linear.out_features, dtype=linear.weight.dtype, device=linear.weight.device)


def v1_own_tensors(layer: Differential, norm: RMSNorm) -> dict[str, Tensor]:
    """Return the lambdas, and `subln.weight`: the gain, or ones if there is none, which is the same function."""
    own = {name: getattr(layer, name).detach() for name in LAMBDA_VECTORS}
    gain = norm.weight
    width, like = norm.dim, layer.o_proj.weight
    own["subln.weight"] = torch.ones(width, dtype=like.dtype, device=like.device) if gain is None else gain.detach()
    return own


def maps_first(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from (head, map, D) to (map, head, D): head i pairs with head i + H instead of 2 i with 2 i + 1."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(0, 1).flatten(0, 2)


def heads_first(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from (map, head, D) to (head, map, D), the inverse of `maps_first`."""
    return rows.unflatten(0, (2, heads, -1)).transpose(0, 1).flatten(0, 2)


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Move the rotary pairs (2 i, 2 i + 1) of every D rows to (i, i + D / 2)."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Move the rotary pairs (i, i + D / 2) of every D rows to (2 i, 2 i + 1), the inverse of `half_split`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def fold_gain(o_proj: Tensor, gain: Tensor) -> Tensor:
    """Fold the gain of the headwise norm into the output projection.

    W_O diag(g, ..., g) x = W_O (g x for every head), so the gain moves into the columns. Narrow types multiply in fp32.

    Args:
        o_proj: Output projection, (M, H * E).
        gain: Gain that all heads share, (E,).

    Returns:
        (M, H * E) in o_proj's dtype.
    """
    wide = torch.promote_types(o_proj.dtype, torch.float32)
    return (o_proj.unflatten(1, (-1, len(gain))).to(wide) * gain.to(wide)).flatten(1).to(o_proj.dtype)

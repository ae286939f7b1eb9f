"""What attention weights of other modules share: sizes read off their shapes, and layers filled with converted tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..attention import DifferentialAttention, RMSNorm
from ..attention.differential import LAMBDA_VECTORS, Differential, DifferentialOptions
from ..attention.differential import lambda_init as lambda_init_of
from ..errors import CheckpointError, ConfigError, ShapeError
from ..ops.problem import LOW_PRECISION
from .plan import Shape

LayerT = TypeVar("LayerT", bound=Differential)
THE_OTHERS = "the shapes of the others"  # what a lone attention's shapes are measured by
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one attention layer: M, H, G and D of the package's legend."""

    embed_dim: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int


def quotient(state: Mapping[str, Tensor], name: str, width: int, what: str) -> int:
    """How many groups of `width` rows a tensor has.

    Raises:
        CheckpointError: there is no such tensor.
        ShapeError: its rows do not divide.
    """
    rows = tensor_of(state, name).shape[0]
    if rows == 0 or rows % width:
        raise ShapeError(f"{name} has {rows} rows, expected a multiple of {what} = {width}")
    return rows // width


def tensor_of(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of a state dict.

    Raises:
        CheckpointError: there is none of this name.
    """
    if name not in state:
        raise CheckpointError(
            f"{name} is missing from the attention's state dict; it has {', '.join(state) or 'nothing'}"
        )
    return state[name]


def v1_sizes(state: Mapping[str, Tensor], *, prefix: str = "") -> Sizes:
    """Sizes of a V1 module with a q_proj and a k_proj, whose lambda vectors are as wide as one map.

    Args:
        state: The module's tensors.
        prefix: Of the lambdas' names.
    """
    head_dim = tensor_of(state, prefix + LAMBDA_VECTORS[0]).shape[-1]
    return Sizes(
        embed_dim=tensor_of(state, "q_proj.weight").shape[-1],
        num_heads=quotient(state, "q_proj.weight", 2 * head_dim, "twice the head_dim"),
        num_key_value_heads=quotient(state, "k_proj.weight", 2 * head_dim, "twice the head_dim"),
        head_dim=head_dim,
    )


def v1_shapes(sizes: Sizes, *, output: str, biased: bool, state: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Names and shapes of a V1 module: q_proj, k_proj, v_proj, `output`, the lambdas and `subln.weight`.

    Args:
        sizes: Of the layer.
        output: Name of the output projection.
        biased: Whether projections may have a bias; those that `state` has are expected.
        state: The module's tensors.
    """
    heads, keys, width = sizes.num_heads, sizes.num_key_value_heads, 2 * sizes.head_dim
    rows = {"q_proj": heads * width, "k_proj": keys * width, "v_proj": keys * width, output: sizes.embed_dim}
    shapes: dict[str, Shape] = {
        f"{name}.weight": (count, heads * width if name == output else sizes.embed_dim) for name, count in rows.items()
    }
    if biased:
        shapes |= {f"{name}.bias": (count,) for name, count in rows.items() if f"{name}.bias" in state}
    return shapes | dict.fromkeys(LAMBDA_VECTORS, (sizes.head_dim,)) | {"subln.weight": (width,)}


def v1_layer(
    state: Mapping[str, Tensor],
    sizes: Sizes,
    *,
    layer_index: int,
    head_norm_eps: float,
    options: DifferentialOptions | None = None,
    backend: str = "auto",
) -> DifferentialAttention:
    """A V1 layer that holds copies of tensors by our names, biases included; `head_norm.weight` may be absent."""
    options = options or DifferentialOptions()
    if "head_norm.weight" not in state:
        options = DifferentialOptions(head_norm="plain").over(options)
    with torch.device("meta"):
        layer = DifferentialAttention(
            sizes.embed_dim,
            sizes.num_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            layer_index=layer_index,
            head_norm_eps=head_norm_eps,
            backend=backend,
            options=options,
        )
    return filled(layer, state)


def filled(layer: LayerT, state: Mapping[str, Tensor]) -> LayerT:
    """The layer with copies of these tensors; projections get a bias where the state has one, lambda stays fp32."""
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
    layer: Differential, target: str, *, eps: float | None, init: float | None = None, shared_noise: bool = False
) -> RMSNorm:
    """Refuse a layer that no V1 module of others can hold, and return its headwise norm.

    Args:
        layer: The layer.
        target: The layout's name, for messages.
        eps: eps of their headwise norm; None takes any.
        init: Their lambda_init for this layer; None means the paper's schedule.
        shared_noise: Whether heads may share a noise head.

    Raises:
        ConfigError: the field, its value and the expected one are named.
    """
    options, layout, norm = layer.options, layer.layout, layer.head_norm
    expected = lambda_init_of(layer.layer_index) if init is None else init
    if not shared_noise and layout.heads_per_second_map > 1:
        raise ConfigError(
            f"num_noise_heads={layout.query_groups}: {target} has V1 attention; expected as many as num_heads="
            f"{layout.num_heads}"
        )
    for field, value, possible in (
        ("lambda_form", options.lambda_form, "layer"),
        ("shared_key", bool(options.shared_key), False),
        ("value_head_dim", layout.value_head_dim, 2 * layout.head_dim),
    ):
        if value != possible:
            raise ConfigError(f"{field}={value!r}: {target} has V1 attention; expected {field}={possible!r}")
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


def v1_own_tensors(layer: Differential, norm: RMSNorm) -> dict[str, Tensor]:
    """The lambdas, and `subln.weight`: the gain, or ones where there is none, which is the same function."""
    own = {name: getattr(layer, name).detach() for name in LAMBDA_VECTORS}
    gain = norm.weight
    width, like = norm.dim, layer.o_proj.weight
    own["subln.weight"] = torch.ones(width, dtype=like.dtype, device=like.device) if gain is None else gain.detach()
    return own

"""Differential attention of Motif-2.6B and grouped differential attention of Motif-2-12.7B.

The layouts are taken from ports that read the published weights: for the first vLLM's
(`vllm/model_executor/models/motif.py`, 0.10), for the second an MLX port ("MLX implementation of the Motif family"), with
which a llama.cpp port agrees in the order of heads. Motif's own modeling_motif.py could not be consulted.

Names below `model.layers.N.self_attn.`: {q,k,v,o}_proj.weight (with a bias if config.json has attention_bias or use_bias),
lambda_{q1,k1,q2,k2}, subln.weight. Heads pair with their neighbours and rotary embedding is half-split, both as ours, so no
row moves. In Motif-2-12.7B four signal heads are followed by the noise head that they share, a signal key by a noise key, and
the two D-wide values of a key/value head make our value of 2 D. lambda_init is 0.8 - 0.6 exp(-0.3 (layer_index - 1)) with
layer_index from 0: one layer off the paper's schedule, and -0.01 in the first layer. eps is config.json's attn_rms_norm_eps.

The package has no MLP like those of these models (PolyNorm), so a whole model does not convert. k_ratio, the number of signal
keys for each noise key, is 1 in the published configurations; other values are refused by their shapes.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..attention import DifferentialAttention, DifferentialOptions, GroupedDifferentialAttention
from ..attention.base import PROJECTIONS
from ..attention.differential import LAMBDA_VECTORS, Differential
from ..attention.head_norm import HEAD_NORM_EPS
from ..errors import ConfigError, ShapeError
from .attention_weights import (
    THE_OTHERS,
    Sizes,
    make_layer,
    quotient,
    refuse_other_than_v1,
    tensor_of,
    v1_layer,
    v1_own_tensors,
    v1_shapes,
    v1_sizes,
)
from .conversion import check_tensors, shapes_of


def motif_lambda_init(layer_index: int) -> float:
    """Return 0.8 - 0.6 exp(-0.3 (layer_index - 1)), layers counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * (layer_index - 1))


def load_motif_attention(
    state: Mapping[str, Tensor], *, layer_index: int, head_norm_eps: float = HEAD_NORM_EPS
) -> DifferentialAttention | GroupedDifferentialAttention:
    """Make a layer that computes the same as the attention of Motif-2.6B or Motif-2-12.7B with these tensors.

    The shapes tell the two apart: in the second, o_proj has more columns than q_proj has rows, namely the width of two heads
    for every signal head and none for a noise head.

    Args:
        state: Tensors under Motif's names, without the layer's prefix.
        layer_index: Place in the model, from 0.
        head_norm_eps: config.json's attn_rms_norm_eps.

    Raises:
        CheckpointError: A tensor is missing, or there is one too many.
        ShapeError: A shape contradicts the others.
    """
    arguments: dict[str, Any] = {
        "layer_index": layer_index,
        "head_norm_eps": head_norm_eps,
        "options": DifferentialOptions(lambda_init=motif_lambda_init(layer_index)),
    }
    is_grouped = tensor_of(state, "o_proj.weight").shape[-1] != tensor_of(state, "q_proj.weight").shape[0]
    sizes, noise = _grouped_sizes(state) if is_grouped else (v1_sizes(state), 0)
    shapes = v1_shapes(sizes, output="o_proj", biased=True, state=state, noise_heads=noise or sizes.num_heads)
    check_tensors(shapes_of(state), shapes, by=THE_OTHERS)
    ours = {name.replace("subln", "head_norm"): tensor for name, tensor in state.items()}
    if is_grouped:
        return make_layer(GroupedDifferentialAttention, sizes, ours, num_noise_heads=noise, **arguments)
    return v1_layer(ours, sizes, **arguments)


def motif_attention_state(layer: Differential) -> dict[str, Tensor]:
    """Return the tensors with which Motif's attention computes the same as a layer: Motif-2-12.7B's for a grouped layer.

    Raises:
        ConfigError: Motif's attention cannot express the layer, lambda_init included; the message names the field, its value
            and the expected one.
    """
    grouped = isinstance(layer, GroupedDifferentialAttention)
    norm = refuse_other_than_v1(
        layer,
        "Motif-2-12.7B" if grouped else "Motif-2.6B",
        eps=None,
        init=motif_lambda_init(layer.layer_index),
        shared_noise=True,
    )
    if layer.layout.cache_heads != layer.layout.num_key_value_heads:
        raise ConfigError(
            f"num_key_value_heads={layer.layout.num_key_value_heads}: Motif-2-12.7B has a noise key for every signal key; "
            f"expected a divisor of num_noise_heads={layer.layout.query_groups}"
        )
    state = {
        f"{name}.{kind}": tensor for name in PROJECTIONS for kind, tensor in getattr(layer, name).named_parameters()
    }
    return {name: tensor.detach() for name, tensor in (state | v1_own_tensors(layer, norm)).items()}


def _grouped_sizes(state: Mapping[str, Tensor]) -> tuple[Sizes, int]:
    """Return the sizes (their heads are signal heads) and the number of noise heads."""
    head_dim = tensor_of(state, LAMBDA_VECTORS[0]).shape[-1]
    queries = quotient(state, "q_proj.weight", head_dim, "the head_dim")
    columns = tensor_of(state, "o_proj.weight").shape[-1]
    signal, rest = divmod(columns, 2 * head_dim)
    noise = queries - signal
    if rest or not 0 < noise <= signal or signal % noise:
        raise ShapeError(
            f"o_proj.weight has {columns} columns, expected twice the head_dim = {2 * head_dim} for every signal head, and "
            f"signal heads a multiple of the noise heads, of {queries} heads by q_proj.weight"
        )
    groups = quotient(state, "k_proj.weight", 2 * head_dim, "twice the head_dim")
    if noise % groups:
        raise ShapeError(
            f"k_proj.weight has {2 * groups * head_dim} rows, {groups} groups of keys; expected a divisor of the {noise} "
            "noise heads"
        )
    width = tensor_of(state, "q_proj.weight").shape[-1]
    return Sizes(embed_dim=width, num_heads=signal, num_key_value_heads=groups, head_dim=head_dim), noise

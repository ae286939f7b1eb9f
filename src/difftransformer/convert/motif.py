"""Differential attention of Motif-2.6B and grouped differential attention of Motif-2-12.7B, by ports that read the published
weights: of the first vLLM's (`vllm/model_executor/models/motif.py`, 0.10), of the second an MLX one ("MLX implementation of the
Motif family", with which a llama.cpp one agrees in the order of heads). Their own modeling_motif.py could not be consulted.

Names below `model.layers.N.self_attn.`: {q,k,v,o}_proj.weight (with a bias where config.json has attention_bias or use_bias),
lambda_{q1,k1,q2,k2}, subln.weight. Heads pair with their neighbours and rotary embedding is half-split, both as ours, so no
row moves: in Motif-2-12.7B four signal heads are followed by the noise head that they share, a signal key by a noise key, and
the two D-wide values of a key/value head make our value of 2 D. lambda_init is 0.8 - 0.6 exp(-0.3 (layer_index - 1)) with
layer_index from 0: one layer off the paper's schedule, and -0.01 in the first layer. eps is config.json's attn_rms_norm_eps.

Neither model's MLP (PolyNorm) is anything that this package has, so a whole model does not convert. k_ratio, signal keys for
each noise key, is 1 in the published configurations; others are refused by their shapes.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..attention import DifferentialAttention, DifferentialOptions, GroupedDifferentialAttention
from ..attention.differential import HEAD_NORM_EPS, LAMBDA_VECTORS, Differential
from ..errors import ConfigError, ShapeError
from .layers import (
    PROJECTIONS,
    THE_OTHERS,
    filled,
    quotient,
    refuse_other_than_v1,
    tensor_of,
    v1_layer,
    v1_own_tensors,
    v1_shapes,
    v1_sizes,
)
from .plan import Shape, check_tensors


def motif_lambda_init(layer_index: int) -> float:
    """0.8 - 0.6 exp(-0.3 (layer_index - 1)), layers counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * (layer_index - 1))


def load_motif_attention(
    state: Mapping[str, Tensor], *, layer_index: int, head_norm_eps: float = HEAD_NORM_EPS, backend: str = "auto"
) -> DifferentialAttention | GroupedDifferentialAttention:
    """A layer that computes what the attention of Motif-2.6B or Motif-2-12.7B with these tensors does.

    Which of them is read off the shapes: the second's o_proj has more columns than q_proj has rows, two heads' width for every
    signal head and none for a noise head.

    Args:
        state: Tensors by their names, without the layer's prefix.
        layer_index: Place in the model, from 0.
        head_norm_eps: config.json's attn_rms_norm_eps.
        backend: The op's backend, or "auto".

    Raises:
        CheckpointError: a tensor is missing, or there are more.
        ShapeError: a shape contradicts the others.
    """
    options = DifferentialOptions(lambda_init=motif_lambda_init(layer_index))
    ours = {name: tensor for name, tensor in state.items() if name != "subln.weight"}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if tensor_of(state, "o_proj.weight").shape[-1] != tensor_of(state, "q_proj.weight").shape[0]:
        head_dim = tensor_of(state, LAMBDA_VECTORS[0]).shape[-1]
        signal, noise, groups = _grouped_heads(state, head_dim)
        check_tensors(found, _grouped_shapes(state, signal, noise, groups, head_dim), by=THE_OTHERS)
        ours["head_norm.weight"] = state["subln.weight"]
        with torch.device("meta"):
            layer = GroupedDifferentialAttention(
                state["q_proj.weight"].shape[-1],
                signal,
                num_noise_heads=noise,
                num_key_value_heads=groups,
                head_dim=head_dim,
                layer_index=layer_index,
                head_norm_eps=head_norm_eps,
                backend=backend,
                options=options,
            )
        return filled(layer, ours)
    sizes = v1_sizes(state)
    check_tensors(found, v1_shapes(sizes, output="o_proj", biased=True, state=state), by=THE_OTHERS)
    ours["head_norm.weight"] = state["subln.weight"]
    return v1_layer(ours, sizes, layer_index=layer_index, head_norm_eps=head_norm_eps, options=options, backend=backend)


def motif_attention_state(layer: Differential) -> dict[str, Tensor]:
    """The tensors with which Motif-2.6B's attention, or for a grouped layer Motif-2-12.7B's, computes what this layer does.

    Raises:
        ConfigError: their attention cannot express the layer, lambda_init included; the field, its value and the expected one
            are named.
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
    own = v1_own_tensors(layer, norm)
    return {
        name: tensor.detach() for name, tensor in (state | {name: own[name] for name in LAMBDA_VECTORS}).items()
    } | {"subln.weight": own["subln.weight"]}


def _grouped_heads(state: Mapping[str, Tensor], head_dim: int) -> tuple[int, int, int]:
    """Signal, noise and key/value heads."""
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
    return signal, noise, groups


def _grouped_shapes(
    state: Mapping[str, Tensor], signal: int, noise: int, groups: int, head_dim: int
) -> dict[str, Shape]:
    width = tensor_of(state, "q_proj.weight").shape[-1]
    rows = {"q_proj": (signal + noise) * head_dim, "k_proj": 2 * groups * head_dim, "v_proj": 2 * groups * head_dim}
    shapes: dict[str, Shape] = {f"{name}.weight": (count, width) for name, count in rows.items()}
    shapes["o_proj.weight"] = (width, 2 * signal * head_dim)
    shapes |= {
        f"{name}.bias": (count,) for name, count in (rows | {"o_proj": width}).items() if f"{name}.bias" in state
    }
    return shapes | dict.fromkeys(LAMBDA_VECTORS, (head_dim,)) | {"subln.weight": (2 * head_dim,)}

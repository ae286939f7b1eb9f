"""`DiffAttention` of timm, the attention of some of its vision transformers (timm/layers/diff_attention.py, 1.0.31).

Names: qkv.{weight,bias} (rows of q, then k, then v), proj.{weight,bias}, lambda_{q1,k1,q2,k2}, sub_norm.weight, and with
qk_norm {q,k}_norm.weight. Heads pair with their neighbours, as ours do, every head has keys of its own, the eps of sub_norm is
1e-5 and that of RmsNorm, timm's norm of queries and keys, 1e-6. Attention is not causal and has no rotary embedding: call the
layer with is_causal=False and without position_embeddings.
"""

from collections.abc import Mapping

from torch import Tensor

from ..attention import DifferentialAttention
from ..attention.base import QK_NORM_EPS, QK_NORMS
from ..attention.differential import LAMBDA_VECTORS, Differential
from ..attention.head_norm import HEAD_NORM_EPS
from ..errors import ConfigError
from .attention_weights import (
    Sizes,
    joined_projections,
    load_joined,
    quotient,
    refuse_other_than_full_width,
    refuse_other_than_v1,
    tensor_of,
    v1_own_tensors,
)

TARGET = "timm's DiffAttention"
# Tensors of options that our layer lacks -> the option, and what the layer has instead.
LACKING = {
    "lambda_a": "dual_lambda=True learns two exponents; a V1 layer learns the vectors lambda_q1, k1, q2 and k2",
    "norm.weight": "scale_norm=True normalises all heads together; a V1 layer normalises each",
    "q_norm.bias": "norm_layer=LayerNorm centres queries and keys; our norm of them is RMSNorm, timm's default",
}


def load_timm_attention(state: Mapping[str, Tensor], *, layer_index: int) -> DifferentialAttention:
    """Make a layer that computes the same as timm's DiffAttention with this state dict, if called with is_causal=False.

    Args:
        state: The module's tensors, biases and norms of queries and keys included if it has them.
        layer_index: timm's `depth`, from 0; lambda_init depends on it.

    Raises:
        ConfigError: The module has an option that our layer lacks.
        CheckpointError: A tensor is missing, or there is one too many.
        ShapeError: A shape contradicts the others.
    """
    for name in LACKING.keys() & state.keys():
        raise ConfigError(f"{name}: {LACKING[name]}; expected {TARGET} without this option")
    head_dim = tensor_of(state, LAMBDA_VECTORS[0]).shape[-1]
    heads = quotient(state, "proj.weight", 2 * head_dim, "twice the head_dim")
    sizes = Sizes(embed_dim=2 * head_dim * heads, num_heads=heads, num_key_value_heads=heads, head_dim=head_dim)
    norms = {f"{name}.weight": f"{name}.weight" for name in QK_NORMS if "q_norm.weight" in state}
    own = {"head_norm.weight": "sub_norm.weight", **{name: name for name in LAMBDA_VECTORS}, **norms}
    layer = {"layer_index": layer_index, "qk_norm": bool(norms)}
    return load_joined(state, sizes, joined="qkv", output="proj", own=own, **layer)


def timm_attention_state(layer: Differential) -> dict[str, Tensor]:
    """Return the state dict of timm's DiffAttention that computes the same as a layer called with is_causal=False.

    Its arguments are dim=embed_dim, num_heads, depth=layer_index, and qkv_bias, proj_bias and qk_norm as the layer has them.

    Raises:
        ConfigError: timm's module cannot express the layer; the message names the field, its value and the expected one.
    """
    norm = refuse_other_than_v1(layer, TARGET, eps=HEAD_NORM_EPS, qk_norm=True)
    refuse_other_than_full_width(layer, TARGET)
    heads, groups = layer.layout.num_heads, layer.layout.num_key_value_heads
    if groups != heads:
        raise ConfigError(f"num_key_value_heads={groups}: {TARGET} has a key for every head; expected {heads}")
    own = {name.replace("subln", "sub_norm"): tensor for name, tensor in v1_own_tensors(layer, norm).items()}
    for name in QK_NORMS:
        if (rms := getattr(layer, name)) is not None:
            if rms.eps != QK_NORM_EPS:
                raise ConfigError(f"qk_norm_eps={rms.eps}: {TARGET} has RmsNorm; expected qk_norm_eps={QK_NORM_EPS}")
            own[f"{name}.weight"] = rms.weight.detach()
    return joined_projections(layer, joined="qkv", output="proj", biased=False) | own

"""Differential attention of Phi-4-mini-flash-reasoning (its modeling_phi4flash.py; `phi4flash.py` of vLLM until 0.10;
`lit_gpt/diff_attn.py` of microsoft/ArchScale, where it was trained).

Names below `model.layers.N.attn.`: Wqkv.{weight,bias} (rows of q, then k, then v), out_proj.{weight,bias},
inner_cross_attn.lambda_{q1,k1,q2,k2}, inner_cross_attn.subln.weight. Heads pair with their neighbours, as ours do, and eps is
1e-5. There is no rotary embedding: call the layer without position_embeddings. If config.json gives the layer a sliding
window, pass it as `window`. The package lacks the model's other layers (Mamba, gated memory), so a whole model does not
convert.
"""

from collections.abc import Mapping

from torch import Tensor

from ..attention import DifferentialAttention
from ..attention.differential import LAMBDA_VECTORS, Differential
from ..attention.head_norm import HEAD_NORM_EPS
from ..errors import ShapeError
from .attention_weights import (
    Sizes,
    joined_projections,
    load_joined,
    refuse_other_than_full_width,
    refuse_other_than_v1,
    tensor_of,
    v1_own_tensors,
)

INNER = "inner_cross_attn."


def load_phi4flash_attention(state: Mapping[str, Tensor], *, layer_index: int) -> DifferentialAttention:
    """Make a layer that computes the same as Phi-4-mini-flash's attention with these tensors, biases included.

    Args:
        state: Tensors under that model's names, without the layer's prefix.
        layer_index: Place in the whole model, from 0; other kinds of layers count too.

    Raises:
        CheckpointError: A tensor is missing, or there is one too many.
        ShapeError: A shape contradicts the others, or the layer has no keys of its own.
    """
    own = {"head_norm.weight": f"{INNER}subln.weight", **{name: INNER + name for name in LAMBDA_VECTORS}}
    return load_joined(state, _sizes(state), joined="Wqkv", output="out_proj", own=own, layer_index=layer_index)


def phi4flash_attention_state(layer: Differential) -> dict[str, Tensor]:
    """Return the tensors with which Phi-4-mini-flash's attention computes the same as a layer without rotary embedding.

    Its projections always have a bias, which is zero if the layer has none.

    Raises:
        ConfigError: That attention cannot express the layer; the message names the field, its value and the expected one.
    """
    norm = refuse_other_than_v1(layer, "Phi-4-mini-flash", eps=HEAD_NORM_EPS)
    refuse_other_than_full_width(layer, "Phi-4-mini-flash")
    own = {INNER + name: tensor for name, tensor in v1_own_tensors(layer, norm).items()}
    return joined_projections(layer, joined="Wqkv", output="out_proj", biased=True) | own


def _sizes(state: Mapping[str, Tensor]) -> Sizes:
    head_dim = tensor_of(state, INNER + LAMBDA_VECTORS[0]).shape[-1]
    rows, embed_dim = tensor_of(state, "Wqkv.weight").shape
    queries = tensor_of(state, "out_proj.weight").shape[-1]
    if queries % (2 * head_dim):
        raise ShapeError(
            f"out_proj.weight has {queries} columns, expected a multiple of twice the head_dim = {2 * head_dim}"
        )
    if rows == queries:
        raise ShapeError(
            f"Wqkv.weight has {rows} rows, those of the queries alone: this layer reads another layer's keys and values; "
            f"expected {queries} rows and those of k and v"
        )
    if rows < queries or (rows - queries) % (4 * head_dim):
        raise ShapeError(
            f"Wqkv.weight has {rows} rows, expected {queries} of q and a multiple of {4 * head_dim} of k and v together"
        )
    return Sizes(
        embed_dim=embed_dim,
        num_heads=queries // (2 * head_dim),
        num_key_value_heads=(rows - queries) // (4 * head_dim),
        head_dim=head_dim,
    )

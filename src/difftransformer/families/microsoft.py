"""Attention modules of microsoft/unilm, folder Diff-Transformer: V1 (`multihead_diffattn.py`, `multihead_flashdiff_1.py`,
`multihead_flashdiff_2.py`) and V2 (`Diff-Transformer-V2/multihead_flashdiffv2.py`).

Microsoft released modules but no checkpoint format, so these functions convert state dicts. Heads pair with their neighbours
as ours do. Microsoft's rotary embedding is interleaved and ours half-split, so the rows of q_proj and k_proj are reordered.

V1: q_proj, k_proj, v_proj, out_proj, lambda_{q1,k1,q2,k2}, subln.weight; eps 1e-5; head_dim = embed_dim / (2 num_heads).
    Modules from before 25 October 2024 have no subln.weight; they are read as head_norm="plain".
    With grouped keys, the modules differ. In `multihead_flashdiff_1.py` and `multihead_flashdiff_2.py` each map of a head has
    its own key, as in our layers. `multihead_diffattn.py` repeats the keys before it pairs them, so that both maps mostly
    read one key; `load_microsoft_attention(..., module="naive")` reads its weights.
V2: q_proj (2 queries a head), k_proj, v_proj, o_proj, lambda_proj.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..attention import DifferentialAttention, DifferentialAttentionV2
from ..attention.base import PROJECTIONS
from ..attention.differential import LAMBDA_VECTORS, Differential
from ..attention.head_norm import HEAD_NORM_EPS
from ..errors import CheckpointError, ConfigError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from .attention_weights import (
    THE_OTHERS,
    Sizes,
    half_split,
    interleaved,
    make_layer,
    quotient,
    refuse_fields,
    refuse_other_than_full_width,
    refuse_other_than_v1,
    tensor_of,
    v1_layer,
    v1_own_tensors,
    v1_shapes,
    v1_sizes,
)
from .conversion import EMBEDDING, OUTPUT, Shape, check_tensors, refuse_tied_multiplier, shapes_of

TARGET = "Microsoft's module"


def microsoft_attention_state(layer: Differential) -> dict[str, Tensor]:
    """Return the state dict of a Microsoft module that computes the same as a layer; with grouped keys, of a flash module.

    A `sliding_window` belongs to the model and not to its layers, so it is not refused here: Microsoft's modules have none.

    Args:
        layer: A V1 or a V2 layer.

    Returns:
        Tensors under Microsoft's names: V2's if lambda is projected, else V1's.

    Raises:
        ConfigError: Neither module can express the layer; the message names the field, its value and the expected one.
    """
    if layer.options.lambda_form != "token":
        refuse_other_than_full_width(layer, TARGET)
    return _state(layer)


def load_microsoft_attention(
    state: Mapping[str, Tensor],
    *,
    layer_index: int,
    module: Literal["flash", "naive"] = "flash",
) -> DifferentialAttention | DifferentialAttentionV2:
    """Make a layer that computes the same as Microsoft's module with this state dict. Sizes follow from the shapes.

    Args:
        state: The module's tensors; with `lambda_proj.weight` it is a V2 module.
        layer_index: Microsoft's `depth`, from 0; V1's lambda_init depends on it.
        module: The V1 module that the weights were trained in, which matters if keys are grouped: "flash"
            (`multihead_flashdiff_1.py` or `_2.py`), or "naive" (`multihead_diffattn.py`), for which the layer gets a copy of
            keys and values for each head.

    Raises:
        ConfigError: The module is unknown, or a V2 module is called naive.
        CheckpointError: A tensor is missing, or there is one too many.
        ShapeError: A shape contradicts the others.
    """
    if module not in ("flash", "naive") or (module == "naive" and "lambda_proj.weight" in state):
        raise ConfigError(f"module={module!r}: give 'flash', or 'naive' for V1 weights from multihead_diffattn.py")
    if "lambda_proj.weight" in state:
        return _load_v2(state, layer_index)
    sizes = v1_sizes(state)
    shapes = v1_shapes(sizes, output="out_proj", biased=False, state=state)
    check_tensors(shapes_of(state), shapes, optional=("subln.weight",), by=THE_OTHERS)
    ours = {name: state[name] for name in ("v_proj.weight", *LAMBDA_VECTORS)}
    ours |= _half_split_projections(state, sizes.head_dim) | {"o_proj.weight": state["out_proj.weight"]}
    if "subln.weight" in state:
        ours["head_norm.weight"] = state["subln.weight"]
    if module == "naive":
        shared = sizes.num_heads // sizes.num_key_value_heads
        for name, width in (("k_proj.weight", sizes.head_dim), ("v_proj.weight", 2 * sizes.head_dim)):
            ours[name] = ours[name].unflatten(0, (-1, width)).repeat_interleave(shared, 0).flatten(0, 1)
        sizes = replace(sizes, num_key_value_heads=sizes.num_heads)
    return v1_layer(ours, sizes, layer_index=layer_index, head_norm_eps=HEAD_NORM_EPS)


def microsoft_state(model: DiffTransformerForCausalLM, *, untie: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a whole model with Microsoft's attention tensors instead of ours; the others keep their names.

    An embedding multiplier is folded into the embedding.

    Args:
        model: The model.
        untie: Whether a tied output layer may become a matrix of its own, as a multiplier makes it.

    Raises:
        ConfigError: Microsoft's module cannot express the model, or embeddings are tied and multiplied and untie is False.
    """
    state, factor = _whole_state(model, microsoft_attention_state), model.config.embedding_multiplier
    if not untie:
        refuse_tied_multiplier(model.config, "Microsoft's layout")
    if factor != 1:
        state[EMBEDDING] = state[EMBEDDING] * factor
    return state


def load_microsoft_state(state: Mapping[str, Tensor], config: DiffTransformerConfig) -> DiffTransformerForCausalLM:
    """Make a model from tensors named as in `microsoft_state`.

    Args:
        state: All tensors; lm_head.weight may be absent if embeddings are tied.
        config: The configuration; its attention fields must describe the tensors, which have no embedding multiplier.

    Returns:
        The model in eval mode, in the dtype of the embedding.

    Raises:
        ConfigError: Microsoft's module cannot express the configuration, or it has an embedding multiplier.
        CheckpointError: A tensor is missing, there is one too many, or embeddings are tied and lm_head.weight differs.
        ShapeError: A shape contradicts the configuration.
    """
    if config.embedding_multiplier != 1:
        raise ConfigError(
            f"embedding_multiplier={config.embedding_multiplier:g}: tensors of Microsoft's layout have none; expected "
            "embedding_multiplier=1.0"
        )
    with torch.device("meta"):
        expected = shapes_of(_whole_state(DiffTransformerForCausalLM(config), _state))
    if config.head_norm == "plain":  # a plain norm has no gain
        expected = {name: shape for name, shape in expected.items() if not name.endswith(".subln.weight")}
    check_tensors(
        shapes_of(state),
        expected,
        optional=(OUTPUT,) if config.tie_word_embeddings else (),
        by="the configuration",
    )
    if config.tie_word_embeddings and OUTPUT in state and not torch.equal(state[OUTPUT], state[EMBEDDING]):
        raise CheckpointError(
            f"{OUTPUT} differs from {EMBEDDING}, though the configuration has tie_word_embeddings=True; expected equal "
            "tensors, or tie_word_embeddings=False"
        )
    ours = {name: tensor for name, tensor in state.items() if ".self_attn." not in name}
    for index in range(config.num_hidden_layers):
        at = f"model.layers.{index}.self_attn."
        attention = {name.removeprefix(at): tensor for name, tensor in state.items() if name.startswith(at)}
        layer = load_microsoft_attention(attention, layer_index=index)
        ours |= {at + name: tensor for name, tensor in layer.state_dict().items()}
    model = DiffTransformerForCausalLM(config).to(state[EMBEDDING].dtype)
    model.load_state_dict(ours, strict=not config.tie_word_embeddings)
    return model.eval()


def _whole_state(
    model: DiffTransformerForCausalLM, attention_state: Callable[[Differential], dict[str, Tensor]]
) -> dict[str, Tensor]:
    if (window := model.config.sliding_window) is not None:
        raise ConfigError(f"sliding_window={window}: {TARGET} sees all positions; expected None")
    state = {name: tensor for name, tensor in model.state_dict().items() if ".self_attn." not in name}
    for index, layer in enumerate(model.model.layers):
        if not isinstance(layer.self_attn, Differential):
            raise ConfigError(
                f"attention_type={model.config.attention_type!r}: {TARGET} is differential; expected 'diff' or 'diff_v2'"
            )
        attention = attention_state(layer.self_attn)
        state |= {f"model.layers.{index}.self_attn.{name}": tensor for name, tensor in attention.items()}
    return state


def _state(layer: Differential) -> dict[str, Tensor]:
    """Return Microsoft's tensors for a layer of any head_dim; only their V1 class fixes head_dim, not a state dict."""
    for name in PROJECTIONS:
        if getattr(layer, name).bias is not None:
            raise ConfigError(f"{name}.bias: {TARGET} has projections without bias; expected none")
    if layer.options.lambda_form == "token":
        possible = {
            "head_norm": "none",
            "head_scale": None,
            "shared_key": True,
            "value_head_dim": layer.layout.head_dim,
            "heads_per_second_map": 1,
        }
        refuse_fields(layer, f"{TARGET} with a projected lambda is V2", possible)
        output, own = "o_proj", {"lambda_proj.weight": layer.lambda_proj.weight.detach()}
    else:
        norm = refuse_other_than_v1(layer, TARGET, eps=HEAD_NORM_EPS)
        output, own = "out_proj", v1_own_tensors(layer, norm)
    head_dim = layer.layout.head_dim
    return {
        "q_proj.weight": interleaved(layer.q_proj.weight.detach(), head_dim),
        "k_proj.weight": interleaved(layer.k_proj.weight.detach(), head_dim),
        "v_proj.weight": layer.v_proj.weight.detach(),
        f"{output}.weight": layer.o_proj.weight.detach(),
        **own,
    }


def _load_v2(state: Mapping[str, Tensor], layer_index: int) -> DifferentialAttentionV2:
    heads = tensor_of(state, "lambda_proj.weight").shape[0]
    head_dim = quotient(state, "q_proj.weight", 2 * heads, "two queries a head of lambda_proj")
    sizes = Sizes(
        embed_dim=tensor_of(state, "q_proj.weight").shape[-1],
        num_heads=heads,
        num_key_value_heads=quotient(state, "k_proj.weight", head_dim, "the head_dim"),
        head_dim=head_dim,
    )
    keys = (sizes.num_key_value_heads * head_dim, sizes.embed_dim)
    shapes: dict[str, Shape] = {
        "q_proj.weight": (2 * heads * head_dim, sizes.embed_dim),
        "k_proj.weight": keys,
        "v_proj.weight": keys,
        "o_proj.weight": (sizes.embed_dim, heads * head_dim),
        "lambda_proj.weight": (heads, sizes.embed_dim),
    }
    check_tensors(shapes_of(state), shapes, by=THE_OTHERS)
    ours = dict(state) | _half_split_projections(state, head_dim)
    return make_layer(DifferentialAttentionV2, sizes, ours, layer_index=layer_index)


def _half_split_projections(state: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    return {name: half_split(state[name], head_dim) for name in ("q_proj.weight", "k_proj.weight")}

"""Keywords of other attention layers, and our keywords for them."""

import inspect
from collections.abc import Iterable

from ..errors import ConfigError

_DROPOUT = "a map that a kernel never stores has no dropout; leave it out"
_BIAS = "projections have no bias; leave it out"
_CONTEXT_WIDTH = "a context has the width of the hidden states; project it before"
_CONTEXT = "pass context, from which keys and values are projected"
_ROTARY = "{}position_embeddings=rotary_tables(positions, inverse_frequencies), of difftransformer.ops, turns queries and keys"
_OPTION = "pass options=DifferentialOptions({}=...)"


def _each(words: str, *names: str) -> dict[str, str]:
    return {name: words.format(name) for name in names}


CONSTRUCTOR = (
    _each("it is embed_dim here", "dim", "d_model", "embedding_dim", "hidden_dim", "hidden_size", "model_dim", "n_embd")
    | _each(
        "it is num_heads here, of which DIFF V1 has half the Transformer's",
        "heads",
        "n_head",
        "n_heads",
        "nhead",
        "num_attention_heads",
    )
    | _each("it is num_key_value_heads here", "kv_heads", "n_kv_head", "n_kv_heads", "num_kv_heads", "num_query_groups")
    | _each("it is head_dim here", "d_head", "dim_head", "head_size", "head_width")
    | _each("it is layer_index here, counted from 0", "depth", "layer_id", "layer_idx", "layer_number")
    | _each("it is backend here", "attn_backend", "attn_implementation", "use_flash_attn")
    | _each(_DROPOUT, "attention_dropout", "attn_drop", "attn_dropout", "dropout", "dropout_p")
    | _each(_BIAS, "add_bias_kv", "attention_bias", "bias", "out_bias", "proj_bias", "qkv_bias")
    | _each(_CONTEXT_WIDTH, "context_dim", "cross_attention_dim", "kdim", "vdim")
    | _each("no key of zeros is added; leave it out", "add_zero_attn")
    | _each("hidden states are (batch, length, width); leave it out", "batch_first")
    | _each("pass is_causal to forward, which is causal unless it is False", "causal", "is_causal")
    | _each("pass window to forward", "sliding_window", "window", "window_size")
    | _each("logits are divided by the root of head_dim; leave it out", "scale", "scaling", "softmax_scale")
    | _each("any length is taken; leave it out", "block_size", "max_position_embeddings", "max_seq_len", "seq_len")
    | _each("call .to(...) on the layer, or make it under torch.device", "device", "dtype")
    | _each("it is qk_norm here", "qk_layernorm", "use_qk_norm")
    | _each(
        _ROTARY.format("leave it out; in forward, "),
        *("pos_emb", "rope", "rope_base", "rope_theta", "rotary", "rotary_emb", "rotary_embedding", "use_rope"),
    )
    | _each(_OPTION, "head_norm", "head_scale", "lambda_form", "lambda_init", "lambda_value", "shared_key")
)
FORWARD = (
    _each("pass attn_mask=~key_padding_mask[:, None, None, :] (True = may attend)", "key_padding_mask")
    | _each("pass attn_mask (True = may attend), such as mask[:, None, None, :] of tokens", "attention_mask", "mask")
    | _each("pass need_map=True for the map of every head", "need_weights", "output_attentions")
    | _each("pass need_map=True and average the heads' maps", "average_attn_weights")
    | _each("pass the hidden states by position", "hidden_states", "inputs", "query", "x")
    | _each(_CONTEXT, "encoder_hidden_states", "key", "memory", "value")
    | _each("pass is_causal", "causal")
    | _each("pass window", "sliding_window", "window_size")
    | _each("pass cache", "kv_cache", "layer_past", "past_key_value", "past_key_values")
    | _each(_DROPOUT, "dropout", "dropout_p")
    | _each(_ROTARY.format(""), "freqs_cis", "position_ids", "rel_pos", "rope", "rotary", "rotary_emb")
)


def check_arguments(kind: type, base: type, given: Iterable[str]) -> None:
    """Refuse keyword arguments that no constructor of a layer's class takes.

    Args:
        kind: The class.
        base: The base of all layers. Its constructor counts where no class below it has one.
        given: Names of the arguments.

    Raises:
        ConfigError: One is unknown; the message says what to write instead.
    """
    below = [each for each in kind.__mro__ if each not in base.__mro__ and "__init__" in vars(each)]
    taken = {name for each in below or [base] for name in _named(vars(each)["__init__"])}
    if heads := getattr(
        kind, "heads", None
    ):  # which gets those that are no arguments of a differential layer's constructor
        taken |= _named(heads, keyword_only=True)
    for name in given:
        if name not in taken:
            ours = CONSTRUCTOR.get(name, f"choose among {', '.join(sorted(taken))}")
            raise ConfigError(f"{name} is not an argument of {kind.__name__}: {ours}")


def check_keywords(kind: type, taken: Iterable[str], given: Iterable[str]) -> None:
    """Refuse keywords of a layer's forward that are not among those `taken`, as `check_arguments` does."""
    for name in given:
        if name not in taken:
            ours = FORWARD.get(name, f"choose among {', '.join(taken)} and need_map")
            raise ConfigError(f"{name} is not a keyword of {kind.__name__}: {ours}")


def _named(function: object, keyword_only: bool = False) -> set[str]:
    kinds = {inspect.Parameter.KEYWORD_ONLY} | (set() if keyword_only else {inspect.Parameter.POSITIONAL_OR_KEYWORD})
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {parameter.name for parameter in parameters if parameter.kind in kinds} - {"self"}

"""Parameters, FLOPs and bytes of a model by closed formula, without building it."""

from dataclasses import dataclass

from ..errors import ConfigError
from .config import DiffTransformerConfig

BACKWARD_AND_FORWARD = 3  # a backward pass does twice the forward's multiply-adds


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sizes of a model.

    Attributes:
        parameters: Number of weights; a tied embedding counts once.
        embedding_parameters: Number of weights of the input embedding.
        attention_parameters: Number of weights of all attention layers.
        forward_flops_per_token: FLOPs of one token's forward pass at `context_tokens`; a multiply-add is two.
        train_flops_per_token: FLOPs of forward and backward.
        kv_bytes_per_token: Bytes of one token in the cache of all layers.
        context_tokens: Context that the FLOPs are for.
    """

    parameters: int
    embedding_parameters: int
    attention_parameters: int
    forward_flops_per_token: int
    train_flops_per_token: int
    kv_bytes_per_token: int
    context_tokens: int


def count(config: DiffTransformerConfig, *, context_tokens: int | None = None, cache_itemsize: int = 2) -> Counts:
    """Count the parameters, FLOPs and cache bytes of a model.

    Only matrix products are counted: norms, rotary embedding, softmax and lambda take less than a percent.

    Args:
        config: The model's configuration.
        context_tokens: Length at which attention's FLOPs are counted; None means max_position_embeddings.
        cache_itemsize: Bytes of a cached number (2 for bf16).
    """
    context = context_tokens or config.max_position_embeddings
    layout = config.head_layout()
    layers, width = config.num_hidden_layers, config.hidden_size
    projections = layout.projection_parameters(width)
    mlp = 3 * width * config.intermediate_size
    embedding = config.vocab_size * width
    attention = layers * config.attention.parameters_of(config)
    parameters = attention + layers * (mlp + 2 * width) + width
    parameters += embedding if config.tie_word_embeddings else 2 * embedding
    keys = mean_keys(context, config.sliding_window) if config.is_causal else context
    products = 2 * (projections + mlp) + config.attention.own_flops_per_token(config)
    forward = layers * (products + keys * layout.map_flops_per_pair()) + 2 * embedding
    return Counts(
        parameters=parameters,
        embedding_parameters=embedding,
        attention_parameters=attention,
        forward_flops_per_token=round(forward),
        train_flops_per_token=round(BACKWARD_AND_FORWARD * forward),
        kv_bytes_per_token=layers * layout.cached_values_per_token() * cache_itemsize,
        context_tokens=context,
    )


def matching_width(config: DiffTransformerConfig, parameters: int) -> int:
    """Return the intermediate_size with which a model has as many parameters as another, to the nearest.

    One more is 3 * hidden_size weights in every layer, so the numbers differ by at most half of that.

    Args:
        config: The model's configuration; its intermediate_size does not matter.
        parameters: Number of parameters to match, such as `count(config.twin()).parameters`.

    Raises:
        ConfigError: the model has more parameters even without an MLP.
    """
    each = 3 * config.hidden_size * config.num_hidden_layers
    without_mlp = count(config).parameters - each * config.intermediate_size
    width = round((parameters - without_mlp) / each)
    if width < 1:
        raise ConfigError(
            f"attention_type={config.attention_type!r} has {without_mlp:,} parameters without its MLP, and {parameters:,} are "
            "to be matched; use fewer heads"
        )
    return width


def mean_keys(context_tokens: int, window: int | None) -> float:
    """Return the mean over a full context of the keys that a causal query attends to, min(t + 1, window) at position t."""
    window = min(context_tokens, window or context_tokens)
    return (window * (window + 1) / 2 + (context_tokens - window) * window) / context_tokens


def weights_and_kv_bytes(counts: Counts, length_tokens: int, *, batch: int = 1, itemsize: int = 2) -> int:
    """Return the bytes of the weights and of a cache of `length_tokens` for each of `batch` sequences."""
    return counts.parameters * itemsize + batch * length_tokens * counts.kv_bytes_per_token

"""Small models whose every weight matters: no gain is 1, no lambda is near its start, and logits are of order one."""

import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tests.support.independent_model import BASES, Shape

VOCABULARY = 61
BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initialization": "normal", "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def tiny_config(**fields):
    return DiffTransformerConfig(**BASE | fields)


def tiny(seed=0, implementation=None, **fields):
    """A model in eval mode with drawn weights."""
    config = tiny_config(**fields)
    if implementation is not None:
        config._attn_implementation = implementation
    torch.manual_seed(seed)
    return scramble(DiffTransformerForCausalLM(config), seed).eval()


@torch.no_grad()
def scramble(model, seed=0):
    """Draw all weights anew, sharper than an initialisation would."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        if "norm" in name:
            parameter.copy_(1 + 0.2 * noise)
        elif "lambda" in name:
            parameter.copy_(0.35 * noise)
        elif "embed" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
    return model


def shape_of(config):
    """The configuration as the independent model wants it, by its own arithmetic."""
    kind = BASES.get(config.attention_type, config.attention_type)
    pairs = 2 if kind == "diff" else 1
    heads, groups = config.num_attention_heads // pairs, config.num_key_value_heads // pairs
    value_dim = pairs * config.head_dim
    noise = 0
    if kind == "grouped_diff":
        noise = config.num_noise_heads or heads // (4 if heads % 5 else 5)
        heads -= noise
        groups = groups - noise if groups > 2 * noise else groups // 2
        value_dim = 2 * config.head_dim
    if kind == "grouped_diff_v2":
        noise = config.num_noise_heads or heads // (4 if heads % 5 else 5)
        heads -= noise
        groups = max(g for g in range(1, noise + 1) if noise % g == 0 and groups % g == 0)
    extended = ()
    if kind == "dex":
        extended = tuple(map(tuple, config.dex_heads or [range(heads)] * config.num_hidden_layers))
    elif kind != "softmax":
        heads = config.num_differential_heads or heads
        groups = config.num_differential_key_value_heads or groups
        value_dim = config.value_head_dim or value_dim
    theta, eps = config.rope_parameters["rope_theta"], (config.rms_norm_eps, config.head_norm_eps)
    widths = (config.attention_type, config.num_hidden_layers, heads, groups, config.head_dim, value_dim)
    return Shape(*widths, *eps, theta, noise, extended, config.embedding_multiplier)


def tokens(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))

"""Small models of every kind, with weights that are not those of a fresh model."""

import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM

VOCABULARY = 61
SHAPES = {
    "diff": {"attention_type": "diff"},
    "diff-gqa": {"attention_type": "diff", "num_attention_heads": 8, "num_key_value_heads": 4},
    "diff-odd": {
        "attention_type": "diff",
        "num_attention_heads": 3,
        "head_dim": 16,
        "num_differential_heads": 3,
        "num_differential_key_value_heads": 1,
        "value_head_dim": 16,
        "tie_word_embeddings": False,
    },
    "softmax": {"attention_type": "softmax"},
    "softmax-gqa": {"attention_type": "softmax", "num_attention_heads": 8, "num_key_value_heads": 2},
}


def make_config(shape, **fields):
    """Configuration of one of SHAPES."""
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    return DiffTransformerConfig(**{**base, **SHAPES[shape], **fields})


def make_model(shape, seed=0, **fields):
    """A model whose gains and lambdas differ from their initial values, in eval mode."""
    torch.manual_seed(seed)
    model = DiffTransformerForCausalLM(make_config(shape, **fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(4.0)
    return model

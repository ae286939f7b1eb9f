"""The layers alone, as they are dropped into another model."""

import pytest
import torch
from torch import nn

from difftransformer.attention import VARIANTS, DifferentialAttention, SoftmaxAttention, variant
from difftransformer.errors import ConfigError, ShapeError
from difftransformer.ops import inverse_frequencies, rotary_tables
from tests.support import fresh


def rotation(length, head_dim, start=0):
    return rotary_tables(torch.arange(start, start + length)[None], inverse_frequencies(head_dim))


class ListCache:
    """The smallest object that is a cache."""

    def __init__(self):
        self.keys, self.values = [], []

    def update(self, key_states, value_states, layer_idx):
        self.keys.append(key_states)
        self.values.append(value_states)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


def test_the_twin_is_torchs_attention():
    torch.manual_seed(0)
    layer = SoftmaxAttention(32, 4)
    theirs = nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
        theirs.out_proj.weight.copy_(layer.o_proj.weight)
    x, context = torch.randn(2, 7, 32), torch.randn(2, 9, 32)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert torch.allclose(layer(x)[0], theirs(x, x, x, attn_mask=mask)[0], atol=1e-5)
    found, weights = layer(x, context=context, is_causal=False, need_map=True)
    expected, their_weights = theirs(x, context, context, average_attn_weights=False)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(weights, their_weights, atol=1e-6)


def test_differential_cross_attention_equals_the_equations():
    torch.manual_seed(0)
    layer = DifferentialAttention(24, 2, head_dim=6, num_key_value_heads=1, layer_index=3)
    x, context = torch.randn(2, 5, 24), torch.randn(2, 8, 24)
    found, weights = layer(x, context=context, is_causal=False, need_map=True)
    q, k, v = layer.q_proj(x), layer.k_proj(context), layer.v_proj(context)
    lam = (
        torch.exp(layer.lambda_q1 @ layer.lambda_k1) - torch.exp(layer.lambda_q2 @ layer.lambda_k2) + layer.lambda_init
    )
    heads = []
    for h in range(2):
        first, second = (
            torch.softmax(q[..., (2 * h + m) * 6 : (2 * h + m + 1) * 6] @ k[..., m * 6 : (m + 1) * 6].mT / 6**0.5, -1)
            for m in range(2)
        )
        assert torch.allclose(weights[:, h], first - lam * second, atol=1e-6)
        head = (first - lam * second) @ v
        head = head / torch.sqrt((head**2).mean(-1, keepdim=True) + 1e-5)
        heads.append((1 - layer.lambda_init) * head)
    assert torch.allclose(found, layer.o_proj(torch.cat(heads, -1)), atol=1e-5)


@pytest.mark.parametrize("cls", list(VARIANTS.values()))
def test_any_cache_and_rotation(cls):
    layer = cls(32, 4, head_dim=8)
    x = torch.randn(1, 9, 32)
    whole, _ = layer(x, position_embeddings=rotation(9, 8))
    cache = ListCache()
    parts = [
        layer(x[:, a:b], position_embeddings=rotation(b - a, 8, a), cache=cache)[0] for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    unrotated, _ = layer(x)
    assert not torch.allclose(unrotated, whole, atol=1e-3)


def test_gradients_reach_every_parameter():
    layer = DifferentialAttention(32, 2)
    layer(torch.randn(2, 6, 32))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())


def test_the_layer_needs_torch_alone():
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['tokenizers'] = None; import torch;"
        "from difftransformer.attention import DifferentialAttention;"
        "print(DifferentialAttention(16, 2)(torch.randn(1, 3, 16))[0].shape)"
    )
    done = fresh.run(code)
    assert done.stdout.strip() == "torch.Size([1, 3, 16])", done.stderr[-800:]


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="counted from 0"):
        DifferentialAttention(16, 2, layer_index=-1)
    with pytest.raises(ConfigError, match="not a multiple of num_key_value_heads"):
        DifferentialAttention(16, 4, num_key_value_heads=3)
    with pytest.raises(ConfigError, match="choose one of softmax, diff"):
        variant("diff3")
    layer = DifferentialAttention(16, 2)
    with pytest.raises(ShapeError, match="expected \\(batch, length, 16\\)"):
        layer(torch.randn(1, 3, 8))
    with pytest.raises(ShapeError, match="context has shape"):
        layer(torch.randn(1, 3, 16), context=torch.randn(1, 3, 8))
    layer.k_proj = nn.Linear(16, 4, bias=False)  # what tensor parallelism leaves of one head in four processes
    with pytest.raises(ShapeError, match="4 of keys, not whole heads of 8 and 8"):
        layer(torch.randn(1, 3, 16))

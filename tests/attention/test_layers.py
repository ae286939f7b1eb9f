"""The layers alone, with torch and nothing else: rotation, caches of one's own, torch's attention, refusals."""

import math
import re

import pytest
import torch
from torch import nn

from difftransformer.attention import (
    VARIANTS,
    DifferentialAttention,
    GroupedDifferentialAttention,
    HeadLayout,
    SoftmaxAttention,
    variant,
)
from difftransformer.errors import ConfigError, ShapeError
from difftransformer.ops.rotary import inverse_frequencies, rotary_tables
from tests.support.layers import VECTORS, drawn, states


def rotation(length, head_dim, start=0):
    return rotary_tables(torch.arange(start, start + length)[None], inverse_frequencies(head_dim))


class ListCache:
    """The smallest object that is a cache."""

    def __init__(self):
        self.keys, self.values, self.layers = [], [], []

    def update(self, key_states, value_states, layer_idx):
        self.keys.append(key_states)
        self.values.append(value_states)
        self.layers.append(layer_idx)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


@pytest.mark.parametrize("cls", list(VARIANTS.values()))
@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32)])
def test_nothing_to_attend(cls, shape):
    out, _ = cls(32, 4, head_dim=8)(torch.zeros(shape))
    assert out.shape == shape


@pytest.mark.parametrize("cls", list(VARIANTS.values()))
def test_any_cache_and_rotation(cls):
    layer = cls(32, 4, head_dim=8, layer_index=3)
    x = torch.randn(1, 9, 32)
    whole, _ = layer(x, position_embeddings=rotation(9, 8))
    cache = ListCache()
    parts = [
        layer(x[:, a:b], position_embeddings=rotation(b - a, 8, a), cache=cache)[0] for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    assert cache.layers == [3, 3, 3]
    unrotated, _ = layer(x)
    assert not torch.allclose(unrotated, whole, atol=1e-3)


@pytest.mark.parametrize(
    "tables", [rotation(8, 8), rotation(1, 8), rotation(9, 16), rotation(9, 8)[:1] + rotation(9, 6)[1:]],
    ids=["length", "one row", "width of two maps", "unequal"],
)  # fmt: skip
def test_rotary_tables_of_another_size_are_refused(tables):
    layer = DifferentialAttention(32, 2)
    shapes = " and ".join(str(tuple(table.shape)) for table in tables)
    with pytest.raises(ShapeError, match=re.escape(f"{shapes}, expected (9, 4) or (2 or 1, 9, 4) each")):
        layer(torch.randn(2, 9, 32), position_embeddings=tables)


class TestDifferential:
    def test_rotation_of_a_context(self):
        """Keys turn by their own positions: a context that is the hidden states with their table is self-attention."""
        layer = drawn(DifferentialAttention(32, 2))
        hidden = states(1, 7, 32)
        table = rotary_tables(torch.arange(7)[None], inverse_frequencies(8))
        plain, _ = layer(hidden, position_embeddings=table, is_causal=False)
        crossed, _ = layer(
            hidden, context=hidden, position_embeddings=table, context_position_embeddings=table, is_causal=False
        )
        unrotated, _ = layer(hidden, context=hidden, position_embeddings=table, is_causal=False)
        assert torch.allclose(plain, crossed, rtol=0, atol=1e-12)
        assert not torch.allclose(plain, unrotated, atol=1e-3)

    def test_lambdas_are_never_narrowed(self):
        narrow = torch.bfloat16
        layer = DifferentialAttention(32, 2).to(narrow)
        assert all(getattr(layer, name).dtype == torch.float32 for name in VECTORS)
        assert layer.q_proj.weight.dtype == layer.head_norm.weight.dtype == narrow
        output, _ = layer(torch.randn(1, 5, 32, dtype=narrow))
        assert output.dtype == narrow
        output.float().sum().backward()
        assert all(getattr(layer, name).grad.dtype == torch.float32 for name in VECTORS)

    def test_lambda_can_leave_the_unit_interval(self):
        layer = DifferentialAttention(32, 2)
        with torch.no_grad():
            layer.lambda_q1.fill_(0.0)
            layer.lambda_q2.fill_(0.5)
            layer.lambda_k2.fill_(0.5)
        assert layer.lam().item() == pytest.approx(1 - math.exp(8 * 0.25) + 0.2, rel=1e-6)


class TestSoftmax:
    @pytest.mark.parametrize("groups", [4, 2, 1])
    def test_against_torch(self, groups):
        layer = drawn(SoftmaxAttention(32, 4, num_key_value_heads=groups))
        hidden = states(2, 9, 32)
        theirs = nn.MultiheadAttention(32, 4, bias=False, batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            k, v = (
                projection.weight.view(groups, 8, 32).repeat_interleave(4 // groups, 0).reshape(32, 32)
                for projection in (layer.k_proj, layer.v_proj)
            )
            theirs.in_proj_weight.copy_(torch.cat((layer.q_proj.weight, k, v)))
            theirs.out_proj.weight.copy_(layer.o_proj.weight)
        mask = torch.ones(9, 9).triu(1).bool()
        expected, weights = theirs(hidden, hidden, hidden, attn_mask=mask, average_attn_weights=False)
        output, attention_map = layer(hidden, need_map=True)
        assert torch.allclose(output, expected, rtol=0, atol=1e-10)
        assert torch.allclose(attention_map.double(), weights, atol=1e-6)
        assert layer.lam() is None


class TestRefused:
    CASES = {
        "layers from 0": (
            lambda: DifferentialAttention(32, 2, layer_index=-1),
            "layer_index=-1: layers are counted from 0",
        ),
        "softmax too": (lambda: SoftmaxAttention(32, 2, layer_index=-3), "layer_index=-3"),
        "groups": (
            lambda: DifferentialAttention(48, 4, num_key_value_heads=3),
            "num_heads=4 is not a multiple of num_key_value_heads=3",
        ),
        "width": (lambda: DifferentialAttention(128, 3), "embed_dim=128 does not divide among num_heads=3 heads"),
        "width of signal and noise heads": (
            lambda: GroupedDifferentialAttention(100, 12),
            "embed_dim=100 does not divide among num_heads=12 and num_noise_heads=3 heads",
        ),
        "odd width": (lambda: DifferentialAttention(30, 3), "head_dim=5 is odd"),
        "no heads": (
            lambda: HeadLayout(
                num_heads=0, num_key_value_heads=1, head_dim=2, query_maps=1, key_maps=1, value_head_dim=2
            ),
            "num_heads=0 is below 1",
        ),
        "variant": (lambda: variant("dif"), "attention_type='dif' is unknown; choose one of softmax, diff, diff_v2"),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_configurations(self, name):
        build, words = self.CASES[name]
        with pytest.raises(ConfigError, match=re.escape(words)):
            build()

    def test_shapes(self):
        layer = DifferentialAttention(32, 2)
        with pytest.raises(ShapeError, match=re.escape("hidden has shape (1, 4, 31), expected (batch, length, 32)")):
            layer(torch.zeros(1, 4, 31))
        with pytest.raises(ShapeError, match=re.escape("hidden has shape (4, 32), expected (batch, length, 32)")):
            layer(torch.zeros(4, 32))
        with pytest.raises(ShapeError, match=re.escape("context has shape (1, 4, 16)")):
            layer(torch.zeros(1, 4, 32), context=torch.zeros(1, 4, 16), is_causal=False)
        layer.k_proj = nn.Linear(32, 4, bias=False)  # what tensor parallelism leaves of one head in four processes
        with pytest.raises(ShapeError, match="4 of keys, not whole heads of 16 and 16"):
            layer(torch.zeros(1, 3, 32))


def test_variants_name_themselves():
    assert all(variant(name) is cls and cls.name == name for name, cls in VARIANTS.items())
    assert variant("diff") is DifferentialAttention


def test_rows_that_are_padded_at_their_end():
    """Causal attention never sees the padding; lengths, which would move what each query sees, are refused."""
    torch.manual_seed(0)
    layer, hidden, lengths = (
        DifferentialAttention(32, 2),
        torch.randn(2, 9, 32),
        torch.tensor([9, 5], dtype=torch.int32),
    )
    whole, short = layer(hidden)[0], layer(hidden[1:, :5])[0]
    torch.testing.assert_close(whole[1:, :5], short)
    with pytest.raises(ConfigError, match=r"kv_lengths in causal attention .*leave it out"):
        layer(hidden, kv_lengths=lengths)
    free = layer(hidden, is_causal=False, kv_lengths=lengths)[0]
    torch.testing.assert_close(free[1:, :5], layer(hidden[1:, :5], is_causal=False)[0])

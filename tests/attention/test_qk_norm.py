"""Layers with QK norm: against the equations head by head, and against transformers' Qwen3 for one map."""

import math

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from difftransformer import DifferentialEncoderLayer
from difftransformer.attention import VARIANTS, DifferentialAttention, SoftmaxAttention
from difftransformer.errors import ConfigError
from difftransformer.families import microsoft_attention_state
from tests.support.layers import CHOICES, WIDTH, D, by_hand, causal, layer_of, states

EPS, LENGTH = 1e-2, 7
# Signal heads, noise heads and key/value heads, and the width of a value.
LAYERS = {
    "softmax": ((6, 0, 2), D),
    "diff": ((6, 6, 2), 2 * D),
    "diff_v2": ((6, 6, 3), D),
    "grouped_diff": ((8, 2, 4), 2 * D),
    "grouped_diff, one key for two noise heads": ((8, 2, 1), 2 * D),
    "grouped_diff_v2": ((6, 2, 1), D),
}
ANGLES = torch.arange(LENGTH)[:, None].double() * 10_000.0 ** (-torch.arange(0, D, 2).double() / D)


def made(name):
    return layer_of(VARIANTS[name.partition(",")[0]], LAYERS[name][0], qk_norm=True, qk_norm_eps=EPS)


def normed_and_rotated(weights):
    """For `by_hand`: RMSNorm, and then the rotation of complex numbers."""
    turn = torch.polar(torch.ones(LENGTH, D // 2, dtype=torch.float64), ANGLES)

    def prepare(rows, name):
        rows = rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + EPS) * weights[f"{name}_norm.weight"]
        turned = torch.complex(rows[..., : D // 2], rows[..., D // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    return prepare


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("need_map", [False, True])
def test_equations_and_gradients(name, need_map):
    layer, x, (heads, e) = made(name), states(2, LENGTH, WIDTH).requires_grad_(), LAYERS[name]
    found, _ = layer(x, position_embeddings=(ANGLES.cos(), ANGLES.sin()), need_map=need_map)
    weights = {key: tensor.detach().clone().requires_grad_() for key, tensor in layer.named_parameters()}
    choices = CHOICES[type(layer)] | {"heads": heads, "e": e, "start": 0.2, "prepare": normed_and_rotated(weights)}
    expected, _ = by_hand(weights, x, x, causal(LENGTH), **choices)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    grad = states(2, LENGTH, WIDTH, seed=2)
    ours = torch.autograd.grad(found, [x, *layer.parameters()], grad)
    theirs = torch.autograd.grad(expected, [x, *weights.values()], grad)
    for key, a, b in zip(("x", *weights), ours, theirs, strict=True):
        assert b.abs().max() > 0, key
        assert (a - b).abs().max() <= 1e-9 * b.abs().max(), key


@pytest.mark.parametrize("groups", [6, 3, 1])
def test_the_twin_is_qwen3s_attention(groups):
    config = Qwen3Config(
        hidden_size=WIDTH, num_attention_heads=6, num_key_value_heads=groups, head_dim=10, rms_norm_eps=EPS
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = Qwen3Attention(config, 0).double()
    ours = SoftmaxAttention(
        WIDTH, 6, num_key_value_heads=groups, head_dim=10, qk_norm=True, qk_norm_eps=EPS, backend="reference"
    ).double()
    with torch.no_grad():
        for norm in (theirs.q_norm, theirs.k_norm):
            norm.weight.add_(0.4 * torch.randn(10))
    ours.load_state_dict(theirs.state_dict())  # the same names
    x, future = states(2, LENGTH, WIDTH), torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)
    cos, sin = (table.double() for table in Qwen3RotaryEmbedding(config)(x, torch.arange(LENGTH)[None]))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    expected = theirs(leaves[0], (cos, sin), future[None, None])[0]
    found = ours(leaves[1], position_embeddings=(cos[..., :5], sin[..., :5]))[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # Qwen3 normalises and takes softmax in fp32
    for output in (expected, found):
        output.backward(states(2, LENGTH, WIDTH, seed=2))
    grads = {"x": [leaf.grad for leaf in leaves]}
    grads |= {name: [theirs.get_parameter(name).grad, ours.get_parameter(name).grad] for name in theirs.state_dict()}
    for name, (a, b) in grads.items():
        assert (a - b).abs().max() <= 1e-5 * a.abs().max() > 0, name


def test_size_of_queries_and_keys_does_not_matter():
    """Without eps; the maps of a layer without the norm change."""
    for qk_norm in (True, False):
        layer = DifferentialAttention(16, 2, head_dim=4, qk_norm=qk_norm, qk_norm_eps=0.0).double()
        x = torch.randn(1, 5, 16, dtype=torch.float64)
        before = layer(x, need_map=True)[1]
        with torch.no_grad():
            layer.q_proj.weight.mul_(30.0)
        assert torch.allclose(layer(x, need_map=True)[1], before, atol=1e-6) == qk_norm


def test_cross_attention_normalises_the_keys_of_the_context():
    layer = SoftmaxAttention(16, 4, qk_norm=True).double()
    with torch.no_grad():
        layer.q_norm.weight.copy_(torch.tensor([0.5, 2.0, 1.0, 3.0]))
        layer.k_norm.weight.copy_(torch.tensor([1.5, 0.2, 2.0, 1.0]))
    x, context = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64)
    q, k, v = (
        states.unflatten(-1, (4, 4)).transpose(1, 2)
        for states in (layer.q_proj(x), layer.k_proj(context), layer.v_proj(context))
    )
    q = nn.functional.rms_norm(q, (4,), layer.q_norm.weight, 1e-6)
    k = nn.functional.rms_norm(k, (4,), layer.k_norm.weight, 1e-6)
    heads = nn.functional.scaled_dot_product_attention(q, k, v)
    expected = layer.o_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, context=context, is_causal=False)[0], expected)


@pytest.mark.parametrize("name", ["diff", "grouped_diff"])
def test_low_precision_is_normalised_in_fp32(name):
    layer = made(name).bfloat16()
    q = layer.q_proj(states(2, LENGTH, WIDTH).bfloat16()).unflatten(-1, (-1, D))
    wide = q.float() / torch.sqrt(q.float().square().mean(-1, keepdim=True) + EPS) * layer.q_norm.weight.float()
    assert torch.equal(layer.q_norm(q), wide.bfloat16())


def test_the_encoder_layer_has_it():
    layer = DifferentialEncoderLayer(32, 4, 48, 0.0, batch_first=True, layer_norm_eps=EPS, qk_norm=True)
    assert (layer.self_attn.q_norm.eps, layer.self_attn.q_norm.weight.shape) == (EPS, (8,))
    layer(torch.randn(2, 6, 32)).sum().backward()
    assert layer.self_attn.k_norm.weight.grad.abs().max() > 0
    assert DifferentialEncoderLayer(32, 4).self_attn.q_norm is None


def test_names_and_lack():
    """What is always trained, and what a layer without the norm has: no parameter more."""
    plain, normed = DifferentialAttention(16, 2), DifferentialAttention(16, 2, qk_norm=True)
    assert {*normed.own_parameter_names()} - {*plain.own_parameter_names()} == {"q_norm.weight", "k_norm.weight"}
    assert (plain.q_norm, plain.k_norm) == (None, None)
    assert torch.equal(normed.q_norm.weight, torch.ones(4))
    with pytest.raises(ConfigError, match=r"qk_norm=True: Microsoft's module has V1 attention.*expected qk_norm=False"):
        microsoft_attention_state(normed)

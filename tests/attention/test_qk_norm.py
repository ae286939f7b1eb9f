"""Layers with QK norm: against transformers' Qwen3 for one map, and the equations head by head for the others."""

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

EPS, WIDTH, LENGTH = 1e-2, 20, 7
# Signal heads, key/value heads and noise heads, and whether keys of the maps are one.
SIZES = {
    "softmax": (6, 2, None, True),
    "dex": (6, 2, None, True),
    "diff": (6, 2, None, False),
    "diff_v2": (6, 3, None, True),
    "grouped_diff": (8, 4, 2, False),
    "grouped_diff, one key for two noise heads": (8, 1, 2, False),
    "grouped_diff_v2": (6, 1, 2, True),
}


def made(name, **options):
    """A layer in float64 of which no gain is 1 and no lambda near its start."""
    heads, groups, noise, _ = SIZES[name]
    if noise:
        options["num_noise_heads"] = noise
    layer = VARIANTS[name.partition(",")[0]](
        WIDTH, heads, num_key_value_heads=groups, head_dim=6, qk_norm=True, qk_norm_eps=EPS, **options
    ).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(1 + 0.4 * noise if "norm" in parameter_name else 0.4 * noise)
    return layer


def hidden_states(seed=1):
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def angles():
    return torch.arange(LENGTH)[:, None].double() * 10_000.0 ** (-torch.arange(0, 6, 2).double() / 6)


def rows_of(name):
    """For each head: its queries, its keys and its value, counted in widths of D and of a value."""
    heads, groups, noise, shared = SIZES[name]
    for h in range(heads):
        g, j = h // (heads // groups), h // (heads // (noise or heads))
        if name in ("softmax", "dex"):
            yield [h], [g], g
        elif noise is None:
            yield [2 * h, 2 * h + 1], [g, g] if shared else [2 * g, 2 * g + 1], g
        else:
            r = heads // noise
            queries = [j * (r + 1) + h % r, j * (r + 1) + r]
            each = max(1, groups // noise)  # signal keys beside one noise key
            kept = min(groups, noise)
            keys = [g, g] if shared else [g // each * (each + 1) + g % each, j * kept // noise * (each + 1) + each]
            yield queries, keys, g


def by_hand(name, layer, w, x):
    """The output for hidden states x by the weights w: RMSNorm, then rotation, then the maps, head by head."""

    def normed(states, gain):
        return states / torch.sqrt(states.square().mean(-1, keepdim=True) + EPS) * gain

    turn = torch.polar(torch.ones(LENGTH, 3, dtype=torch.float64), angles())

    def rotated(states):
        turned = torch.complex(states[..., :3], states[..., 3:]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def row(projection, index, gain):
        return rotated(normed(x @ w[f"{projection}_proj.weight"][6 * index : 6 * index + 6].T, w[gain]))

    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    width, outputs = layer.layout.value_head_dim, []
    for h, (queries, keys, group) in enumerate(rows_of(name)):
        maps = [
            (row("q", q, "q_norm.weight") @ row("k", k, "k_norm.weight").mT / math.sqrt(6))
            .masked_fill(future, -torch.inf)
            .softmax(-1)
            for q, k in zip(queries, keys, strict=True)
        ]
        value = x @ w["v_proj.weight"][width * group : width * (group + 1)].T
        if "lambda_q1" in w:
            exponents = [w[f"lambda_q{m}"] @ w[f"lambda_k{m}"] for m in (1, 2)]
            head = (maps[0] - (exponents[0].exp() - exponents[1].exp() + 0.2) * maps[1]) @ value
            head = 0.8 * head / torch.sqrt(head.square().mean(-1, keepdim=True) + 1e-5) * w["head_norm.weight"]
        elif "lambda_proj.weight" in w:
            head = (maps[0] - torch.sigmoid(x @ w["lambda_proj.weight"][h])[..., None] * maps[1]) @ value
        else:
            head = maps[0] @ value
        if "dex_proj" in w:
            head = head - w["dex_lambda"][h] * head @ w["dex_proj"][h]
        outputs.append(head)
    heads = torch.cat(outputs, -1)
    if "gate_proj.weight" in w:
        heads = heads * torch.sigmoid(x @ w["gate_proj.weight"].T)
    return heads @ w["o_proj.weight"].T


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("need_map", [False, True])
def test_equations_and_gradients(name, need_map):
    layer, x = made(name), hidden_states().requires_grad_()
    found, _ = layer(x, position_embeddings=(angles().cos(), angles().sin()), need_map=need_map)
    weights = {key: tensor.detach().clone().requires_grad_() for key, tensor in layer.named_parameters()}
    expected = by_hand(name, layer, weights, x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    grad = hidden_states(seed=2)
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
    x, future = hidden_states(), torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)
    cos, sin = (table.double() for table in Qwen3RotaryEmbedding(config)(x, torch.arange(LENGTH)[None]))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    expected = theirs(leaves[0], (cos, sin), future[None, None])[0]
    found = ours(leaves[1], position_embeddings=(cos[..., :5], sin[..., :5]))[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # Qwen3 normalises and takes softmax in fp32
    for output in (expected, found):
        output.backward(hidden_states(seed=2))
    grads = {"x": [leaf.grad for leaf in leaves]}
    grads |= {name: [theirs.get_parameter(name).grad, ours.get_parameter(name).grad] for name in theirs.state_dict()}
    for name, (a, b) in grads.items():
        assert (a - b).abs().max() <= 1e-5 * a.abs().max() > 0, name


@pytest.mark.parametrize("name", SIZES)
def test_backends_agree(name):
    layer, x = made(name, backend="reference"), hidden_states()
    tables = angles().cos(), angles().sin()
    expected = layer(x, position_embeddings=tables)[0]
    for backend in ("chunked", "sdpa", "cpu"):
        layer.backend = backend
        found = layer.float()(x.float(), position_embeddings=tables)[0]
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5, msg=backend)


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
    layer, x = made(name), hidden_states().bfloat16()
    layer.bfloat16()
    q = layer.q_proj(x).unflatten(-1, (-1, 6)).float()
    expected = q / torch.sqrt(q.square().mean(-1, keepdim=True) + EPS) * layer.q_norm.weight.float()
    assert torch.equal(layer.q_norm(layer.q_proj(x).unflatten(-1, (-1, 6))), expected.bfloat16())


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

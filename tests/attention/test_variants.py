"""DIFF V2 and what lies between it and V1: options of layers and configurations, sizes, starts."""

import math

import pytest
import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.attention import (
    DifferentialAttention,
    DifferentialAttentionV2,
    DifferentialOptions,
    SoftmaxAttention,
)
from difftransformer.errors import ConfigError
from tests.support.layers import VECTORS, by_hand, causal, drawn, states


@pytest.mark.parametrize("form", ["layer", "head", "scalar"])
def test_the_numbers_of_lambda_stay_in_fp32(form):
    layer = DifferentialAttention(32, 2, options=DifferentialOptions(lambda_form=form)).to(torch.bfloat16)
    own = ("lambda_offset",) if form == "scalar" else VECTORS
    assert {getattr(layer, name).dtype for name in own} == {torch.float32}
    assert layer.lam().shape == ((2,) if form == "head" else ())
    assert layer(torch.randn(1, 4, 32, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_a_lambda_by_token_is_half_at_the_start_and_fp32_in_bf16():
    layer = DifferentialAttentionV2(32, 2)
    torch.nn.init.normal_(layer.lambda_proj.weight, std=1e-3)
    lam = layer.to(torch.bfloat16).head_lam(torch.randn(2, 5, 32, dtype=torch.bfloat16))
    assert lam.shape == (2, 2, 5)
    assert lam.dtype == torch.float32
    assert layer.lam() is None
    torch.testing.assert_close(lam, torch.full_like(lam, 0.5), rtol=0, atol=0.02)


@pytest.mark.parametrize("cls", [DifferentialAttention, DifferentialAttentionV2])
def test_the_options_of_a_configuration(cls):
    fields = {"lambda_form": "head", "head_norm": "plain", "lambda_init": 0.6, "shared_key": True}
    config = DiffTransformerConfig(attention_type=cls.name, hidden_size=32, num_attention_heads=4, **fields)
    layer = cls.from_config(config, 1)
    assert {name: getattr(layer.options, name) for name in fields} == fields
    assert sum(p.numel() for p in layer.parameters()) == cls.own_parameters(config) + cls.layout_of(
        config
    ).projection_parameters(32)


def test_a_scalar_lambda_starts_at_lambda_init_and_learns():
    torch.manual_seed(0)
    layer = DifferentialAttention(16, 2, layer_index=3, options=DifferentialOptions(lambda_form="scalar"))
    assert layer.lam().item() == pytest.approx(0.8 - 0.6 * math.exp(-0.9))
    assert layer.lambda_offset.shape == (1,)
    layer(torch.randn(1, 5, 16))[0].square().sum().backward()
    assert layer.lambda_offset.grad.abs().item() > 0


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "cpu"])
@pytest.mark.parametrize("norm", ["gain", "plain"])
def test_the_twin_with_a_headwise_norm(norm, backend):
    """Table 6's third row: PyTorch's attention, PyTorch's norm over each head, no factor."""
    layer = SoftmaxAttention(24, 3, num_key_value_heads=1, head_norm=norm, head_norm_eps=1e-3, backend=backend)
    layer, hidden = drawn(layer).float(), states(2, 6, 24).float()
    q, k, v = (x(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for x in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gain = layer.head_norm.weight if norm == "gain" else None
    heads = torch.nn.functional.rms_norm(heads, (8,), gain, 1e-3)
    expected = layer.o_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(hidden)[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(hidden, need_map=True)[0], expected, rtol=1e-4, atol=1e-5)
    torch.autograd.grad(layer(hidden)[0].square().sum(), list(layer.parameters()))


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "cpu"])
def test_the_twin_with_a_factor_of_its_heads(backend):
    config = DiffTransformerConfig(
        attention_type="softmax", hidden_size=24, num_attention_heads=3, num_key_value_heads=1, softmax_head_scale=2.5
    )
    layer = drawn(SoftmaxAttention.from_config(config, 0)).float()
    layer.backend = backend
    hidden = states(2, 6, 24).float()
    q, k, v = (x(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for x in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = 2.5 * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.o_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(hidden)[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(hidden, need_map=True)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "xsa", "gate"])
def test_a_factor_of_the_heads_multiplies_the_output(kind):
    fields = {"attention_type": kind, "hidden_size": 24, "num_attention_heads": 3}
    plain, large = (DiffTransformerConfig(softmax_head_scale=scale, **fields) for scale in (1.0, 2.5))
    layer, scaled = (drawn(config.attention.from_config(config, 0)) for config in (plain, large))
    scaled.load_state_dict(layer.state_dict())
    hidden = states(2, 6, 24)
    torch.testing.assert_close(scaled(hidden)[0], 2.5 * layer(hidden)[0])


def test_a_twin_takes_no_norm_from_the_differential_model():
    """Models saved before the twin could have a norm may state head_norm, which never was the twin's."""
    fields = {"hidden_size": 32, "num_attention_heads": 4}
    config = DiffTransformerConfig(attention_type="diff", head_norm="plain", **fields).twin()
    assert SoftmaxAttention.from_config(config, 0).head_norm is None
    normed = DiffTransformerConfig(attention_type="softmax", softmax_head_norm="gain", **fields)
    assert SoftmaxAttention.from_config(normed, 0).head_norm.weight.shape == (8,)
    assert normed.twin("dex").attention.from_config(normed.twin("dex"), 0).head_norm is None


def test_half_the_heads_of_twice_the_width_have_the_twins_parameters():
    fields = {"attention_type": "softmax", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
    twin, wide = (DiffTransformerConfig(num_attention_heads=heads, **fields) for heads in (4, 2))
    diff = twin.twin("diff").head_layout()
    assert (twin.head_dim, wide.head_dim, diff.value_head_dim) == (8, 16, 16)
    sizes = [sum(p.numel() for p in DiffTransformerForCausalLM(config).parameters()) for config in (twin, wide)]
    assert sizes[0] == sizes[1]


HEADS = {"num_differential_heads": 4, "num_differential_key_value_heads": 2, "value_head_dim": 8}
STEPS = {"lambda_form": "token", "head_norm": "none", "shared_key": True}


@pytest.mark.parametrize("done", range(5))
def test_the_steps_from_v1_to_v2_in_a_configuration(done):
    """Lambda, norm, key, then heads: each step's parameters by hand, and the last is V2 with the same tensors."""
    fields = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    chosen = dict(list(STEPS.items())[:done]) | (HEADS if done == 4 else {})
    config = DiffTransformerConfig(attention_type="diff", **fields, **chosen)
    layer = drawn(config.attention.from_config(config, 0))
    width, d = 32, 8
    #           Q       K      V      O      lambda  gain
    sizes = [
        width * (4 * d + 2 * d + 2 * d + 4 * d) + 4 * d + 2 * d,
        width * (4 * d + 2 * d + 2 * d + 4 * d) + 2 * width + 2 * d,
        width * (4 * d + 2 * d + 2 * d + 4 * d) + 2 * width,
        width * (4 * d + 1 * d + 2 * d + 4 * d) + 2 * width,
        width * (8 * d + 2 * d + 2 * d + 4 * d) + 4 * width,
    ]
    assert sum(p.numel() for p in layer.parameters()) == sizes[done]
    hidden = states(2, 6, width)
    form, norm = chosen.get("lambda_form", "layer"), chosen.get("head_norm", "gain")
    equations = {"form": form, "norm": norm, "shared_key": chosen.get("shared_key", False), "d": d, "start": 0.2}
    heads, e = ((4, 4, 2), d) if done == 4 else ((2, 2, 1), 2 * d)
    weights = dict(layer.named_parameters())
    expected, _ = by_hand(weights, hidden, hidden, causal(6), heads=heads, e=e, **equations)
    torch.testing.assert_close(layer(hidden)[0], expected, rtol=1e-9, atol=1e-9)
    if done == 4:
        v2 = DiffTransformerConfig(attention_type="diff_v2", **fields)
        released = v2.attention.from_config(v2, 0).double()
        released.load_state_dict(layer.state_dict())
        torch.testing.assert_close(released(hidden)[0], expected, rtol=1e-9, atol=1e-9)


def test_options_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"lambda_value=0.5 with lambda_form='token': .* has no constant term"):
        DiffTransformerConfig(attention_type="diff_v2", hidden_size=32, num_attention_heads=4, lambda_value=0.5)
    with pytest.raises(ConfigError, match="lambda_init=1 with a headwise norm gives heads of zero"):
        DifferentialOptions(lambda_init=1.0, head_norm="gain")
    with pytest.raises(ConfigError, match="head_scale=0 gives heads of zero"):
        DifferentialOptions(head_scale=0.0)
    with pytest.raises(ConfigError, match="lambda_value=nan: give a finite number"):
        DifferentialOptions(lambda_value=math.nan)
    with pytest.raises(
        ConfigError, match=r"softmax_head_norm: .layer. is not allowed; choose one of gain, plain, none"
    ):
        DiffTransformerConfig(hidden_size=32, num_attention_heads=4, softmax_head_norm="layer")
    with pytest.raises(ConfigError, match="head_norm='row' is unknown; choose one of gain, plain, none"):
        SoftmaxAttention(16, 2, head_norm="row")
    with pytest.raises(ConfigError, match=r"^head_scale=0 gives heads of zero"):
        SoftmaxAttention(16, 2, head_scale=0.0)
    with pytest.raises(ConfigError, match=r"^softmax_head_scale=0 gives heads of zero"):
        DiffTransformerConfig(attention_type="xsa", hidden_size=32, num_attention_heads=4, softmax_head_scale=0.0)
    with pytest.raises(ConfigError, match="head_scale=inf: give a finite number"):
        SoftmaxAttention(16, 2, head_scale=math.inf)
    DifferentialOptions(lambda_init=1.0, head_norm="gain", head_scale=0.2)
    DifferentialOptions(lambda_init=1.0, head_norm="none", lambda_form="constant")


def test_v2_takes_odd_head_counts():
    config = DiffTransformerConfig(
        attention_type="diff_v2", hidden_size=48, num_attention_heads=3, num_key_value_heads=1
    )
    layout = config.head_layout()
    assert (layout.num_heads, layout.num_key_value_heads, layout.head_dim, layout.value_head_dim) == (3, 1, 16, 16)
    twin = config.twin().head_layout()
    assert layout.cached_values_per_token() == twin.cached_values_per_token()


def test_unknown_options_are_named():
    with pytest.raises(ConfigError, match="lambda_form='row' is unknown; choose one of layer, head, scalar, token"):
        DifferentialOptions(lambda_form="row")
    with pytest.raises(ConfigError, match="head_norm='layer' is unknown; choose one of gain, plain, none"):
        DiffTransformerConfig(hidden_size=32, num_attention_heads=4, head_norm="layer")

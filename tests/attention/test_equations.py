"""Every differential layer against its equations, written out for one head after the other in float64."""

import math

import pytest
import torch

from difftransformer.attention import (
    VARIANTS,
    DifferentialAttention,
    DifferentialAttentionV2,
    DifferentialOptions,
    GroupedDifferentialAttention,
    GroupedDifferentialAttentionV2,
)
from difftransformer.errors import ConfigError
from tests.support.layers import CHOICES, VECTORS, WIDTH, D, by_hand, causal, layer_of, states

# Class, (signal heads, noise heads, key/value heads), width of a value, arguments, and what they change of the equations.
V1, V2 = DifferentialAttention, DifferentialAttentionV2
GROUPED, GROUPED_V2 = GroupedDifferentialAttention, GroupedDifferentialAttentionV2
LAYERS = {
    "V1": (V1, (2, 2, 2), 8, {}, {}),
    "V1, grouped keys": (V1, (4, 4, 2), 8, {"layer_index": 9}, {}),
    "V1, one group": (V1, (3, 3, 1), 7, {"value_head_dim": 7}, {}),
    "V1, eps": (V1, (2, 2, 2), 8, {"head_norm_eps": 0.5}, {"eps": 0.5}),
    "V2": (V2, (4, 4, 2), 4, {"layer_index": 3}, {}),
    "one noise head": (GROUPED, (3, 1, 3), 8, {"layer_index": 2}, {}),
    "one noise head, one key": (GROUPED, (4, 1, 1), 8, {}, {}),
    "a key for every head": (GROUPED, (6, 2, 6), 8, {}, {}),
    "more keys than noise heads": (GROUPED, (8, 2, 4), 8, {}, {}),
    "as many keys": (GROUPED, (6, 2, 2), 8, {}, {}),
    "noise heads share a key": (GROUPED, (8, 4, 2), 8, {}, {}),
    "as in Motif 3": (GROUPED_V2, (8, 2, 2), 4, {}, {}),
    "gated, noise heads share a key": (GROUPED_V2, (8, 4, 2), 4, {}, {}),
    "gated, one to one": (GROUPED_V2, (3, 3, 1), 4, {}, {}),
    "no gate": (GROUPED_V2, (3, 1, 1), 6, {"output_gate": False, "value_head_dim": 6}, {"gate": False}),
    "normed softmax": (VARIANTS["softmax_norm"], (4, 0, 2), 4, {"head_norm_eps": 0.5}, {"eps": 0.5}),
    "XSA": (VARIANTS["xsa"], (4, 0, 2), 4, {}, {}),
    "gated softmax": (VARIANTS["gate"], (4, 0, 2), 4, {}, {}),
    "V1 with XSA": (VARIANTS["diff_xsa"], (4, 4, 2), 8, {"layer_index": 2}, {}),
    "gated V1": (VARIANTS["diff_gate"], (4, 4, 2), 8, {"layer_index": 2}, {}),
    "V2, maps added": (VARIANTS["diff_v2_added"], (4, 4, 2), 4, {}, {}),
}
EVERY = torch.ones(1, 1, dtype=torch.bool)


def start_of(layer_index=0, **_):
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


# In float64 `auto` takes `reference`.
@pytest.mark.parametrize("backend", ["auto", "chunked", "sdpa"])
@pytest.mark.parametrize("name", LAYERS)
def test_equations(name, backend):
    """Output, map and the gradients of every weight and of the hidden states."""
    cls, heads, e, arguments, changed = LAYERS[name]
    layer, hidden = layer_of(cls, heads, backend=backend, **arguments), states(2, 7, WIDTH).requires_grad_()
    weights, equations = (
        dict(layer.named_parameters()),
        CHOICES[cls] | {"heads": heads, "e": e, "start": start_of(**arguments)} | changed,
    )
    expected, expected_map = by_hand(weights, hidden, hidden, causal(7), **equations)
    found, found_map = layer(hidden, need_map=True)
    torch.testing.assert_close(found_map, expected_map.to(found_map.dtype), rtol=1e-6, atol=1e-6)
    pull, inputs = states(2, 7, WIDTH, seed=3), (hidden, *weights.values())
    wanted = torch.autograd.grad((expected * pull).sum(), inputs)
    assert all(gradient.abs().max() > 0 for gradient in wanted)
    for out in (found, layer(hidden)[0]):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        for one, other in zip(torch.autograd.grad((out * pull).sum(), inputs), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    free = by_hand(weights, hidden, hidden, EVERY, **equations)[0]
    torch.testing.assert_close(layer(hidden, is_causal=False)[0], free, rtol=1e-9, atol=1e-9)


FORMS, NORMS = ("layer", "head", "scalar", "token", "constant"), ("gain", "plain", "none")
HEADS = [
    (V1, (3, 3, 1), False), (V1, (3, 3, 1), True), (V2, (4, 4, 2), False), (V2, (4, 4, 2), True),
    (GROUPED, (6, 2, 6), False), (GROUPED, (6, 2, 2), False),
]  # fmt: skip
# Heads with each form of lambda, while the norm and the width of a value go round: every pair of options is there.
STEPS = [
    (*heads, form, NORMS[(i + j) % 3], D * (1 + (i + j) % 2))
    for i, heads in enumerate(HEADS)
    for j, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("cls", "heads", "shared_key", "form", "norm", "e"), STEPS)
def test_every_step_between_v1_and_v2(cls, heads, shared_key, form, norm, e):
    options = DifferentialOptions(lambda_form=form, head_norm=norm, shared_key=shared_key, lambda_init=0.35)
    layer, hidden = layer_of(cls, heads, value_head_dim=e, options=options), states(2, 7, WIDTH)
    weights, equations = dict(layer.named_parameters()), {"form": form, "norm": norm, "shared_key": shared_key}
    expected, _ = by_hand(weights, hidden, hidden, causal(7), heads=heads, e=e, start=0.35, **equations)
    found = layer(hidden)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.autograd.grad(found.square().sum(), list(layer.parameters()))


VALUES, FACTORS = (
    [(0.0, None), (-1.0, None), (-0.2, 0.6)],
    [("gain", None), ("plain", 0.5), ("none", None), ("none", 0.5)],
)


@pytest.mark.parametrize(
    ("form", "norm", "scale", "value", "init"),
    [
        (form, *factor, *VALUES[(i + j) % 3])
        for i, form in enumerate(["constant", "layer", "head", "scalar"])
        for j, factor in enumerate(FACTORS)
    ],
)
def test_lambda_and_the_factor_of_the_heads_apart_from_lambda_init(form, norm, scale, value, init):
    """The factor after the norm follows lambda_init whatever lambda is built around, unless it is given too.

    With -1 and 0.5 both maps are averaged.
    """
    options = DifferentialOptions(
        lambda_form=form, lambda_value=value, lambda_init=init, head_norm=norm, head_scale=scale
    )
    layer, hidden = layer_of(V1, (3, 3, 3), layer_index=5, options=options), states(2, 7, WIDTH)
    equations = {"form": form, "norm": norm, "value": value, "scale": scale, "start": init or start_of(5)}
    weights = dict(layer.named_parameters())
    expected, _ = by_hand(weights, hidden, hidden, causal(7), heads=(3, 3, 3), e=2 * D, **equations)
    for need_map in (False, True):
        found, weights = layer(hidden, need_map=need_map)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if form == "constant":
        torch.testing.assert_close(weights.sum(-1), torch.full_like(weights.sum(-1), 1 - value), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "name",
    ["V1, one group", "V2", "a key for every head", "noise heads share a key", "XSA", "gated softmax", "V1 with XSA"],
)
def test_restrictions_and_cross_attention(name):
    cls, heads, e, arguments, changed = LAYERS[name]
    layer = layer_of(cls, heads, **arguments)
    weights, hidden, context = dict(layer.named_parameters()), states(2, 7, WIDTH), states(2, 5, WIDTH, seed=2)
    equations = CHOICES[cls] | {"heads": heads, "e": e, "start": start_of(**arguments)} | changed

    def expected(x, y, allowed):
        return by_hand(weights, x, y, allowed, **equations)[0]

    def same(found, reference):
        torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-9)

    if equations.get("exclusive"):
        with pytest.raises(ConfigError, match="attends to a context, whose values are of other tokens"):
            layer(hidden, context=context, is_causal=False)
    else:
        same(layer(hidden, context=context, is_causal=False)[0], expected(hidden, context, EVERY))
        mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]]).bool()[:, None, None]
        masked = layer(hidden, context=context, is_causal=False, attn_mask=mask)[0]
        for row in range(2):
            kept = context[row : row + 1, mask[row, 0, 0]]
            same(masked[row : row + 1], expected(hidden[row : row + 1], kept, EVERY))
    same(layer(hidden, window=3)[0], expected(hidden, hidden, causal(7, 3)))
    padded = layer(hidden, kv_start=torch.tensor([0, 3]))[0]
    same(padded[1:, 3:], expected(hidden[1:, 3:], hidden[1:, 3:], causal(4)))
    packed = layer(hidden[:1], cu_seqlens=torch.tensor([0, 4, 7]))[0]
    parts = [expected(part, part, causal(part.shape[1])) for part in hidden[:1].split((4, 3), 1)]
    same(packed, torch.cat(parts, 1))


@pytest.mark.parametrize("name", ["V1", "a key for every head", "as many keys"])
def test_low_precision(name):
    """Lambdas stay in fp32, and the error to fp32 is at most twice that of plain operations on the same rounded layer."""
    cls, heads, e, arguments, _ = LAYERS[name]
    layer, hidden = layer_of(cls, heads, **arguments).float(), states(2, 9, WIDTH).float()
    exact, narrow = layer(hidden)[0], layer.to(torch.bfloat16)
    assert {getattr(narrow, vector).dtype for vector in VECTORS} == {torch.float32}
    found, rounded = narrow(hidden.bfloat16())[0], hidden.bfloat16()
    assert found.dtype == torch.bfloat16
    weights = {parameter: tensor.bfloat16() for parameter, tensor in narrow.named_parameters()}
    plain = by_hand(weights, rounded, rounded, causal(9), heads=heads, e=e, start=0.2)[0]
    assert (found - exact).square().mean() <= 4 * (plain - exact).square().mean()


@pytest.mark.parametrize(
    ("cls", "plain", "groups", "arguments"), [(GROUPED, V1, 2, {}), (GROUPED_V2, V2, 2, {"output_gate": False})]
)
def test_one_noise_head_for_every_signal_head_is_the_plain_variant_to_the_bit(cls, plain, groups, arguments):
    grouped, other = layer_of(cls, (4, 4, groups), **arguments), layer_of(plain, (4, 4, groups))
    other.load_state_dict(grouped.state_dict())
    assert torch.equal(grouped(states(2, 6, WIDTH))[0], other(states(2, 6, WIDTH))[0])


@pytest.mark.parametrize("name", ["xsa", "diff_xsa"])
def test_exclusive_heads_have_no_part_along_their_own_value(name):
    """In what W_O reads, the norm's gain included; the first token, which sees itself alone, has heads of 0."""
    layer, hidden = layer_of(VARIANTS[name], (4, 4, 2)), states(2, 7, WIDTH)
    read = []
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    layer(hidden)
    heads, own = (x.unflatten(-1, (count, -1)) for x, count in ((read[0], 4), (layer.v_proj(hidden), 2)))
    assert (heads * own.repeat_interleave(2, 2)).sum(-1).abs().max() < 1e-12
    assert heads[:, 1:].abs().min() > 0
    if name == "xsa":
        assert heads[:, 0].abs().max() < 1e-12
    low = layer.bfloat16()
    low(hidden.bfloat16())
    assert read[-1].dtype == torch.bfloat16
    assert (read[-1].double() - read[0]).abs().max() <= 0.03 * read[0].abs().max()


def test_maps_added_by_another_form_of_lambda_are_refused():
    with pytest.raises(ConfigError, match="lambda_form='layer': attention_type='diff_v2_added' adds by token"):
        VARIANTS["diff_v2_added"](WIDTH, 4, head_dim=D, options=DifferentialOptions(lambda_form="layer"))

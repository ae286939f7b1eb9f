"""Grouped attention with shared keys, lambda by token and an output gate, held against its equations."""

import math

import pytest
import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.attention import DifferentialAttentionV2, DifferentialOptions, GroupedDifferentialAttentionV2
from difftransformer.errors import ConfigError
from difftransformer.families import microsoft_attention_state
from difftransformer.model import count

WIDTH, D = 24, 4
HEADS = {  # signal heads, noise heads, key/value heads
    "as in Motif 3": (8, 2, 2),
    "noise heads share a key": (8, 4, 2),
    "one noise head": (3, 1, 1),
    "one to one": (3, 3, 1),
}


def drawn(heads, seed=0, **arguments):
    signal, noise, groups = heads
    layer = GroupedDifferentialAttentionV2(
        WIDTH, signal, num_noise_heads=noise, num_key_value_heads=groups, head_dim=D, **arguments
    ).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return layer


def states(*shape, seed=1):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(weights, x, heads, allowed, *, gate=True, e=D):
    """One signal head at a time; a group is the rows of its signal queries and then of its noise query."""
    signal, noise, groups = heads
    ratio = signal // noise

    def rows(name, place, width):
        return x @ weights[f"{name}_proj.weight"][place * width : (place + 1) * width].T

    outs = []
    for head in range(signal):
        group = head // ratio
        first, second = rows("q", group * (ratio + 1) + head % ratio, D), rows("q", group * (ratio + 1) + ratio, D)
        place = group // (noise // groups)
        key, value = rows("k", place, D), rows("v", place, e)
        maps = []
        for query in (first, second):
            scores = (query @ key.mT / math.sqrt(D)).exp() * allowed
            maps.append(scores / scores.sum(-1, keepdim=True))
        lam = 1 / (1 + (-rows("lambda", head, 1)).exp())
        out = (maps[0] - lam * maps[1]) @ value
        outs.append(out / (1 + (-rows("gate", head, e)).exp()) if gate else out)
    return torch.cat(outs, -1) @ weights["o_proj.weight"].T


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa"])
@pytest.mark.parametrize("name", HEADS)
def test_equations(name, backend):
    """Output, map and the gradients of every weight and of the hidden states."""
    layer, x = drawn(HEADS[name], backend=backend), states(2, 7).requires_grad_()
    direction = states(2, 7, seed=2)
    allowed = torch.ones(7, 7, dtype=torch.float64).tril()
    weights = dict(layer.named_parameters())
    wanted = by_hand(weights, x, HEADS[name], allowed)
    inputs = (x, *weights.values())
    expected = torch.autograd.grad((wanted * direction).sum(), inputs)
    for need_map in (False, True):
        out, _ = layer(x, need_map=need_map)
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-10)
        for found, grad in zip(torch.autograd.grad((out * direction).sum(), inputs), expected, strict=True):
            torch.testing.assert_close(found, grad, rtol=1e-8, atol=1e-9)


def test_options():
    heads = HEADS["as in Motif 3"]
    x, allowed = states(2, 5), torch.ones(5, 5, dtype=torch.float64)
    ungated = drawn(heads, output_gate=False, value_head_dim=6)
    found = ungated(x, is_causal=False)[0]
    wanted = by_hand(dict(ungated.named_parameters()), x, heads, allowed, gate=False, e=6)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    with pytest.raises(ConfigError, match=r"shared_key=False: noise heads of .* read the keys of their group"):
        drawn(heads, options=DifferentialOptions(shared_key=False))
    with pytest.raises(ConfigError, match=r"num_key_value_heads=4 does not divide num_noise_heads=2"):
        drawn((8, 2, 4))


def test_one_noise_head_for_every_signal_head_without_a_gate_is_v2_to_the_bit():
    layer = drawn((4, 4, 2), output_gate=False)
    v2 = DifferentialAttentionV2(WIDTH, 4, num_key_value_heads=2, head_dim=D).double()
    v2.load_state_dict(layer.state_dict())
    assert torch.equal(layer(states(2, 6))[0], v2(states(2, 6))[0])
    assert microsoft_attention_state(layer).keys() == microsoft_attention_state(v2).keys()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: drawn((4, 4, 2)), "output_gate=True"),
        (lambda: drawn((4, 2, 2), output_gate=False), "heads_per_second_map=2"),
    ],
)
def test_microsofts_module_has_neither(layer, words):
    with pytest.raises(ConfigError, match=words):
        microsoft_attention_state(layer())


def config_of(heads, groups, **fields):
    return DiffTransformerConfig(
        attention_type="grouped_diff_v2",
        vocab_size=50,
        hidden_size=8 * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        **fields,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((80, 16), (64, 16, 16)),
        ((8, 8), (6, 2, 2)),
        ((8, 1), (6, 2, 1)),
        ((40, 10), (32, 8, 2)),
        ((12, 6, {"num_noise_heads": 6}), (6, 6, 6)),
    ],
)
def test_heads_of_a_configuration(fields, expected):
    heads, groups, *options = fields
    config = config_of(heads, groups, **(options[0] if options else {}))
    layout = config.head_layout()
    assert (layout.num_heads, layout.num_noise_heads, layout.num_key_value_heads) == expected


def test_sizes_beside_the_twin():
    """Motif 3's heads: W_Q, W_K, W_V and the cache are the twin's, W_O is smaller, and lambda and the gate are added."""
    config = config_of(80, 16)
    ours, twin, width = count(config), count(config.twin()), config.hidden_size
    assert ours.kv_bytes_per_token == twin.kv_bytes_per_token
    per_layer = -16 * 8 * width + 64 * width + 64 * 8 * width
    assert ours.parameters - twin.parameters == 2 * per_layer
    with torch.device("meta"):
        model = DiffTransformerForCausalLM(config)
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    maps = 2 * 64 * (2 * 8 + 8) * (2049 / 2) * 2
    assert ours.forward_flops_per_token == round(2 * (linears - 2 * 64 * width) + maps)


@torch.no_grad()
def test_mimetic_keys_are_the_queries_of_their_first_head():
    layer = drawn((8, 4, 2))
    layer.init_mimetic()
    rows = layer.q_proj.weight.view(4, 3, D, WIDTH)
    assert torch.equal(layer.k_proj.weight.view(2, D, WIDTH), rows[[0, 2], 0])

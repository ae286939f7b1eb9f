"""Grouped differential attention, with and without a gate: heads, sizes, starts, shards, refusals."""

import re

import pytest
import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.attention import (
    DifferentialOptions,
    GroupedDifferentialAttention,
    GroupedDifferentialAttentionV2,
    SoftmaxAttention,
)
from difftransformer.errors import ConfigError
from difftransformer.families import microsoft_attention_state
from difftransformer.model import count
from tests.support.layers import WIDTH, D, layer_of, states

HEADS = {  # signal heads, noise heads, key/value heads
    "one noise head": (3, 1, 3), "one noise head, one key": (4, 1, 1), "a key for every head": (6, 2, 6),
    "more keys than noise heads": (8, 2, 4), "as many": (6, 2, 2), "noise heads share a key": (8, 4, 2),
    "one to one": (3, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("heads", [(8, 2, 4), (8, 4, 4)])
def test_half_of_the_heads_is_a_shard(heads):
    """Two layers with consecutive halves of the rows sum to the whole, as tensor parallelism has it."""
    layer = layer_of(GroupedDifferentialAttention, heads, value_head_dim=6)
    hidden = states(2, 5, 20)
    total = 0
    for half in range(2):
        shard = layer_of(GroupedDifferentialAttention, heads, value_head_dim=6)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(shard, name).weight.data = getattr(layer, name).weight.chunk(2)[half].detach()
        shard.o_proj.weight.data = layer.o_proj.weight.chunk(2, 1)[half].detach()
        total = total + shard(hidden)[0]
    torch.testing.assert_close(total, layer(hidden)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", HEADS)
def test_mimetic(name):
    """A key starts as the query of the first head that reads it, W_O as the transpose of W_V."""
    signal, noise, groups = HEADS[name]
    layer = layer_of(GroupedDifferentialAttention, HEADS[name])
    q, v = (getattr(layer, f"{name}_proj").weight.detach() for name in "qv")
    k, o = layer.mimetic_key(q), layer.mimetic_output(v)
    rows = q.view(noise, signal // noise + 1, 4, 20)
    cells = min(noise, groups)
    keys = k.view(cells, groups // cells + 1, 4, 20)
    for g in range(groups):
        first = g * (signal // groups)
        expected = rows[first // (signal // noise), first % (signal // noise)]
        assert torch.equal(keys[g // (groups // cells), g % (groups // cells)], expected)
        for head in range(first, first + signal // groups):
            assert torch.equal(o[:, 8 * head : 8 * head + 8], v[8 * g : 8 * g + 8].T)
    for cell in range(cells):
        assert torch.equal(keys[cell, -1], rows[cell * (noise // cells), -1])


def gated(heads, **arguments):
    return layer_of(GroupedDifferentialAttentionV2, heads, **arguments)


def config_of(heads, key_value_heads=None, **more):
    fields = {"attention_type": "grouped_diff", "hidden_size": 16 * heads, "num_hidden_layers": 2, "vocab_size": 50}
    fields |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    return DiffTransformerConfig(**fields | more)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [  # signal, noise, key/value heads, cached heads
        ({"heads": 4}, (3, 1, 3, 1)), ({"heads": 5}, (4, 1, 4, 1)), ({"heads": 20}, (16, 4, 16, 4)),
        ({"heads": 8, "key_value_heads": 2}, (6, 2, 1, 1)), ({"heads": 16, "key_value_heads": 4}, (12, 4, 2, 2)),
        ({"heads": 40, "key_value_heads": 16, "num_noise_heads": 8}, (32, 8, 8, 8)),  # Motif-2-12.7B
        ({"heads": 4, "num_noise_heads": 2}, (2, 2, 2, 2)),
        ({"heads": 4, "num_differential_heads": 8, "num_differential_key_value_heads": 4}, (8, 2, 4, 2)),
    ],
)  # fmt: skip
def test_heads_of_a_configuration(fields, expected):
    layout = config_of(**fields).head_layout()
    found = (layout.num_heads, layout.num_noise_heads, layout.num_key_value_heads, layout.cache_heads)
    assert found == expected


@pytest.mark.parametrize(("heads", "key_value_heads"), [(8, None), (8, 4), (40, 8), (16, 2)])
def test_parameters_beside_the_twin(heads, key_value_heads):
    """Queries and keys are the twin's; values and the output are wider by the signal's surplus over the noise."""
    config = config_of(heads, key_value_heads)
    twin = config.twin()
    mine, theirs = (each.from_config(config, 0) for each in (GroupedDifferentialAttention, SoftmaxAttention))
    for name in ("q_proj", "k_proj"):
        assert getattr(mine, name).weight.shape == getattr(theirs, name).weight.shape
    layout, keys = mine.layout, config.num_key_value_heads
    surplus = 2 * (layout.num_heads + layout.num_key_value_heads) - heads - keys
    wider = surplus * config.head_dim * config.hidden_size + 6 * config.head_dim
    assert sum(p.numel() for p in mine.parameters()) - sum(p.numel() for p in theirs.parameters()) == wider
    assert count(config).attention_parameters - count(twin).attention_parameters == config.num_hidden_layers * wider


@pytest.mark.parametrize(("heads", "width"), [(5, 20), (20, 20)])
def test_the_value_width_that_makes_twins_equal(heads, width):
    config = config_of(heads)
    layout = config.head_layout()
    assert width * (layout.num_heads + layout.num_key_value_heads) == 16 * (heads + config.num_key_value_heads)
    config = config_of(heads, value_head_dim=width)
    own = (4 * config.head_dim + width) * config.num_hidden_layers
    assert count(config).parameters - count(config.twin()).parameters == own


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: config_of(7), "num_attention_heads=7: attention_type='grouped_diff' makes one of five heads"),
        (lambda: config_of(8, num_noise_heads=3), "num_noise_heads=3 leaves 5 of num_attention_heads=8"),
        (lambda: config_of(8, num_noise_heads=8), "num_noise_heads=8 leaves 0 of num_attention_heads=8"),
        (lambda: config_of(8, num_noise_heads=0), "num_noise_heads=0: give a whole number of at least 1"),
        (lambda: config_of(8, 1), "num_key_value_heads=1 does not divide into keys of 6 signal and 2 noise heads: use 8"),
        (lambda: config_of(16, 6), "num_key_value_heads=6 does not divide into keys of 12 signal and 4 noise heads"),
        (lambda: config_of(8, shared_key=True), "shared_key=True: noise heads of attention_type='grouped_diff'"),
        (lambda: GroupedDifferentialAttention(40, 5), "num_heads=5 is a multiple of neither 4 nor 3"),
        *(
            (lambda noise=noise: GroupedDifferentialAttention(56, 4, num_noise_heads=noise),
             f"num_noise_heads={noise} does not divide num_heads=4")
            for noise in (0, 3)
        ),
        (lambda: GroupedDifferentialAttention(60, 12, num_noise_heads=3, num_key_value_heads=4),
         "num_key_value_heads=4 with num_noise_heads=3: give a multiple or a divisor"),
    ],
)  # fmt: skip
def test_refused(build, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_options_of_gated_layers():
    with pytest.raises(ConfigError, match=r"shared_key=False: noise heads of .* read the keys of their group"):
        gated((8, 2, 2), options=DifferentialOptions(shared_key=False))
    with pytest.raises(ConfigError, match=r"num_key_value_heads=4 does not divide num_noise_heads=2"):
        gated((8, 2, 4))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: gated((4, 4, 2)), "output_gate=True"),
        (lambda: gated((4, 2, 2), output_gate=False), "heads_per_second_map=2"),
    ],
)
def test_microsofts_module_has_neither(layer, words):
    with pytest.raises(ConfigError, match=words):
        microsoft_attention_state(layer())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((80, 16), (64, 16, 16)), ((8, 8), (6, 2, 2)), ((8, 1), (6, 2, 1)), ((40, 10), (32, 8, 2)),
        ((12, 6, {"num_noise_heads": 6}), (6, 6, 6)),
    ],
)  # fmt: skip
def test_heads_of_a_gated_configuration(fields, expected):
    heads, groups, *options = fields
    layout = config_of(heads, groups, attention_type="grouped_diff_v2", **dict(*options)).head_layout()
    assert (layout.num_heads, layout.num_noise_heads, layout.num_key_value_heads) == expected


def test_sizes_beside_the_twin():
    """Motif 3's heads: W_Q, W_K, W_V and the cache are the twin's, W_O is smaller, and lambda and the gate are added."""
    config = config_of(80, 16, attention_type="grouped_diff_v2", hidden_size=640)
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
    layer = gated((8, 4, 2))
    query = layer.q_proj.weight
    rows = query.view(4, 3, D, WIDTH)
    assert torch.equal(layer.mimetic_key(query).view(2, D, WIDTH), rows[[0, 2], 0])

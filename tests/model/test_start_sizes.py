"""The sizes of branches at step 0 are those of formulas and of the model that trains; what drowns the stream is said."""

import math

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from difftransformer.attention import variants
from difftransformer.errors import ConfigError
from difftransformer.model import PRESETS, DiffTransformerConfig
from difftransformer.model.start_sizes import Branch, drowning, measured_layers, start_sizes
from difftransformer.train import build_model


def config_of(width=128, layers=2, **fields):
    shape = {"hidden_size": width, "num_attention_heads": 4, "num_hidden_layers": layers, "vocab_size": 300}
    return DiffTransformerConfig(**shape | {"initialization": "normal"} | fields)


def first(branches, name):
    return next(branch for branch in branches if branch.name == name)


def mean_over_seeds(config, value, seeds=4):
    return sum(value(start_sizes(config, seed=seed, layers=1)) for seed in range(seeds)) / seeds


@pytest.mark.parametrize("width", [64, 128, 256])
def test_heads_of_unit_size_make_attention_grow_with_the_width(width):
    """From N(0, s^2), o_proj maps heads of size 1 - lambda_init, which is 0.2 in layer 0, to (1 - 0.2) s sqrt(width)."""
    for std in (0.02, 0.05):
        config = config_of(width, initializer_range=std)
        ratio = mean_over_seeds(config, lambda found: first(found, "attention").ratio)
        assert ratio == pytest.approx(0.8 * std * math.sqrt(width) / std, rel=0.08)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_by_fan_in_no_size_depends_on_the_width(width):
    """U(-a, a) has variance a^2 / 3: o_proj maps heads of size 0.8 to 0.8 / sqrt(3), beside embeddings of size 1."""
    found = mean_over_seeds(config_of(width, initialization="fan_in"), lambda found: first(found, "attention").output)
    assert found == pytest.approx(0.8 / math.sqrt(3), rel=0.06)
    stream = mean_over_seeds(config_of(width, initialization="fan_in"), lambda found: first(found, "attention").stream)
    assert stream == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("start", ["normal", "fan_in"])
@pytest.mark.parametrize("kind", sorted(variants()))
def test_sizes_are_those_of_the_model_that_trains(kind, start):
    """Written out from the weights of the whole model, whose attention layers alone are called."""
    fields = {"depth_scaled_residual": start == "fan_in", "qk_norm": start == "fan_in"}
    config = config_of(64, layers=3, attention_type=kind, initialization=start, **fields)
    model = build_model(config, 5).model
    ids = torch.randint(300, (1, 256), generator=torch.Generator().manual_seed(5))
    expected = []
    with torch.no_grad():
        hidden = model.embed_tokens.weight[ids] * (8 if start == "fan_in" else 1)
        positions = model.rotary_emb(hidden, torch.arange(256).unsqueeze(0))
        for layer in model.layers[:2]:
            read = rms_norm(hidden, (64,), eps=1e-5)
            attended = layer.self_attn(read, position_embeddings=positions)[0]
            expected += [(hidden, attended)]
            hidden = hidden + attended
            read = rms_norm(hidden, (64,), eps=1e-5)
            gate, up, down = (getattr(layer.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
            added = (silu(read @ gate.T) * (read @ up.T)) @ down.T
            expected += [(hidden, added)]
            hidden = hidden + added
    found = start_sizes(config, seed=5, layers=2)
    assert [(branch.layer, branch.name) for branch in found] == [
        (0, "attention"), (0, "MLP"), (1, "attention"), (1, "MLP")
    ]  # fmt: skip
    for branch, (stream, output) in zip(found, expected, strict=True):
        assert branch.stream == pytest.approx((stream**2).mean().sqrt().item(), rel=1e-4)
        assert branch.output == pytest.approx((output**2).mean().sqrt().item(), rel=1e-4)


def test_random_generators_stay_as_they_are():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    start_sizes(config_of(32))
    assert torch.equal(torch.get_rng_state(), before)


def test_of_large_models_few_layers_are_built():
    for name, preset in PRESETS.items():
        config = DiffTransformerConfig(**preset.fields)
        width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        layer_bytes = 4 * (4 * width**2 + 3 * width * inner)
        measured = measured_layers(config)
        assert 1 <= measured <= layers, name
        assert measured == 1 or measured * layer_bytes <= 2**30
        assert measured == layers or (measured + 1) * layer_bytes > 2**30


def test_a_layer_larger_than_the_limit_is_refused():
    words = r"hidden_size=65536: one layer takes \d+\.\d GiB, and its start is measured in at most 4 GiB; measure a narrower"
    with pytest.raises(ConfigError, match=words):
        start_sizes(config_of(65_536, num_attention_heads=512))


class TestWords:
    def branches(self, attention, mlp):
        return [
            Branch(layer=0, name="attention", stream=0.5, output=0.5 * attention),
            Branch(layer=0, name="MLP", stream=1.0, output=mlp),
            Branch(layer=1, name="attention", stream=1.0, output=1.0),
        ]

    def test_the_largest_branch_and_the_remedy(self):
        for branches, words in (
            (self.branches(9.06, 2), "the attention of layer 0 starts 9.1 times as large as the embeddings"),
            (self.branches(6, 7), "the MLP of layer 0 starts 7.0 times as large as the residual stream"),
        ):
            said = drowning(config_of(), branches)
            assert said.startswith(words)
            assert said.endswith("start with initialization: fan_in")

    def test_with_fan_in_the_embeddings_are_too_small(self):
        config = config_of(initialization="fan_in", embedding_multiplier=0.5)
        found = start_sizes(config, layers=1)
        assert drowning(config, found).endswith("raise embedding_multiplier, now 0.5")

    def test_five_times_is_not_too_large(self):
        assert drowning(config_of(), self.branches(5, 5)) is None

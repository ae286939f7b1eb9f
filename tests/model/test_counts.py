"""Closed formulas against real modules, torch's FLOP counter and a real cache, and the papers' sizes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM, DiffTransformerForMaskedLM
from difftransformer.errors import ConfigError
from difftransformer.model import PRESETS, count, matching_width, preset, weights_and_kv_bytes
from tests.support.tiny_models import tiny, tiny_config, tokens

TABLE_10 = {"830m": 0.83e9, "1.4b": 1.4e9, "2.8b": 2.8e9, "6.8b": 6.8e9, "13.1b": 13.1e9}
CONFIGS = {
    "diff": {},
    "untied": {"tie_word_embeddings": False},
    "grouped": {"num_key_value_heads": 2},
    "wide head": {"head_dim": 20, "num_key_value_heads": 2},
    "own heads": {"num_differential_heads": 3, "num_differential_key_value_heads": 1, "value_head_dim": 10},
    "value of one map": {"num_differential_heads": 4, "num_differential_key_value_heads": 4, "value_head_dim": 8},
    "default width": {"intermediate_size": None},
    "five layers": {"num_hidden_layers": 5},
    "diff_v2": {"attention_type": "diff_v2"},
    "diff_v2 grouped untied": {"attention_type": "diff_v2", "num_key_value_heads": 2, "tie_word_embeddings": False},
    "grouped_diff": {"attention_type": "grouped_diff"},
    "grouped_diff, one key": {"attention_type": "grouped_diff", "num_key_value_heads": 2, "lambda_form": "head"},
    "grouped_diff, own heads": {
        "attention_type": "grouped_diff", "num_differential_heads": 6, "num_noise_heads": 2, "lambda_form": "token",
        "num_differential_key_value_heads": 1, "value_head_dim": 10,
    },
    "grouped_diff_v2": {"attention_type": "grouped_diff_v2"},
    "grouped_diff_v2, options": {
        "attention_type": "grouped_diff_v2", "num_differential_heads": 8, "num_noise_heads": 4, "lambda_form": "layer",
        "num_differential_key_value_heads": 2, "value_head_dim": 6, "head_norm": "gain",
    },
    "grouped_diff_v2, no gate": {"attention_type": "grouped_diff_v2", "output_gate": False},
    "diff by head, no norm": {"lambda_form": "head", "head_norm": "none", "shared_key": True},
    "diff, learned lambda without exponentials": {"lambda_form": "scalar"},
    "diff, constant lambda": {"lambda_form": "constant", "lambda_value": -0.8, "head_scale": 0.5},
    "dex": {"attention_type": "dex"},
    "dex, chosen heads": {"attention_type": "dex", "num_hidden_layers": 3, "dex_heads": [[0], [1], [3]]},
    "softmax_norm": {"attention_type": "softmax_norm"},
    "xsa": {"attention_type": "xsa"},
    "gate, grouped": {"attention_type": "gate", "num_key_value_heads": 2, "head_dim": 10},
    "diff_xsa": {"attention_type": "diff_xsa"},
    "diff_gate": {"attention_type": "diff_gate", "value_head_dim": 12},
    "diff_v2_added": {"attention_type": "diff_v2_added"},
    "softmax": {"attention_type": "softmax"},
    "softmax, headwise norm": {"attention_type": "softmax", "softmax_head_norm": "gain"},
    "softmax, plain headwise norm": {"attention_type": "softmax", "softmax_head_norm": "plain"},
    "softmax, scaled heads": {"attention_type": "softmax", "softmax_head_scale": 5.0},
    "softmax, QK norm": {"attention_type": "softmax", "qk_norm": True, "head_dim": 10},
    "grouped_diff_v2, QK norm": {"attention_type": "grouped_diff_v2", "qk_norm": True},
    "dex, QK norm": {"attention_type": "dex", "qk_norm": True, "num_key_value_heads": 1},
    "softmax grouped untied": {"attention_type": "softmax", "num_key_value_heads": 1, "tie_word_embeddings": False},
}  # fmt: skip


def parameters_of(config):
    """Of the real module, a tied embedding once; on the meta device, so that any size is free."""
    with torch.device("meta"):
        model = DiffTransformerForCausalLM(config)
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def of_preset(name, **fields):
    return DiffTransformerConfig(**preset(name).fields | fields)


class TestParameters:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_formula_is_the_module(self, name):
        config = tiny_config(**CONFIGS[name])
        model = DiffTransformerForCausalLM(config)
        counts = count(config)
        assert counts.parameters == sum(p.numel() for p in model.parameters())
        assert counts.embedding_parameters == model.model.embed_tokens.weight.numel()
        attention = sum(p.numel() for layer in model.model.layers for p in layer.self_attn.parameters())
        assert counts.attention_parameters == attention

    @pytest.mark.parametrize("name", TABLE_10)
    def test_table_10(self, name):
        for kind in ("diff", "softmax"):
            assert count(of_preset(name, attention_type=kind)).parameters == pytest.approx(TABLE_10[name], rel=0.01)
        assert preset(name).paper_parameters == TABLE_10[name]

    def test_table_9_states_less_than_its_shape(self):
        assert count(of_preset("3b")).parameters == pytest.approx(3.48e9, abs=0.005e9)
        assert count(of_preset("3b", tie_word_embeddings=False)).parameters == pytest.approx(3.79e9, abs=0.005e9)

    @pytest.mark.parametrize(
        "config",
        [
            *(pytest.param(of_preset(name), id=name) for name in PRESETS),
            *(tiny_config(**fields) for fields in ({"num_key_value_heads": 2}, {"head_dim": 20})),
        ],
    )
    def test_presets_and_twins(self, config):
        """By formula and on the meta device; a twin has six head widths fewer in every layer."""
        twin = config.twin()
        assert (config.attention_type, twin.attention_type) == ("diff", "softmax")
        ours, theirs = (count(each).parameters for each in (config, twin))
        assert (ours, theirs) == (parameters_of(config), parameters_of(twin))
        assert ours - theirs == config.num_hidden_layers * 6 * config.head_dim

    def test_a_size_counted_by_others(self):
        """876,553,728 against 876,567,552 (arXiv:2504.00927 Table 8): a difference of 13,824 = 24 layers * 6 * 96."""
        config = of_preset("830m")
        assert count(config).parameters - count(config.twin()).parameters == 876_567_552 - 876_553_728

    def test_unknown_preset(self):
        with pytest.raises(ConfigError, match=r"preset '7b' is unknown; choose one of tiny, small, 830m"):
            preset("7b")


class TestMatchingWidth:
    @pytest.mark.parametrize("kind", ["diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex", "gate", "diff_gate"])
    @pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 4, "num_attention_heads": 8, "hidden_size": 64}])
    def test_the_real_modules_have_equal_parameters(self, kind, fields):
        config = tiny_config(attention_type=kind, **fields)
        wanted = parameters_of(config.twin())
        config.intermediate_size = matching_width(config, wanted)
        found = parameters_of(config)
        assert abs(found - wanted) <= 1.5 * config.hidden_size * config.num_hidden_layers
        assert found == pytest.approx(wanted, rel=0.005)

    def test_too_small_a_number(self):
        with pytest.raises(ConfigError, match="'diff_v2' has 12,608 parameters without its MLP, and 9,000 are to be"):
            matching_width(tiny_config(attention_type="diff_v2"), 9000)


class TestFlops:
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"num_key_value_heads": 2, "value_head_dim": 12},
            {"attention_type": "softmax"},
            {"attention_type": "grouped_diff", "value_head_dim": 12},
            {"attention_type": "dex", "dex_heads": [[0, 1, 3]] * 2},
            {"attention_type": "gate"},
            {"attention_type": "diff_gate", "value_head_dim": 12},
            {"is_causal": False},
        ],
    )
    def test_against_torchs_counter(self, fields):
        """Torch counts matrix products only, as the formula does, but the reference backend forms whole maps.

        The formula counts the half that a causal model needs, and all of what others need; the rest of the maps is added here.
        """
        batch, length = 2, 24
        if fields.get("is_causal", True):
            model = tiny(implementation="eager", **fields).train()
        else:
            model = DiffTransformerForMaskedLM(tiny_config(attn_backend="reference", **fields))
        config = model.config
        ids = tokens(batch, length)
        with FlopCounterMode(display=False) as forward:
            loss = model(ids).logits.sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        counts = count(config, context_tokens=length)
        layers, hidden, d = config.num_hidden_layers, config.num_attention_heads, config.head_dim
        value = hidden * d  # all heads' values together, the same for the twin
        if "value_head_dim" in fields:
            value = hidden // 2 * fields["value_head_dim"]
        maps = 1 if config.attention_type in ("softmax", "dex", "gate") else 2
        heads = hidden // maps
        if config.attention_type == "grouped_diff":
            heads = hidden * 3 // 4  # three signal heads form a noise head's map each
            value = heads * fields["value_head_dim"]
        per_pair = 2 * (heads * maps * d + value)
        never_seen = length * length - length * (length + 1) // 2 if config.is_causal else 0
        expected = batch * (length * counts.forward_flops_per_token + layers * never_seen * per_pair)
        assert forward.get_total_flops() == expected
        assert backward.get_total_flops() == 2 * expected
        assert counts.train_flops_per_token == 3 * counts.forward_flops_per_token

    def test_a_window_and_the_context(self):
        """Pairs counted one by one."""
        for window in (None, 1, 5, 40):
            config = tiny_config(sliding_window=window)
            linear = 2 * (count(config).parameters - 2 * (2 * 32 + 6 * 8) - 32)  # every weight but norms and lambdas
            for context in (1, 7, 40):
                pairs = sum(min(t + 1, window or context) for t in range(context))
                expected = linear + 2 * pairs / context * 2 * 2 * (16 + 16)
                assert count(config, context_tokens=context).forward_flops_per_token == round(expected)

    def test_the_default_context(self):
        config = tiny_config()
        assert count(config).context_tokens == 128
        assert count(config) == count(config, context_tokens=128)

    def test_twins_cost_the_same(self):
        config = of_preset("830m")
        assert count(config).forward_flops_per_token == count(config.twin()).forward_flops_per_token


class TestCacheBytes:
    @pytest.mark.parametrize(
        ("name", "dtype"), [*((name, torch.float32) for name in CONFIGS), ("diff", torch.bfloat16)]
    )
    def test_against_a_real_cache(self, name, dtype):
        config = tiny_config(**CONFIGS[name])
        model = DiffTransformerForCausalLM(config).to(dtype).eval()
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(tokens(3, 11), past_key_values=cache)
        held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
        counts = count(config, cache_itemsize=dtype.itemsize)
        assert 3 * 11 * counts.kv_bytes_per_token == held
        total = weights_and_kv_bytes(counts, 11, batch=3, itemsize=dtype.itemsize)
        assert total == counts.parameters * dtype.itemsize + held

    def test_twins_hold_the_same(self):
        config = of_preset("3b")
        assert count(config).kv_bytes_per_token == count(config.twin()).kv_bytes_per_token == 28 * 2 * 3072 * 2

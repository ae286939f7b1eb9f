"""The configuration: what it derives, and what it refuses in which words."""

import re

import pytest

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.errors import ConfigError, DiffTransformerError
from tests.support.tiny_models import tiny_config

COUNTS = {"num_hidden_layers": 0, "num_attention_heads": 0, "hidden_size": 0, "vocab_size": 0, "intermediate_size": 0}
COUNTS |= {"value_head_dim": -2}
REFUSED = [
    (
        {"hidden_size": 36, "num_attention_heads": 3},
        "num_attention_heads=3 is odd: attention_type='diff' makes one differential head of two heads",
    ),
    ({"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads=3 is odd"),
    (
        {"hidden_size": 30},
        "hidden_size=30 is not a multiple of num_attention_heads=4; change one of them or set head_dim",
    ),
    (
        {"head_dim": 4},
        "head_dim=4 is half of hidden_size / num_attention_heads = 8: head_dim describes the same-size Transformer",
    ),
    ({"head_dim": 7}, "head_dim=7 is odd; rotary embedding turns pairs"),
    ({"attention_type": "softmax", "num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_key_value_heads=3"),
    (
        {"num_differential_heads": 3, "num_differential_key_value_heads": 2},
        "num_heads=3 is not a multiple of num_key_value_heads=2",
    ),
    ({"sliding_window": 0}, "sliding_window=0: give a whole number of at least 1"),
    ({"sliding_window": -4}, "sliding_window=-4"),
    ({"sliding_window": "4"}, "sliding_window='4': give a whole number of at least 1"),
    ({"max_position_embeddings": 0}, "max_position_embeddings=0: give a whole number of at least 1"),
    ({"is_causal": "x"}, "is_causal: expected bool, got 'x'"),
    ({"use_cache": 2}, "use_cache: expected bool, got 2"),
    ({"pad_token_id": 61}, "pad_token_id=61: the vocabulary has 61 tokens; give one of them or None"),
    ({"hidden_act": ["silu"]}, "hidden_act=['silu'] is not an activation"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5: all features of a head are turned; leave it out",
    ),
    ({"rope_parameters": "default"}, "rope_parameters='default': give rope_theta as a number above 0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "give rope_theta as a number above 0"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1: differential attention has no dropout"),
    ({"attention_type": "dif"}, "attention_type='dif' is unknown; choose one of softmax, diff"),
    ({"initialization": "xavier"}, "initialization='xavier' is unknown; choose one of fan_in, normal"),
    *(({name: value}, f"{name}={value}: give a whole number of at least 1") for name, value in COUNTS.items()),
    ({"hidden_size": 32.0}, "hidden_size=32.0: give a whole number of at least 1"),
    ({"initializer_range": 0.0}, "initializer_range=0.0: give a standard deviation above 0"),
    ({"initializer_range": -1.0}, "initializer_range=-1.0: give a finite number of at least 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5': give a finite number of at least 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: give a finite number of at least 0"),
    ({"attn_backend": "foo"}, "attn_backend='foo' is unknown; choose one of auto, reference, cpu, "),
    ({"hidden_act": "foo"}, "hidden_act='foo' is not an activation of transformers"),
    ({"rope_parameters": {"rope_type": "default"}}, "give rope_theta as a number"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=str)
def test_refused(fields, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        tiny_config(**fields)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DiffTransformerError)


def test_minus_one_is_a_padding_token_as_in_llama():
    config = tiny_config(pad_token_id=-1)
    assert DiffTransformerForCausalLM(config).config.pad_token_id == -1


def test_odd_heads_are_fine_for_the_twin_and_for_stated_heads():
    odd = {"hidden_size": 36, "num_attention_heads": 3}
    assert tiny_config(attention_type="softmax", **odd).head_layout().num_heads == 3
    stated = tiny_config(num_differential_heads=3, num_differential_key_value_heads=3, **odd)
    assert (stated.head_layout().num_heads, stated.head_layout().value_head_dim) == (3, 24)
    with pytest.raises(ConfigError, match="num_attention_heads=3 is odd"):
        tiny_config(attention_type="softmax", **odd).twin("diff")


def test_a_halved_head_is_fine_for_stated_heads():
    layout = tiny_config(head_dim=4, num_differential_heads=4, num_differential_key_value_heads=4).head_layout()
    assert (layout.num_heads, layout.head_dim, layout.value_head_dim) == (4, 4, 8)


def test_layout_of_diff():
    """Half as many heads, each with two maps of the twin's width and a value of twice that (arXiv:2410.05258 section 2.1)."""
    layout = tiny_config(hidden_size=64, num_attention_heads=8, num_key_value_heads=4).head_layout()
    assert (layout.num_heads, layout.num_key_value_heads) == (4, 2)
    assert (layout.head_dim, layout.query_width, layout.key_width, layout.value_head_dim) == (8, 16, 16, 16)


def test_defaults():
    config = DiffTransformerConfig(hidden_size=3072, num_attention_heads=24)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (128, 24, 8192)
    assert config.attention_type == "diff"
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert DiffTransformerConfig(rope_theta=640_000.0).rope_parameters["rope_theta"] == 640_000.0
    assert DiffTransformerConfig(hidden_size=1536, num_attention_heads=16).intermediate_size == 4096


def test_twin_changes_one_word():
    config = tiny_config(sliding_window=5)
    twin = config.twin()
    ours, theirs = config.to_dict(), twin.to_dict()
    assert {key for key in ours if ours[key] != theirs[key]} == {"attention_type"}
    assert config.attention_type == "diff"  # the original is untouched
    assert twin.twin("diff").to_dict() == ours


def test_the_tensor_parallel_plan_follows_the_attention_type_whatever_is_assigned():
    """transformers 5.19 assigns the plan of tied embeddings to every configuration."""
    config = tiny_config()
    plan = config.base_model_tp_plan
    config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise"}
    assert config.base_model_tp_plan == plan != config.twin("diff_v2").base_model_tp_plan

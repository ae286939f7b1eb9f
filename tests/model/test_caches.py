"""Caches that others allocate from the configuration: its heads per layer are those of the tensors that layers cache."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.configuration_utils import get_head_shapes

from difftransformer.attention import VARIANTS
from difftransformer.errors import ShapeError
from tests.support import generation
from tests.support.tiny_models import tiny, tokens

GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize("attention_type", VARIANTS)
def test_heads_per_layer_are_those_of_the_cache(attention_type):
    model = tiny(attention_type=attention_type, **GROUPED)
    filled = model(tokens(1, 3)).past_key_values.layers
    heads, width = get_head_shapes(model.config)
    allocated = StaticCache(config=model.config, max_cache_len=5)
    allocated.early_initialization(1, heads, width, torch.float32, "cpu")
    for layer, place in zip(filled, allocated.layers, strict=True):
        assert layer.keys.shape == layer.values.shape == (1, heads, 3, width)
        assert place.keys.shape == place.values.shape == (1, heads, 5, width)
    expected = model(tokens(1, 3)).logits
    assert torch.equal(model(tokens(1, 3), past_key_values=allocated).logits, expected)
    assert model._get_static_cache_init_shape() == (heads, width)
    assert (model.config.num_key_value_heads, model.config.head_dim) == (4, 4)


def test_unequal_widths_are_allocated_at_the_first_update():
    model = tiny(attention_type="diff", shared_key=True)
    keys, values = (getattr(model(tokens(1, 3)).past_key_values.layers[0], name) for name in ("keys", "values"))
    assert keys.shape[-1] != values.shape[-1]
    assert model._get_static_cache_init_shape() is None


def cache_of(model, heads, width):
    """Four cached positions of drawn keys and values, as (B, 4, heads * width) and in heads of this width."""
    draw = torch.Generator().manual_seed(2)
    rows = [torch.randn(2, 2, 4, heads * width, generator=draw) for _ in range(model.config.num_hidden_layers)]
    return DynamicCache(
        [tuple(states.unflatten(-1, (heads, width)).transpose(1, 2) for states in pair) for pair in rows]
    )


def test_heads_of_the_configuration_become_those_of_the_layers():
    model = tiny(attention_type="diff", **GROUPED)
    theirs, ours = cache_of(model, 4, 4), cache_of(model, 2, 8)
    assert theirs.layers[0].keys.shape == (2, 4, 4, 4)
    with torch.no_grad():
        expected, found = (model(tokens(2, 3), past_key_values=cache) for cache in (ours, theirs))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(theirs.layers[1].values, ours.layers[1].values)


def test_another_number_of_values_is_refused():
    model = tiny(attention_type="grouped_diff", num_attention_heads=8, num_noise_heads=2)
    with pytest.raises(ShapeError, match="8 heads of width 4 as values, this attention caches 2 of width 24"):
        model(tokens(2, 3), past_key_values=cache_of(model, 8, 4))
    model = tiny(attention_type="grouped_diff_v2", **GROUPED)
    with pytest.raises(ShapeError, match="4 heads of width 4 as keys, this attention caches 2 of width 4"):
        model(tokens(2, 3), past_key_values=cache_of(model, 4, 4))


@pytest.mark.parametrize("attention_type", VARIANTS)
def test_quantized(attention_type, monkeypatch):
    model = generation.tiny(attention_type=attention_type, **GROUPED)
    generation.check_quantized_cache(model, tokens(2, 21), monkeypatch)

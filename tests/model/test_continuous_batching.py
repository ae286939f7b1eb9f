"""transformers' continuous batching, with pages of 4 tokens and passes of 16, against `generate` of each prompt alone."""

import logging

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache

from tests.support.tiny_models import tiny

PROMPTS = [list(range(3, 3 + length)) for length in (5, 9, 17, 2)]  # the third needs two passes
NEW = 12
FIVE = {"num_attention_heads": 5, "head_dim": 8}
VARIANTS = {
    "softmax": {"attention_type": "softmax"},
    "diff": {"num_key_value_heads": 2},
    "diff with a window": {"sliding_window": 7},
    "diff with a narrow value": {"value_head_dim": 8},
    "diff_v2": {"attention_type": "diff_v2", "num_key_value_heads": 2},
    "grouped_diff": FIVE | {"attention_type": "grouped_diff", "num_key_value_heads": 2},
    "grouped_diff with more keys": FIVE | {"attention_type": "grouped_diff"},
    "grouped_diff_v2": FIVE | {"attention_type": "grouped_diff_v2"},
    "xsa": {"attention_type": "xsa", "num_key_value_heads": 2},
    "dex": {"attention_type": "dex", "dex_heads": [[0, 2], [1, 3]]},
}


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def batched(model):
    """The new tokens of every prompt by `generate_batch`."""
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=4, num_blocks=48, max_batch_tokens=16),
    )
    assert [output.error for output in outputs.values()] == [None] * len(PROMPTS)
    return [output.generated_tokens for output in outputs.values()]


def alone(model):
    new = [model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW) for prompt in PROMPTS]
    return [row[0, len(prompt) :].tolist() for prompt, row in zip(PROMPTS, new, strict=True)]


def check(implementation, fields):
    model = tiny(tie_word_embeddings=False, implementation=implementation, **fields)
    before = model.config._attn_implementation
    expected = alone(model)
    assert max(len(set(row)) for row in expected) > 4  # not a token repeated
    assert batched(model) == expected
    assert model.config._attn_implementation == before


def test_greedy_tokens(monkeypatch):
    shapes = []
    make = PagedAttentionCache.__init__

    def recorded(cache, *arguments, **options):
        make(cache, *arguments, **options)
        shapes.extend(allocator.cache_tensor.shape[1:] for allocator in cache.cache_allocators.values())

    monkeypatch.setattr(PagedAttentionCache, "__init__", recorded)
    check(None, VARIANTS["diff"])
    assert shapes == [(2, 1, 16)]  # a key of 2 D and a value of 2 D for one group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "implementation"), [*((name, None) for name in VARIANTS), ("softmax", "eager"), ("diff", "eager")]
)
def test_greedy_tokens_of_variants(variant, implementation):
    check(implementation, VARIANTS[variant])

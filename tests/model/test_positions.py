"""Positions that jump: the logits and gradients of transformers' Llama with the same weights, and of the equations."""

import itertools

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from difftransformer.attention import variants
from difftransformer.model.masks import packed_starts
from tests.support import independent_model
from tests.support.oracle import relative_error
from tests.support.tiny_models import BASE, shape_of, tiny, tokens

LENGTH, GROUPS, WIDTH = 12, 2, 8
POSE = (*range(5), *range(40, 47)), (*range(3), *range(90, 99))  # skip-wise training, arXiv:2309.10400
SAMPLED = (3, 4, 9, 10, 11, 30, 31, 50, 51, 77, 90, 99), (0, 7, 8, 9, 20, 21, 22, 40, 60, 61, 62, 63)
OFF = {"lambda_form": "constant", "lambda_value": 0.0, "head_norm": "none"}
KINDS = {
    "softmax": {"attention_type": "softmax"},
    "diff": {"attention_type": "diff", **OFF, "num_differential_heads": 4, "num_differential_key_value_heads": GROUPS},
    "diff_v2": {"attention_type": "diff_v2", **OFF},
}


def twice(weight, heads):
    """The rows of each head for its two maps."""
    return weight.unflatten(0, (heads, 1, -1)).expand(-1, 2, -1, -1).flatten(0, 2)


def pair(kind):
    """A model whose first maps are a Llama's, and that Llama."""
    twin = tiny(attention_type="softmax", num_key_value_heads=GROUPS, tie_word_embeddings=False)
    sizes = {name: value for name, value in BASE.items() if name != "initialization"} | {"num_key_value_heads": GROUPS}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "bos_token_id": None}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **rotary, rms_norm_eps=1e-5, tie_word_embeddings=False)).eval()
    llama.load_state_dict(twin.state_dict(), strict=True)
    widths = {"value_head_dim": WIDTH} if kind == "diff" else {}
    model = tiny(num_key_value_heads=GROUPS, tie_word_embeddings=False, **KINDS[kind], **widths)
    weights = llama.state_dict()
    for name, weight in weights.items():
        if kind != "softmax" and "q_proj" in name:
            weights[name] = twice(weight, 4)
        if kind == "diff" and "k_proj" in name:
            weights[name] = twice(weight, GROUPS)
    model.load_state_dict(weights, strict=True)
    return model, llama


def check(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_llama(kind):
    """Without a mask as well as with one, and with a cache, to which Llama does not apply its own rule of packed rows."""
    (model, llama), ids, ones = pair(kind), tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    padded = ones.clone()
    padded[1, :4] = 0
    for positions in map(torch.tensor, (POSE, SAMPLED)):
        for mask, use_cache in itertools.product((None, ones, padded), (False, True)):
            real = ones.bool() if mask is None else mask.bool()
            given = {"position_ids": positions, "use_cache": use_cache}
            expected = llama(ids, attention_mask=ones if mask is None else mask, **given).logits
            for implementation in ("difftransformer", "eager", "sdpa"):
                model.set_attn_implementation(implementation)
                check(model(ids, attention_mask=mask, **given).logits[real], expected[real])


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_llama(kind):
    (model, llama), ids = pair(kind), tokens(2, LENGTH)
    given = {"position_ids": torch.tensor(POSE), "labels": ids}
    ours, theirs = model.train()(ids, **given), llama.train()(ids, attention_mask=torch.ones_like(ids), **given)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), abs=1e-5)
    ours.loss.backward()
    theirs.loss.backward()
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight"):
        assert relative_error(model.get_parameter(name).grad, llama.get_parameter(name).grad) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_evicted_tokens_and_jumps_beside_a_cache(kind, masked):
    """Part of the cached tokens are dropped; then several tokens come, with a jump among them, and one more."""
    (model, llama), ids, found = pair(kind), tokens(2, LENGTH), []
    for each in (model, llama):
        cache, logits = DynamicCache(config=each.config), []
        each(ids[:, :7], past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = (states[:, :, [0, 4, 5, 6]] for states in (layer.keys, layer.values))
        for part, positions in ((slice(7, 11), [7, 8, 30, 31]), (slice(11, 12), [60])):
            width = 4 + part.stop - 7
            mask = torch.ones(2, width, dtype=torch.long) if masked else None
            positions = torch.tensor([positions] * 2)
            logits.append(each(ids[:, part], attention_mask=mask, position_ids=positions, past_key_values=cache).logits)
        found.append(torch.cat(logits, 1))
    check(*found)


@pytest.mark.parametrize("kind", variants())
@torch.no_grad()
def test_every_type_sees_what_lies_before_a_jump(kind):
    model, ids = tiny(attention_type=kind), tokens(2, LENGTH)
    shape, weights = shape_of(model.config), model.state_dict()
    for positions in map(torch.tensor, (POSE, SAMPLED)):
        rows = zip(ids, positions, strict=True)
        expected = torch.stack([independent_model.run(weights, shape, row, positions=at)[0] for row, at in rows])
        for use_cache in (False, True):
            assert relative_error(model(ids, position_ids=positions, use_cache=use_cache).logits, expected) < 1e-5


@pytest.mark.parametrize(
    ("positions", "mask", "starts"),
    [
        ([0, 1, 2, 7, 8, 20], None, []),
        ([0, 1, 0, 0, 1, 4, 2], None, [2, 3, 6]),  # a document of one token, and one that starts again at 2
        ([5, 6, 5, 6, 1, 1], None, [2, 4]),
        ([1, 1, 0, 1, 2, 3], [0, 0, 1, 1, 1, 1], []),  # padding on the left, as generate numbers it
        ([0, 1, 2, 0, 0, 1], [1, 1, 1, 0, 1, 1], [4]),  # padding between two documents
        ([0, 1, 1, 2, 0, 0], [1, 1, 0, 1, 0, 0], []),  # a token that is left out, and padding on the right
    ],
)
def test_where_documents_start(positions, mask, starts):
    mask = None if mask is None else torch.tensor([mask])
    assert packed_starts(torch.tensor([positions]), mask)[0].nonzero().flatten().tolist() == starts

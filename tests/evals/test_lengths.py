"""Models whose keys depend on the length of a row: an answer is that of its request alone, on both sides of every change."""

import copy
from functools import partial

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from difftransformer import DiffTransformerConfig
from difftransformer_lab.evals import CausalLanguageModel
from difftransformer_lab.evals.models import causal, prefix
from difftransformer_lab.evals.probes import LastRow
from difftransformer_lab.evals.requests import Choice, Continuation, Loss, Predictions, ScoredContinuation
from tests.support.answering import answers_to, plain_choice

CHANGE, POSITIONS = 20, 64  # rows of more tokens than these have other tables
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": POSITIONS}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHORT, LONG = [1.0, 1.2, 2.0, 1.0], [3.0, 1.5, 4.0, 6.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": SHORT, "long_factor": LONG}
LONGROPE |= {"original_max_position_embeddings": CHANGE, "factor": POSITIONS / CHANGE}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": CHANGE}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": CHANGE}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
ours = partial(DiffTransformerConfig, initialization="normal", **SIZES)
llama = partial(LlamaConfig, **SIZES)
few = {"num_local_experts": 2, "num_experts_per_tok": 1}

# Its configuration, and the number of tokens beyond which its tables are others; None for tables that stay.
KINDS = {
    "llama": (llama(rope_parameters=DEFAULT), None),
    "llama linear": (llama(rope_parameters=LINEAR), None),
    "llama yarn": (llama(rope_parameters=YARN), None),
    "llama llama3": (llama(rope_parameters=LLAMA3), None),
    "llama dynamic": (llama(rope_parameters=DYNAMIC), POSITIONS),
    "llama longrope": (llama(rope_parameters=LONGROPE), CHANGE),
    "phi3 longrope": (Phi3Config(rope_parameters=LONGROPE, original_max_position_embeddings=CHANGE, **SIZES), CHANGE),
    "phi3 longrope, sliding": (
        Phi3Config(rope_parameters=LONGROPE, original_max_position_embeddings=CHANGE, sliding_window=9, **SIZES), CHANGE,
    ),
    "phimoe longrope": (
        PhimoeConfig(rope_parameters=LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.4}, **few, **SIZES), CHANGE,
    ),
    "diff longrope": (ours(attention_type="diff", rope_parameters=LONGROPE), CHANGE),
    "softmax dynamic": (ours(attention_type="softmax", rope_parameters=DYNAMIC), POSITIONS),
    "diff_v2 yarn": (ours(attention_type="diff_v2", rope_parameters=YARN), None),
    "diffllama dynamic": (DiffLlamaConfig(rope_parameters=DYNAMIC, **SIZES), POSITIONS),
    "gemma3 dynamic, sliding": (
        Gemma3TextConfig(
            head_dim=8, sliding_window=9, layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"sliding_attention": DEFAULT, "full_attention": DYNAMIC}, **SIZES,
        ), POSITIONS,
    ),
    "mistral, sliding": (MistralConfig(sliding_window=9, rope_parameters=DEFAULT, **SIZES), None),
    "gpt2, learned positions": (
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, initializer_range=0.3), None,
    ),
    "neox, partly rotated": (GPTNeoXConfig(rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}, **SIZES), None),
    "jamba, a state": (
        JambaConfig(attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, **SIZES), None,
    ),
}  # fmt: skip


def made(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(KINDS[kind][0], attn_implementation=None).eval()


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    monkeypatch.setattr(causal, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(prefix, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(causal, "_STEP_TOKENS", 0)
    return request.param


def rows_around(change, beyond):
    """Rows with a common beginning, below, at and above the change, the longest first: what it leaves must not be found."""
    draw = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 97, (90,), generator=draw).tolist()
    lengths = (
        [change + 12, change - 8, change - 1, change, change + 1, change + 4] if beyond else [40, 12, 19, 20, 21, 33]
    )
    return [(*shared[: length - 2], *torch.randint(3, 97, (2,), generator=draw).tolist()) for length in lengths]


def logits(network, row):
    """Logits (T, V) of one row, in one pass of a model that has seen no other."""
    with torch.no_grad():
        return copy.deepcopy(network)(input_ids=torch.tensor([row]), use_cache=False).logits[0]


def test_an_answer_is_that_of_its_whole_row_alone(kind):
    """Losses, predictions, greedy continuations with the loss of given ones, and choices, asked together in one go."""
    network, change = made(kind), KINDS[kind][1]
    alone = copy.deepcopy(network)
    context = 2 * POSITIONS if change == POSITIONS else POSITIONS
    model = CausalLanguageModel(network, None, context_tokens=context)
    assert model.is_whole == (change is not None)
    rows = rows_around(change or CHANGE, change == POSITIONS)
    options = ((3, 4), (3, 5, 6, 7), (8, 9), (3, 5, 6, 10))
    rights = [(50, 7, 33)[: 1 + place % 3] for place in range(len(rows))]
    requests = [Loss(row) for row in rows] + [Predictions(row, tuple(range(len(row)))) for row in rows]
    requests += [ScoredContinuation(row, 3, right=right) for row, right in zip(rows, rights, strict=True)]
    requests += [Choice(row, options) for row in rows]
    found = iter(answers_to(model, requests))
    for row in rows:
        expected = -torch.log_softmax(logits(alone, row[:-1]), -1)[range(len(row) - 1), row[1:]]
        torch.testing.assert_close(torch.tensor(next(found)), expected, rtol=1e-3, atol=1e-4)
    for row in rows:
        assert next(found) == logits(alone, row).argmax(-1).tolist()
    for row, right in zip(rows, rights, strict=True):
        answer, path = next(found), list(row)
        losses = -torch.log_softmax(logits(alone, (*row, *right[:-1]))[len(row) - 1 :], -1)[range(len(right)), right]
        torch.testing.assert_close(torch.tensor(answer["losses"]), losses, rtol=1e-3, atol=1e-4)
        for _ in range(3):
            path.append(int(logits(alone, path)[-1].argmax()))
        assert answer["ids"] == path[len(row) :]
    for row in rows:
        assert next(found) == plain_choice(copy.deepcopy(alone), row, options)


@pytest.mark.parametrize("kind", ["diff longrope", "llama longrope", "softmax dynamic"])
def test_the_last_row_is_that_of_the_maps_of_its_whole_row(kind):
    network, change = made(kind), KINDS[kind][1]
    alone = copy.deepcopy(network)
    model = CausalLanguageModel(network, None, context_tokens=2 * POSITIONS)
    rows = rows_around(change, True)
    probed = dict(model.probe([LastRow(row, (0, 5, len(row))) for row in rows]))
    for place, row in enumerate(rows):
        fresh = copy.deepcopy(alone)
        fresh.set_attn_implementation("eager")
        with torch.no_grad():
            maps = fresh(input_ids=torch.tensor([row]), output_attentions=True).attentions
        for layer, weights in enumerate(maps):
            last = weights[0, :, -1]
            expected = torch.stack([last[:, :5].sum(-1), last[:, 5:].sum(-1)], -1)
            torch.testing.assert_close(torch.tensor(probed[place])[layer][:, 0], expected, rtol=1e-4, atol=1e-5)


def test_tables_that_change_beyond_the_context_cost_nothing():
    """A context within the change keeps its cache, and a model that has read longer rows begins as a new one."""
    network = made("llama dynamic")
    with torch.no_grad():
        network(input_ids=torch.ones(1, 3 * POSITIONS, dtype=torch.long))
    assert not CausalLanguageModel(network, None).is_whole
    row = rows_around(POSITIONS, True)[0]
    model = CausalLanguageModel(network, None, context_tokens=2 * POSITIONS)
    assert model.is_whole
    (found,) = answers_to(model, [Loss(row)])
    expected = -torch.log_softmax(logits(made("llama dynamic"), row[:-1]), -1)[range(len(row) - 1), row[1:]]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)
    assert not CausalLanguageModel(made("phi3 longrope"), None, context_tokens=CHANGE).is_whole


def test_rows_that_end_at_their_own_place_are_computed_whole():
    network = made("llama longrope")
    model = CausalLanguageModel(network, None)
    draw = torch.Generator().manual_seed(1)
    rows = [tuple(row) for row in torch.randint(3, 97, (3, CHANGE - 2), generator=draw).tolist()]
    whole = answers_to(model, [Continuation(row, 6) for row in rows])
    requests = [Continuation(row, 2 + 2 * place) for place, row in enumerate(rows)]
    assert answers_to(model, requests) == [one[: 2 + 2 * place] for place, one in enumerate(whole)]

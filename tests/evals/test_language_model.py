"""A model's answers: greedy continuation is generate's, choices are masked decoding's, weights are the maps' last row."""

from itertools import pairwise

import pytest
import torch
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicLayer

from difftransformer import DiffTransformerConfig
from difftransformer.errors import EvaluationError
from difftransformer.train import build_model
from difftransformer_lab.evals import CausalLanguageModel
from difftransformer_lab.evals.models import causal, prefix
from difftransformer_lab.evals.models.prefix import PrefixCache
from difftransformer_lab.evals.probes import LastRow
from difftransformer_lab.evals.requests import Choice, Continuation, Loss, ScoredContinuation
from tests.support.answering import answers_to, plain_choice

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.3}  # large, so that every token says something else


@pytest.fixture(params=["diff", "softmax"])
def model(request):
    config = DiffTransformerConfig(attention_type=request.param, initialization="normal", eos_token_id=5, **SIZES)
    return build_model(config, seed=3).eval()


@pytest.fixture
def prompts():
    return torch.randint(97, (5, 20), generator=torch.Generator().manual_seed(0))


def ask(model, requests, **options):
    return answers_to(CausalLanguageModel(model, None, **options), requests)


def rows_of(prompts):
    return [tuple(row) for row in prompts.tolist()]


@pytest.mark.parametrize("batch_tokens", [16_384, 45, 1])
def test_continuation_is_that_of_generate(model, prompts, batch_tokens):
    requests = [Continuation(row, 12) for row in rows_of(prompts)]
    found = torch.tensor(ask(model, requests, batch_tokens=batch_tokens))
    expected = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, min_new_tokens=12, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(found, expected[:, 20:])
    assert len(set(found.flatten().tolist())) > 5


def test_an_end_of_text_does_not_stop_a_row(model, prompts):
    """`eos_token_id` is a token like others here: every token asked for is made, as the model would make it."""
    requests = [Continuation(row, 4) for row in rows_of(prompts)]
    made = ask(model, requests)
    model.config.eos_token_id = model.generation_config.eos_token_id = made[0][0]
    assert ask(model, requests) == made


def test_a_stop_ends_a_row_and_is_not_part_of_it(model, prompts):
    """Each row ends where its own stop or its own length says, whatever the others beside it do."""
    whole = ask(model, [Continuation(row, 9) for row in rows_of(prompts)])
    stops = [made[5] for made in whole]
    requests, expected = [], []
    for place, (row, made, stop) in enumerate(zip(rows_of(prompts), whole, stops, strict=True)):
        requests.append(Continuation(row, 9 - place, (stop,) if place % 2 else ()))
        expected.append(made[: min(9 - place, made.index(stop) if place % 2 else 9)])
    assert len({len(row) for row in expected}) > 2
    assert ask(model, requests) == expected
    first = whole[0][0]
    assert ask(model, [Continuation(rows_of(prompts)[0], 8, (first,))]) == [[]]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_leading_token_stops_a_row_only_behind_others(model, prompts, prefix_caching):
    """The first two tokens of an answer may begin it; anywhere else either of them ends it."""
    row = rows_of(prompts)[0]
    (made,) = ask(model, [Continuation(row, 40)])
    leading = tuple(made[:2])
    ends = [place for place in range(2, 40) if made[place] in leading and not set(made[:place]) <= set(leading)]
    end = min(ends, default=40)
    requests = [Continuation(row, 40, leading, leading)] * 2
    assert ask(model, requests, prefix_caching=prefix_caching) == [made[:end]] * 2
    assert Continuation(row, 4, (1, 2), (1,)).ends((), 2)
    assert not Continuation(row, 4, (1, 2), (1,)).ends((1, 1), 1)
    assert Continuation(row, 4, (1, 2), (1,)).ends((1, 7), 1)


@pytest.mark.parametrize("shares_a_prefix", [False, True])
def test_a_closing_token_ends_a_row_and_is_part_of_it(model, prompts, shares_a_prefix, monkeypatch):
    monkeypatch.setattr(causal, "_STEP_TOKENS", 0)
    if shares_a_prefix:
        prompts[:, :15] = prompts[0, :15]
    rows = rows_of(prompts)
    whole = ask(model, [Continuation(row, 9) for row in rows])
    stops = [made[5] for made in whole]
    requests = [Continuation(row, 9, (stop,), closing=(stop,)) for row, stop in zip(rows, stops, strict=True)]
    expected = [made[: made.index(stop) + 1] for made, stop in zip(whole, stops, strict=True)]
    assert ask(model, requests) == expected


RIGHT = [(3, 50, 7), (96,), (5, 5, 5, 5), (1, 2), (9, 80, 33)]


@pytest.mark.parametrize("batch_tokens", [16_384, 45])
@pytest.mark.parametrize("shares_a_prefix", [False, True])
def test_losses_of_right_continuations_are_those_of_whole_rows(
    model, prompts, batch_tokens, shares_a_prefix, monkeypatch
):
    """Continuations of different lengths, in batches and behind a common prefix; what is continued stays the same."""
    monkeypatch.setattr(causal, "_STEP_TOKENS", 0)
    if shares_a_prefix:
        prompts[:, :15] = prompts[0, :15]
    rows = rows_of(prompts)
    requests = [ScoredContinuation(row, 4, right=right) for row, right in zip(rows, RIGHT, strict=True)]
    found = ask(model, requests, batch_tokens=batch_tokens)
    assert [one["ids"] for one in found] == ask(model, [Continuation(row, 4) for row in rows])
    for row, right, one in zip(rows, RIGHT, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*row, *right]])).logits[0, 19:-1].double()
        expected = -torch.log_softmax(logits, -1)[range(len(right)), right]
        assert one["losses"] == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize("shares_a_prefix", [False, True])
def test_losses_of_right_continuations_beside_a_sliding_window(prompts, shares_a_prefix, monkeypatch):
    """A cache that has lost earlier tokens cannot be cut behind the prompt."""
    monkeypatch.setattr(causal, "_STEP_TOKENS", 0)
    torch.manual_seed(0)
    config = MistralConfig(sliding_window=8, num_key_value_heads=2, intermediate_size=64, **SIZES)
    model = MistralForCausalLM(config).eval()
    if shares_a_prefix:
        prompts[:, :15] = prompts[0, :15]
    rows = rows_of(prompts)
    requests = [ScoredContinuation(row, 4, right=right) for row, right in zip(rows, RIGHT, strict=True)]
    found = ask(model, requests)
    assert [one["ids"] for one in found] == ask(model, [Continuation(row, 4) for row in rows])
    for row, right, one in zip(rows, RIGHT, found, strict=True):
        (expected,) = ask(model, [Loss((*row, *right), first=20)])
        assert one["losses"] == pytest.approx(expected, rel=1e-4)


def test_losses_cost_the_tokens_of_the_answer_alone(model, prompts):
    """The prompt is computed once, and its answer's tokens in one pass more."""
    row, right = rows_of(prompts)[0], (3, 50, 7)
    cache = PrefixCache(model)
    first, *_ = cache.continued_logits(row, right[:-1])
    assert cache.computed_tokens == 20 + 2
    assert torch.allclose(cache.next_logits(row), first, atol=1e-5)
    assert cache.computed_tokens == 20 + 2 + 1


@pytest.mark.parametrize("batch_tokens", [16_384, 45])
def test_last_row_is_the_sum_of_the_maps_last_row(model, prompts, batch_tokens):
    edges = (0, 1, 7, 20)
    requests = [LastRow(row, edges) for row in rows_of(prompts)]
    probed = dict(CausalLanguageModel(model, None, batch_tokens=batch_tokens).probe(requests))
    found = torch.tensor([probed[index] for index in range(5)])
    assert model.config._attn_implementation != "eager"  # put back
    model.set_attn_implementation("eager")
    maps = model(input_ids=prompts, output_attentions=True).attentions
    heads = 2 if model.config.attention_type == "diff" else 4
    assert found.shape == (5, 2, heads, 5, 3)
    for layer, weights in enumerate(maps):
        last = weights[:, :, -1]
        shares = (last.abs() < 1e-3) / 20, (last < 0) / 20
        for form, values in enumerate((last, last.abs(), last.clamp(min=0), *shares)):
            sums = torch.stack([values[..., a:b].sum(-1) for a, b in pairwise(edges)], dim=-1)
            torch.testing.assert_close(found[:, layer, :, form], sums, rtol=1e-5, atol=1e-6)
    totals = found[..., 0, :].sum(-1)
    if model.config.attention_type == "softmax":
        torch.testing.assert_close(totals, torch.ones_like(totals))
    else:  # a head's total is 1 - lambda
        lambdas = torch.stack([layer.self_attn.lam() for layer in model.model.layers]).view(1, 2, 1)
        torch.testing.assert_close(totals, (1 - lambdas).expand_as(totals).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [16_384, 45])
def test_loss_is_the_models(model, prompts, batch_tokens):
    found = ask(model, [Loss(row) for row in rows_of(prompts)], batch_tokens=batch_tokens)
    assert [len(row) for row in found] == [19] * 5
    whole = model(input_ids=prompts, labels=prompts).loss.item()
    assert torch.tensor(found).mean().item() == pytest.approx(whole, rel=1e-5)
    (tail,) = ask(model, [Loss(rows_of(prompts)[2], first=12)], batch_tokens=batch_tokens)
    assert tail == pytest.approx(found[2][11:], rel=1e-5)


def test_logits_of_a_batch_are_bounded(model, prompts, monkeypatch):
    requests = [Loss(row) for row in rows_of(prompts)]
    whole = ask(model, requests)
    monkeypatch.setattr(causal, "_MOST_LOGITS", 2 * prompts.shape[1] * model.config.vocab_size + 1)
    rows, language_model = [], CausalLanguageModel(model, None)
    hook = model.register_forward_hook(lambda _, __, output: rows.append(output.logits.shape[0]))
    try:
        parts = answers_to(language_model, requests)
    finally:
        hook.remove()
    assert rows == [2, 2, 1]
    assert language_model.parts(requests) == [[0, 1], [2, 3], [4]]
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole))


def test_a_long_row_in_parts(model, prompts, monkeypatch):
    row = rows_of(prompts)[0]
    whole = ask(model, [Loss(row)])[0]
    monkeypatch.setattr(causal, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(prefix, "CHUNK_TOKENS", 7)
    assert ask(model, [Loss(row)])[0] == pytest.approx(whole, rel=1e-4)
    assert ask(model, [Choice(row, ((3, 4), (3, 5), (6,)))]) == [plain_choice(model, row, ((3, 4), (3, 5), (6,)))]
    passes, language_model = [], CausalLanguageModel(model, None)
    hook = model.register_forward_pre_hook(
        lambda _, __, options: passes.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    (made,) = answers_to(language_model, [Continuation(row, 3)])
    hook.remove()
    assert passes == [7, 7, 6, 1, 1]
    monkeypatch.setattr(causal, "CHUNK_TOKENS", 2048)
    assert ask(model, [Continuation(row, 3)]) == [made]


@pytest.mark.parametrize("kind", ["jamba", "mamba"])
def test_a_row_of_a_model_with_a_state_is_computed_whole(kind, prompts, monkeypatch):
    """Jamba begins its state anew in every pass of several tokens, and Mamba gives no cache of this kind at all."""
    torch.manual_seed(0)
    if kind == "jamba":
        layers = {"num_key_value_heads": 2, "intermediate_size": 64, "attn_layer_period": 2, "attn_layer_offset": 1}
        model = JambaForCausalLM(JambaConfig(**SIZES, **layers, num_experts=2, num_experts_per_tok=1)).eval()
    else:
        sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")}
        model = MambaForCausalLM(MambaConfig(**sizes, state_size=4)).eval()
    rows = rows_of(prompts)
    whole = ask(model, [Loss(row) for row in rows])
    monkeypatch.setattr(causal, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(prefix, "CHUNK_TOKENS", 7)
    for found, expected in zip(ask(model, [Loss(row) for row in rows]), whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    options = ((1, 2, 3, 4), (1, 2, 3, 5), (6, 7, 8), (6, 7, 9))
    expected = [plain_choice(model, row, options) for row in rows]
    assert ask(model, [Choice(row, options) for row in rows]) == expected
    if kind == "mamba":
        with pytest.raises(EvaluationError, match="MambaForCausalLM returns no cache"):
            ask(model, [Continuation(rows[0], 3)])


def test_choice_is_masked_greedy_decoding(model):
    draw = torch.Generator().manual_seed(1)
    shared = tuple(torch.randint(97, (30,), generator=draw).tolist())
    options = ((1, 2, 9), (1, 3, 9), (1, 3, 4, 9), (7, 9), (8, 1, 9), (8, 2, 9))
    prompts = [(*shared, *torch.randint(97, (3,), generator=draw).tolist()) for _ in range(40)]
    expected = [plain_choice(model, prompt, options) for prompt in prompts]
    assert len(set(expected)) > 2
    for prefix_caching in (True, False):
        requests = [Choice(prompt, options) for prompt in prompts]
        assert ask(model, requests, prefix_caching=prefix_caching) == expected


def test_prompts_that_start_the_same_are_computed_once(model):
    draw = torch.Generator().manual_seed(1)
    trunk = tuple(torch.randint(97, (60,), generator=draw).tolist())
    prompts = [(*trunk[:50], 1, 2), (*trunk[:20], 3), trunk, (*trunk[:50], 1, 4), (*trunk[:20], 3)]
    cache, plain = PrefixCache(model), PrefixCache(model, enabled=False)
    with torch.inference_mode():
        for prompt in sorted(prompts):
            for one in (cache, plain):
                one.start()
            torch.testing.assert_close(cache.next_logits(prompt), plain.next_logits(prompt), rtol=1e-4, atol=1e-5)
    # 60 of the trunk, two branches of 2 and 1 at 50, one at 20; the last token of a row is always computed.
    assert cache.computed_tokens == 60 + 3 + 1 + 1
    assert plain.computed_tokens == sum(map(len, prompts))
    found = ask(model, [Continuation(prompt, 1) for prompt in prompts])
    assert found == ask(model, [Continuation(prompt, 1) for prompt in prompts], prefix_caching=False)


def test_a_cache_that_grows_holds_what_transformers_own_holds():
    draw = torch.Generator().manual_seed(2)
    ours, theirs = prefix.GrowingLayer(), DynamicLayer()
    for step, length in enumerate((5, 1, 1, 1, 7, 2, 1)):
        states = [torch.randn(4 if step < 5 else 2, 2, length, width, generator=draw) for width in (6, 3)]
        for found, expected in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(found, expected)
        for layer in (ours, theirs):
            if step == 2:
                layer.crop(-4)
            elif step == 4:
                layer.batch_select_indices(torch.tensor([2, 0]))
            elif step == 5:
                layer.reset()
    assert ours.get_seq_length() == 1


def test_a_row_longer_than_the_context_is_refused(model):
    with pytest.raises(EvaluationError, match="takes 66 tokens, and the model's context has 64"):
        ask(model, [Continuation((1,) * 60, 6)])

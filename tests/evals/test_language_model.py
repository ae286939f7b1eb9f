"""A decoder's answers: greedy continuation is generate's, weights are the maps' last row, parts change nothing."""

import pytest
import torch

from difftransformer import DiffTransformerConfig
from difftransformer.errors import ConfigError
from difftransformer.evals import DecoderLanguageModel, EvaluationConfig
from difftransformer.train import build_model


@pytest.fixture(params=["diff", "softmax"])
def model(request):
    config = DiffTransformerConfig(
        attention_type=request.param,
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,  # large, so that every token says something else
        eos_token_id=5,
    )
    return build_model(config, seed=3).eval()


@pytest.fixture
def prompts():
    return torch.randint(97, (5, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch_tokens", [16_384, 45, 1])
def test_continuation_is_that_of_generate(model, prompts, batch_tokens):
    found = DecoderLanguageModel(model, batch_tokens=batch_tokens).continue_greedily(prompts, 12)
    expected = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, min_new_tokens=12, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(found, expected[:, 20:])
    assert len(set(found.flatten().tolist())) > 5


def test_an_end_of_text_does_not_stop_a_row(model, prompts):
    """`eos_token_id` is a token like others here: every token asked for is made, as the model would make it."""
    made = DecoderLanguageModel(model).continue_greedily(prompts, 4)
    model.config.eos_token_id = model.generation_config.eos_token_id = int(made[0, 0])
    assert torch.equal(DecoderLanguageModel(model).continue_greedily(prompts, 4), made)


@pytest.mark.parametrize("batch_tokens", [16_384, 45])
def test_last_token_weights_are_the_last_row_of_the_maps(model, prompts, batch_tokens):
    found = DecoderLanguageModel(model, batch_tokens=batch_tokens).last_token_weights(prompts)
    assert model.config._attn_implementation != "eager"  # put back
    model.set_attn_implementation("eager")
    maps = model(input_ids=prompts, output_attentions=True).attentions
    expected = torch.cat([layer[:, :, -1] for layer in maps], dim=1)
    heads = 2 if model.config.attention_type == "diff" else 4
    assert found.shape == (5, 2 * heads, 20)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    totals = found.sum(-1)
    if model.config.attention_type == "softmax":
        torch.testing.assert_close(totals, torch.ones_like(totals))
    else:  # a head's total is 1 - lambda
        lambdas = torch.stack([layer.self_attn.lam() for layer in model.model.layers]).repeat_interleave(heads)
        torch.testing.assert_close(totals, (1 - lambdas).expand(5, -1).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [16_384, 45])
def test_nll_is_the_models_loss(model, prompts, batch_tokens):
    nll = DecoderLanguageModel(model, batch_tokens=batch_tokens).nll(prompts[:, :-1], prompts[:, 1:])
    assert nll.shape == (5, 19)
    assert nll.mean().item() == pytest.approx(model(input_ids=prompts, labels=prompts).loss.item(), rel=1e-5)


def test_impossible_batch_is_refused():
    with pytest.raises(ConfigError, match="batch_tokens=0"):
        EvaluationConfig(batch_tokens=0)

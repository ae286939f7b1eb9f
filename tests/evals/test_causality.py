"""The check of causality: it passes what is causal and finds planted leaks."""

import json

import pytest
import torch
from torch import nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerModel
from difftransformer.attention import variants
from difftransformer.errors import EvaluationError
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals import check_causality
from tests.support.answering import tiny_model
from tests.support.tiny_models import VOCABULARY, tiny, tiny_config

TOKENS = torch.randint(VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(3))
NUMBERS = torch.randn(2, 23, 8, generator=torch.Generator().manual_seed(4))
THEIRS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("attention_type", variants())
def test_our_models_are_causal(attention_type):
    found = check_causality(tiny(attention_type=attention_type), TOKENS)
    assert found.is_causal
    assert max(found.changed.size, found.alone.size) < 1e-5


@pytest.mark.parametrize(("kind", "config"), [(LlamaForCausalLM, LlamaConfig), (DiffLlamaForCausalLM, DiffLlamaConfig)])
def test_theirs_are_causal(kind, config):
    torch.manual_seed(0)
    assert check_causality(kind(config(**THEIRS)).eval(), TOKENS).is_causal


def test_a_bidirectional_model_is_not():
    torch.manual_seed(0)
    found = check_causality(DiffTransformerModel(tiny_config(is_causal=False)).eval(), TOKENS)
    assert not found.is_causal
    assert min(found.changed.size, found.alone.size) > 0.01


class NormOverTime(nn.Module):
    """A published leak: GroupNorm of (B, C, T) takes its mean and variance over positions too."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, nn.GroupNorm(2, 8)

    def forward(self, x):
        return self.norm(self.inner(x).mT).mT


def sees(steps):
    """Outputs that add the input some steps later, by a hundredth."""
    return lambda x: (
        x.cumsum(1) + 0.01 * torch.roll(x, -steps, 1) * (torch.arange(x.shape[1]) < x.shape[1] - steps)[:, None]
    )


def test_a_norm_over_time_is_found():
    torch.manual_seed(0)
    assert check_causality(nn.Linear(8, 8), NUMBERS).is_causal
    found = check_causality(NormOverTime(nn.Linear(8, 8)), NUMBERS)
    assert min(found.changed.size, found.alone.size) > 0.01


@pytest.mark.parametrize("steps", [1, 5, 22])
def test_a_glance_ahead_is_found_where_it_is(steps):
    found = check_causality(sees(steps), NUMBERS, positions=range(1, 23))
    assert not found.is_causal
    for change in (found.changed, found.alone):
        assert change.output < change.position <= change.output + steps


def test_the_length_is_found_by_leaving_tokens_out():
    """Each output knows how many inputs there are, and nothing of what they are."""
    found = check_causality(lambda x: x.cumsum(1) / x.shape[1], NUMBERS)
    assert not found.is_causal
    assert found.changed.size == 0
    assert found.alone.size > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_leak(dtype):
    assert check_causality(tiny().to(dtype), TOKENS).is_causal


@pytest.mark.parametrize(
    ("model", "inputs", "how", "words"),
    [
        (nn.Dropout(), NUMBERS, {}, "two equal calls differ by up to .*; put the module in evaluation mode"),
        (lambda x: x * 0, NUMBERS, {}, "all outputs are equal"),
        (lambda x: x / 0, NUMBERS, {}, "some outputs are not finite"),
        (lambda x: x[:, 1:], NUMBERS, {}, r"inputs of shape \(2, 23, 8\) gave \(2, 22, 8\); outputs must begin"),
        (lambda x: None, NUMBERS, {}, "gave NoneType"),
        (nn.Identity(), NUMBERS[:, :1], {}, r"inputs have shape \(2, 1, 8\); give"),
        (nn.Identity(), NUMBERS, {"positions": [23]}, r"positions \[23\]: name some from 1 to 22"),
        (nn.Identity(), NUMBERS, {"positions": []}, r"positions \[\]"),
        (nn.Identity(), TOKENS, {"vocabulary": 9}, "a vocabulary of 9 with ids up to 56"),
        (nn.Identity(), TOKENS * 0, {}, "a vocabulary of 1 with ids up to 0"),
    ],
)
def test_what_it_refuses(model, inputs, how, words):
    with pytest.raises(EvaluationError, match=words):
        check_causality(model, inputs, **how)


def test_the_command(tmp_path, capsys):
    folder = tiny_model(tmp_path / "model")
    assert main(["check", "causality", folder, "--length", "40"]) == 0
    assert f"{folder}: causal." in capsys.readouterr().out
    assert main(["check", "causality", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_causal"] is True
    for words, message in (
        (["--length", "1"], "--length 1: give at least 2"),
        (["--length", "513"], "--length 513: the model has 512 positions"),
    ):
        assert main(["check", "causality", folder, *words]) == 2
        assert message in capsys.readouterr().err


def test_the_command_on_a_model_that_looks_ahead(tmp_path, capsys, monkeypatch):
    folder = tiny_model(tmp_path / "model")
    from difftransformer import DiffTransformerForCausalLM

    forward = DiffTransformerForCausalLM.forward

    def leaking(self, *arguments, **keywords):
        output = forward(self, *arguments, **keywords)
        output.logits = output.logits + output.logits.mean(1, keepdim=True)
        return output

    monkeypatch.setattr(DiffTransformerForCausalLM, "forward", leaking)
    assert main(["check", "causality", folder]) == 1
    assert "NOT causal" in capsys.readouterr().out

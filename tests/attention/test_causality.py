"""The check of causality: it passes what is causal and finds planted leaks."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerModel
from difftransformer.attention import check_causality, variants
from difftransformer.errors import EvaluationError
from difftransformer.ops import BACKENDS
from difftransformer_lab.cli.main import main
from tests.support.answering import tiny_model
from tests.support.tiny_models import VOCABULARY, tiny, tiny_config

TOKENS = torch.randint(VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(3))
NUMBERS = torch.randn(2, 23, 8, generator=torch.Generator().manual_seed(4))
THEIRS = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
THEIRS |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("attention_type", variants())
def test_our_models_are_causal(attention_type, window):
    found = check_causality(tiny(attention_type=attention_type, sliding_window=window), TOKENS)
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


def leaking(chosen):
    """Sums of inputs so far, and at chosen outputs a hundredth of the next input."""
    return lambda x: x.cumsum(1) + 0.01 * chosen[: x.shape[1], None] * F.pad(x[:, 1:], (0, 0, 0, 1))


def test_every_leak_of_one_step_is_found():
    """At the borders of tiles, and in single places: 31 positions are tried at once, and each place among them is here."""
    numbers = torch.randn(1, 513, 1, generator=torch.Generator().manual_seed(5))
    places = torch.arange(1, 514)
    leaks = [places == k for k in (*range(1, 513, 5), 512)] + [places % k == 0 for k in (2, 3, 16, 64, 100, 256)]
    for chosen in leaks:
        result = check_causality(leaking(chosen), numbers)
        assert not result.is_causal, chosen.nonzero()
        assert result.changed.position == result.changed.output + 1
        assert result.positions == 512


def test_above_512_the_borders_of_tiles_are_tried():
    numbers = torch.randn(1, 1100, 1, generator=torch.Generator().manual_seed(5))
    places = torch.arange(1, 1101)
    for k in (16, 32, 64, 128, 256):
        assert not check_causality(leaking((places % k == 0) & (places > 513)), numbers).is_causal
    assert check_causality(leaking(places < 0), numbers).positions < 700


def test_a_kernel_that_is_off_by_one_is_found():
    """Attention in which the last query of every tile of 64 sees the next key."""
    torch.manual_seed(0)
    inside = torch.ones(130, 130, dtype=torch.bool).tril()
    off = inside.clone()
    off[range(63, 129, 64), range(64, 130, 64)] = True
    for mask, is_causal in ((inside, True), (off, False)):
        result = check_causality(
            lambda x, m=mask: F.scaled_dot_product_attention(x, x, x, m[: x.shape[1], : x.shape[1]]),
            torch.randn(1, 130, 16),
        )
        assert result.is_causal is is_causal


def test_the_length_is_found_by_leaving_tokens_out():
    """Each output knows how many inputs there are, and nothing of what they are."""
    found = check_causality(lambda x: x.cumsum(1) / x.shape[1], NUMBERS)
    assert not found.is_causal
    assert found.changed.size == 0
    assert found.alone.size > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
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


def test_the_command(tmp_path, capsys, fails):
    folder = tiny_model(tmp_path / "model")
    assert main(["check", "causality", folder, "--length", "40", "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert f"{folder}: causal." in said
    assert "39 of 39 positions changed in one pass in fp32, 14 otherwise; in one pass, with a cache, packed" in said
    assert f"checking {folder}: 100 % after" in " ".join(said.split())
    assert main(["check", "causality", folder, "--length", "9", "--backend", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["is_causal"], found["positions"]) == (True, 8)
    ways = [(dtype, how) for dtype in ("fp32", "bf16") for how in ("in one pass", "with a cache", "packed")]
    assert [(check["dtype"], check["how"]) for check in found["checks"]] == ways
    assert [check["positions"] for check in found["checks"]] == [8] + [
        5
    ] * 5  # 1, the last, and three where the cache ends
    assert main(["check", "causality", folder, "--length", "9", "--json"]) == 0
    tried = Counter((check["dtype"], check["backend"]) for check in json.loads(capsys.readouterr().out)["checks"])
    backends = list(dict.fromkeys(name for _, name in tried))
    assert tried == {("fp32", name): 3 for name in backends} | {
        ("bf16", name): 1 + 2 * (name == backends[0]) for name in backends
    }
    for words, message in (
        (["--length", "1"], "--length 1: give at least 2"),
        (["--length", "513"], "--length 513: the model has 512 positions"),
    ):
        assert message in fails("check", "causality", folder, *words)


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [(LlamaForCausalLM, LlamaConfig, "omit --backend"), (DiffLlamaForCausalLM, DiffLlamaConfig, "; chunked in fp32.")],
)
def test_the_backend_of_a_model_of_another_package(tmp_path, capsys, kind, config, said):
    """DiffLlama runs on the one that is named; a Llama has none of ours."""
    kind(config(**THEIRS)).save_pretrained(tmp_path)
    words = ["--length", "9", "--dtype", "fp32", "--backend", "chunked"]
    assert main(["check", "causality", str(tmp_path), *words]) == (2 if kind is LlamaForCausalLM else 0)
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_json_is_alone_on_standard_output(tmp_path, capsys, monkeypatch):
    """Which backend was left out, and its reason, are on standard error."""
    cpu = dataclasses.replace(BACKENDS["cpu"], supports=lambda problem: "no compiler; install one")
    monkeypatch.setitem(BACKENDS, "cpu", cpu)
    words = ["--length", "9", "--dtype", "fp32", "--json"]
    assert main(["check", "causality", tiny_model(tmp_path / "model"), *words]) == 0
    said = capsys.readouterr()
    assert "cpu" not in {check["backend"] for check in json.loads(said.out)["checks"]}
    assert said.err.splitlines()[-1] == "cpu in fp32 does not take the model: no compiler"


def test_calls_stay_small(tmp_path, capsys, monkeypatch):
    """Packed rows become one row, of which a backend may form all maps; and logits take memory, of which blocks are reused."""
    from difftransformer import DiffTransformerForCausalLM

    forward, packed, logits = DiffTransformerForCausalLM.forward, set(), set()

    def watched(self, ids, **keywords):
        if keywords.get("position_ids") is not None:
            packed.add(tuple(ids.shape))
        output = forward(self, ids, **keywords)
        logits.add(output.logits.numel())
        return output

    monkeypatch.setattr(DiffTransformerForCausalLM, "forward", watched)
    words = ["--length", "128", "--dtype", "fp32", "--backend", "reference"]
    assert main(["check", "causality", tiny_model(tmp_path / "model"), *words]) == 0
    assert max(rows * length for rows, length in packed) == 512
    assert (4, 128) in packed
    assert max(logits) <= 2**22


@pytest.mark.parametrize("only", ["at once", "cached", "packed", "bf16"])
def test_the_command_on_a_model_that_looks_ahead(tmp_path, capsys, monkeypatch, only):
    """Always, or with a cache, in packed rows or in bf16 alone."""
    folder = tiny_model(tmp_path / "model")
    from difftransformer import DiffTransformerForCausalLM

    forward = DiffTransformerForCausalLM.forward

    def leaking(self, *arguments, **keywords):
        output = forward(self, *arguments, **keywords)
        cases = {"cached": keywords.get("past_key_values"), "packed": keywords.get("position_ids") is not None}
        if cases.get(only, only != "bf16" or self.dtype == torch.bfloat16):
            output.logits = output.logits + 2 * output.logits.roll(-1, 1)
        return output

    monkeypatch.setattr(DiffTransformerForCausalLM, "forward", leaking)
    chosen = [] if only == "bf16" else ["--dtype", "fp32"]  # by default both
    assert main(["check", "causality", folder, "--length", "40", "--backend", "sdpa", *chosen]) == 1
    assert "NOT causal" in capsys.readouterr().out


@pytest.mark.parametrize("only", ["cached", "packed"])
def test_a_leak_at_a_border_of_the_cache_or_of_a_document_alone(tmp_path, capsys, monkeypatch, only):
    """Of 70 tokens the cache holds 35, and a document has 37: neither is next to a tile of 16."""
    folder = tiny_model(tmp_path / "model")
    from difftransformer import DiffTransformerForCausalLM

    forward = DiffTransformerForCausalLM.forward

    def leaking(self, ids, **keywords):
        cache, positions = keywords.get("past_key_values"), keywords.get("position_ids")
        at = 35 - cache.get_seq_length() if cache else 36
        output = forward(self, ids, **keywords)
        if (cache if only == "cached" else positions is not None) and 0 <= at < ids.shape[1] - 1:
            output.logits[:, at] += 2 * output.logits[:, at + 1]
        return output

    monkeypatch.setattr(DiffTransformerForCausalLM, "forward", leaking)
    assert main(["check", "causality", folder, "--length", "70", "--backend", "sdpa", "--dtype", "fp32"]) == 1
    assert "NOT causal" in capsys.readouterr().out

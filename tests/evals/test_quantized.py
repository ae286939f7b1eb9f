"""A task under coarser numbers: 16 bits change nothing, few bits round the logits as they say, figures carry the setting."""

from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer.ops.reference import observe_logits
from difftransformer_lab.evals import CausalLanguageModel, run_task
from difftransformer_lab.evals.models.quantized import quantized_logits
from difftransformer_lab.evals.probes import LastRow, Magnitudes, Maps
from difftransformer_lab.evals.requests import Continuation, Loss
from difftransformer_lab.evals.tasks.needle import CHANCE, COPYING, LOOKUP
from difftransformer_lab.evals.tasks.quantized import Options, QuantizedTask
from tests.support.answering import answers_to
from tests.support.fakes import Oracle

SIZES = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.3}


@pytest.fixture(params=["diff", "llama"])
def model(request):
    torch.manual_seed(1)
    if request.param == "diff":
        config = DiffTransformerConfig(attention_type="diff", initialization="normal", **SIZES)
        return DiffTransformerForCausalLM(config).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)).eval()


def requests_of(kind):
    rows = torch.randint(256, (5, 24), generator=torch.Generator().manual_seed(0)).tolist()
    return [kind(tuple(row)) for row in rows]


def under(language_model, requests, bits, granularity="row", weights="none", activations="none"):
    with language_model.quantized(bits, granularity, weights, activations) as coarse:
        return answers_to(coarse, requests)


def test_sixteen_bits_change_nothing(model):
    language_model = CausalLanguageModel(model, None)
    for requests in (requests_of(Loss), requests_of(lambda row: Continuation(row, 4))):
        plain = answers_to(language_model, requests)
        assert under(language_model, requests, 16) == plain
    losses = requests_of(Loss)
    found = {bits: torch.tensor(under(language_model, losses, bits)) for bits in (12, 8, 6, 4)}
    plain = torch.tensor(answers_to(language_model, losses))
    errors = [(found[bits] - plain).abs().mean().item() for bits in (12, 8, 6, 4)]
    assert errors == sorted(errors)
    assert errors[0] < 1e-3
    assert errors[3] > 1e-2
    assert answers_to(language_model, losses) == plain.tolist()


@pytest.mark.parametrize("granularity", ["row", "head", "tensor"])
def test_an_answer_does_not_depend_on_what_is_asked_beside_it(model, granularity):
    requests = requests_of(lambda row: Continuation(row[:12] * 2, 3))
    language_model = CausalLanguageModel(model, None)
    alone = [under(language_model, [request], 5, granularity)[0] for request in requests]
    assert alone == under(language_model, requests, 5, granularity)
    assert language_model.prefix_caching


@pytest.mark.parametrize(("granularity", "shared"), [("row", (3,)), ("head", (2, 3)), ("tensor", (1, 2, 3))])
def test_the_logits_stand_on_the_grid(model, granularity, shared):
    seen = []

    def keep(scores, allowed):
        seen.append(scores.masked_fill(~allowed, 0))
        return scores

    ids = torch.tensor([request.ids for request in requests_of(Loss)])
    with torch.no_grad(), quantized_logits(model, 6, granularity), observe_logits(keep):
        model(ids)
    assert len(seen) == (4 if model.config.model_type == "difftransformer" else 2)
    for scores in seen:
        steps = scores / scores.abs().amax(shared, keepdim=True) * 31
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
        assert len(steps.round().unique()) > 10


@pytest.mark.parametrize("kind", ["LastRow", "Maps", "Magnitudes"])
def test_probes_see_the_model_under_few_bits(model, kind):
    row = requests_of(Loss)[0].ids
    probe = {"LastRow": LastRow(row, (0, 5, 24)), "Maps": Maps(row), "Magnitudes": Magnitudes((row,), 5)}[kind]
    language_model, found = CausalLanguageModel(model, None), []
    for bits in (16, 3):
        with language_model.quantized(bits, "row", "none", "none") as coarse:
            found += dict(coarse.probe([probe])).values()
    plain = dict(language_model.probe([probe]))[0]
    assert found[0] == plain
    assert found[1] != plain


def test_weights_and_activations_are_asked_apart(model):
    language_model, (request, *_) = CausalLanguageModel(model, None), requests_of(Loss)
    settings = [("none", "none"), ("int8", "none"), ("int4", "none"), ("none", "int8")]
    found = [under(language_model, [request], 16, "row", *setting)[0] for setting in settings]
    plain = torch.tensor(found[0])
    assert answers_to(language_model, [request])[0] == found[0]
    errors = [(torch.tensor(row) - plain).abs().mean().item() for row in found]
    assert 0 == errors[0] < errors[1] < errors[2]
    assert errors[3] > 0


class Seer(Oracle):
    """Is right whatever the setting, which it keeps."""

    opened = ()

    @contextmanager
    def quantized(self, *setting):
        self.opened = (*self.opened, setting)
        yield Oracle(self.tokenizer)

    def answer(self, requests):
        raise AssertionError("asked without a setting")


def test_the_figures_are_the_tasks_own_at_each_setting(toy_shards, toy_text):
    needles = {
        "lengths": [128], "needles": [[2, 1]], "depths": [0.5], "documents": 2, "digits": 3, "text": str(toy_text),
        "seed": 4,
    }  # fmt: skip
    options = Options(task="needle", task_options=needles, bits=[16, 4], granularity=["row", "tensor"], weights="int4")
    assert options.seed == 4
    task = QuantizedTask(options, Seer(toy_shards.tokenizer))
    # 16 bits are asked once, whatever shares a step.
    assert [(r.bits, r.granularity, r.weights) for r in task.requests[::2]] == [
        (16, "row", "int4"), (4, "row", "int4"), (4, "tensor", "int4"),
    ]  # fmt: skip
    model = Seer(toy_shards.tokenizer)
    scores = run_task(model, task)
    assert model.opened == ((16, "row", "int4", "none"), (4, "row", "int4", "none"), (4, "tensor", "int4", "none"))
    values = {(row.name, row.value) for row in scores.measurements}
    assert values == {("accuracy", 1), (CHANCE, 0.5), (COPYING, 1), (LOOKUP, 1)}
    settings = {(row.at["bits"], row.at["granularity"]) for row in scores.measurements}
    assert settings == {(16, "row"), (16, "tensor"), (4, "row"), (4, "tensor")}
    assert {row.at["length_tokens"] for row in scores.measurements if "depth" in row.at} == {128}
    names = [item.name for item in scores.items if item.name.endswith(", 4 bits by tensor")]
    assert names == [f"{name} N=2 R=1, 4 bits by tensor" for name in ("accuracy", COPYING, LOOKUP) for _ in range(2)]
    assert "needle" in task.data_name
    assert any("simulated" in choice for choice in task.choices)


def test_perplexity_is_the_default(tmp_path):
    (tmp_path / "text.txt").write_text("some words " * 40)
    options = Options(task_options={"text": str(tmp_path / "text.txt"), "window": 20, "windows": 2}, bits=[8])
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)).eval()
    language_model = CausalLanguageModel(model, byte_tokenizer())
    scores = run_task(language_model, QuantizedTask(options, language_model))
    assert scores.measurements[0].name == "nll"
    assert scores.measurements[0].at == {"bits": 8, "granularity": "row"}

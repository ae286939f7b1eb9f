"""Perturbed embeddings: the gradient against finite differences, changes against passes written here, planted models."""

import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer.errors import ConfigError, DataError, EvaluationError
from difftransformer_lab.evals import CausalLanguageModel, run_task
from difftransformer_lab.evals.probes.perturbed import perturbed
from difftransformer_lab.evals.tasks.perturbation import Options, PerturbationTask
from tests.support.tiny_models import tiny

SEPARATOR = 5
WAYS = {"radii": (0.02, 0.1), "draws": 3, "seed": 4, "separator": SEPARATOR}


def llama():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, initializer_range=0.2)).eval()


MODELS = {
    "diff": lambda: tiny(),
    "diff_v2": lambda: tiny(attention_type="diff_v2"),
    "softmax": lambda: tiny(attention_type="softmax"),
    "llama": llama,
}


def row(length=13):
    ids = torch.randint(6, 61, (length,), generator=torch.Generator().manual_seed(2))
    ids[[4, 9]] = SEPARATOR
    return ids.tolist()


def loss_at(model, ids, embeddings):
    """Mean loss over the targets that are no separators, from log-softmax."""
    logits = model(inputs_embeds=embeddings, use_cache=False).logits[0].double()
    kept = [t for t in range(len(ids) - 1) if ids[t + 1] != SEPARATOR]
    right = sum(int(logits[t].argmax() == ids[t + 1]) for t in kept)
    return -sum(logits[t].log_softmax(-1)[ids[t + 1]] for t in kept) / len(kept), right


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_steepest_finite_difference(name):
    """Along e_t + h s g_t / |g_t| the mean loss rises at the reported rate, and along random directions at less."""
    model, ids = MODELS[name]().double(), row()
    with torch.inference_mode():  # as a model is asked in an evaluation
        found = perturbed(model, ids, **WAYS)
    start = model.get_input_embeddings()(torch.tensor([ids[:-1]])).detach()
    size = start.norm(dim=-1).mean()
    leaf = start.clone().requires_grad_()
    loss, right = loss_at(model, ids, leaf)
    assert (found["tokens"], found["right"]) == (10, right)
    assert found["nats"] / 10 == pytest.approx(loss.item(), rel=1e-5)
    (slope,) = torch.autograd.grad(loss, leaf)
    generator, h = torch.Generator().manual_seed(0), 1e-4
    ways = [slope, *(torch.randn(start.shape, generator=generator, dtype=start.dtype) for _ in range(3))]
    with torch.no_grad():
        rates = []
        for way in ways:
            step = h * size * way / way.norm(dim=-1, keepdim=True)
            rates.append((loss_at(model, ids, start + step)[0] - loss_at(model, ids, start - step)[0]).item() / (2 * h))
    assert found["gradient"] == pytest.approx(rates[0], rel=1e-4)
    assert all(abs(rate) < rates[0] for rate in rates[1:])


@pytest.mark.parametrize("name", ["diff", "llama"])
def test_losses_and_right_answers_under_both_kinds_of_perturbation(name):
    model, ids = MODELS[name]().double(), row()
    found = perturbed(model, ids, **WAYS)
    start = model.get_input_embeddings()(torch.tensor([ids[:-1]])).detach().requires_grad_()
    length = torch.stack([x.norm() for x in start[0]]).mean()
    loss, _ = loss_at(model, ids, start)
    (slope,) = torch.autograd.grad(loss, start)
    draw = torch.Generator().manual_seed(4)
    signs = [slope.sign(), *(2.0 * torch.randint(0, 2, start.shape, generator=draw) - 1 for _ in range(3))]
    clean = model(inputs_embeds=start).logits.softmax(-1)
    largest = []
    for place, radius in enumerate(WAYS["radii"]):
        seen = []
        for sign in signs:
            moved = start + radius * length / math.sqrt(32) * sign
            assert torch.allclose((moved - start).norm(dim=-1), radius * length)
            loss, right = loss_at(model, ids, moved)
            seen.append((10 * loss.item(), right))
            if place == 0:
                change = model(inputs_embeds=moved).logits.softmax(-1) - clean
                largest.append(change.norm().item() / (moved - start).norm().item() * length.item())
        assert found["gradient_sign"][place] == pytest.approx(seen[0], rel=1e-5)
        mean = [sum(values) / 3 for values in zip(*seen[1:], strict=True)]
        assert found["random"][place] == pytest.approx(mean, rel=1e-5)
    assert found["lipschitz"] == pytest.approx(max(largest), rel=1e-5)
    assert found["gradient_sign"][0][0] > found["random"][0][0]
    assert found["gradient_sign"][1][0] > found["gradient_sign"][0][0] > found["nats"]


def test_larger_embeddings_of_the_same_function_give_the_same_figures():
    """RMSNorm after a hundredfold embedding undoes the factor where nothing is added to it."""
    model = llama().double()
    model.config.rms_norm_eps = 0.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    small = perturbed(model, row(), **WAYS)
    model.model.embed_tokens.weight.data *= 100
    large = perturbed(model, row(), **WAYS)
    for key in ("nats", "gradient", "lipschitz"):
        assert large[key] == pytest.approx(small[key], rel=1e-3)


def test_a_model_that_ignores_its_input_and_one_that_takes_no_embeddings_are_refused():
    model = llama()
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    with pytest.raises(EvaluationError, match="the loss does not depend on the embeddings"):
        perturbed(model, row(), **WAYS)
    with pytest.raises(EvaluationError, match="Linear takes no inputs_embeds, so its embeddings cannot be perturbed"):
        perturbed(nn.Linear(2, 2), row(), **WAYS)
    with pytest.raises(EvaluationError, match="a window holds separators only"):
        perturbed(llama(), [SEPARATOR] * 4, **WAYS)


def test_the_task(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + 7 * i * i % 89) for i in range(600)))
    model = CausalLanguageModel(tiny(vocab_size=258), byte_tokenizer())
    options = Options(text=str(text), windows=6, window=16, radii=[0.1, 0.02], draws=2, seed=3)
    task = PerturbationTask(options, model)
    rows = {request.ids for request in task.requests}
    assert len(rows) == 6
    assert {len(ids) for ids in rows} == {17}
    assert {request.radii for request in task.requests} == {(0.02, 0.1)}
    scores = run_task(model, task)
    figures = {(row.name, *row.at.values()): row for row in scores.measurements}
    answers = [
        perturbed(model.model, r.ids, radii=r.radii, draws=2, seed=r.seed, separator=r.separator) for r in task.requests
    ]
    tokens = sum(answer["tokens"] for answer in answers)
    assert figures["gradient norm",].value == pytest.approx(sum(a["gradient"] for a in answers) / 6)
    assert figures["loss",].value == pytest.approx(sum(a["nats"] for a in answers) / tokens)
    rise = sum(a["gradient_sign"][1][0] - a["nats"] for a in answers) / tokens
    found = figures["loss change", 0.1, "gradient sign"]
    assert found.value == pytest.approx(rise)
    assert (found.n, found.better, found.detail) == (6, "lower", False)
    assert found.standard_error > 0
    assert figures["accuracy change", 0.02, "random signs"].detail
    named = {item.name for item in scores.items}
    kinds = [
        f"{what} change, {how}, radius 0.1"
        for what in ("loss", "accuracy")
        for how in ("gradient sign", "random signs")
    ]
    assert named == {"gradient norm", "Lipschitz estimate", *kinds}
    with pytest.raises(DataError, match="601 tokens are 37 windows of 16, and 38 are needed"):
        PerturbationTask(Options(text=str(text), windows=38, window=16), model)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"radii": [0.1, 0.0]}, "above 0"),
        ({"radii": []}, "one or more"),
        ({"draws": 0}, "draws=0"),
        ({"window": 1}, "window=1"),
    ],
)
def test_impossible_options(fields, words):
    with pytest.raises(ConfigError, match=words):
        Options(**fields)

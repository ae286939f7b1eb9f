"""Attention allocation: attention on the answer gives 1, uniform attention gives lengths, signed weights by hand."""

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data import CITIES_SEEN, CITIES_UNSEEN
from difftransformer_lab.evals import CausalLanguageModel, TaskContext, run_task
from difftransformer_lab.evals.probes.maps import row_sums
from difftransformer_lab.evals.tasks.allocation import SEGMENTS, AllocationTask, Options, segment_shares
from tests.support.fakes import TensorModel

OPTIONS = Options(text="validation", length=160, needles=3, depths=[0.0, 0.5, 1.0], documents=3, digits=3)


def drawn(shards, options=OPTIONS):
    where = TaskContext(tokenizer=shards.tokenizer, context_tokens=64, validation=lambda: shards.tokens("validation"))
    return AllocationTask(options, where)


def answer_span(tokenizer, prompt, cities=CITIES_SEEN):
    """Where the answer's needle stands in a prompt, found by its text: the question's city, then digits."""
    text = tokenizer.decode(prompt)
    question = text[text.rindex("\n") :]
    city = next(city for city in cities if f"magic {city} number" in question)
    start = text.index(f"\nThe special magic {city} number is: ")
    end = text.index("\n", start + 1)
    # Positions of characters to positions of tokens, by decoding ever longer prompts.
    lengths = [len(tokenizer.decode(prompt[:count])) for count in range(len(prompt) + 1)]
    return lengths.index(start), lengths.index(end), lengths.index(text.rindex("\n"))


class Looking(TensorModel):
    """All attention of every head on the answer's needle."""

    def __init__(self, tokenizer, cities=CITIES_SEEN):
        self.tokenizer, self.cities = tokenizer, cities

    def last_token_weights(self, prompts):
        weights = torch.zeros(len(prompts), 4, prompts.shape[1])
        for row, prompt in zip(weights, prompts.tolist(), strict=True):
            start, end, _ = answer_span(self.tokenizer, prompt, self.cities)
            row[:, start:end] = 1 / (end - start)
        return weights


def test_signed_weights_by_hand():
    """Two heads over 6 tokens; answer at 2 and 3, question from 5."""
    weights = torch.tensor([[0.5, -0.25, 0.25, 0.5, -0.5, 0.0], [0.0, 0.25, 0.25, -0.5, 0.25, 0.25]])
    columns = {"signed": [0.5, 0.0, 0.5, 0.0, -0.25, 0.25]}
    columns["absolute"] = [0.5, 0.5, 0.5, 1.0, 0.75, 0.25]
    columns["positive"] = [0.5, 0.25, 0.5, 0.5, 0.25, 0.25]
    shares = segment_shares(row_sums([weights[:1], weights[1:]], (0, 1, 2, 4, 5, 6)))
    for form, values in columns.items():
        parts = [values[0], values[1], values[2] + values[3], values[4], values[5]]
        assert shares[form] == pytest.approx([part / sum(values) for part in parts])
    assert shares["signed"] == pytest.approx([0.5, 0.0, 0.5, -0.25, 0.25])
    assert shares["absolute"] == pytest.approx([1 / 7, 1 / 7, 3 / 7, 1.5 / 7, 0.5 / 7])
    assert shares["positive"] == pytest.approx([2 / 9, 1 / 9, 4 / 9, 1 / 9, 1 / 9])


def test_a_share_is_a_mean_over_documents_with_its_error(toy_shards):
    class Drawn(TensorModel):
        def last_token_weights(self, prompts):
            return torch.rand(len(prompts), 2, prompts.shape[1], generator=torch.Generator().manual_seed(3))

    def shares(documents):
        options = replace(OPTIONS, needles=2, depths=[0.5], documents=documents, paired=False)
        rows = run_task(Drawn(), drawn(toy_shards, options)).measurements
        return {
            row.at["segment"]: row for row in rows if (row.name, row.at.get("form")) == ("attention share", "signed")
        }

    six, one = shares(6), shares(1)
    assert all(0 < six[segment].standard_error < 0.1 for segment in ("before", "after"))
    assert all(row.standard_error is None for row in one.values())
    assert all(six[segment].value != one[segment].value for segment in ("before", "after"))


def test_depths_draw_their_own_documents_unless_they_are_paired(toy_shards):
    for paired in (False, True):
        task = drawn(toy_shards, replace(OPTIONS, paired=paired))
        sentences = [
            tuple(sorted(line for line in toy_shards.tokenizer.decode(request.prompt).split("\n") if "magic" in line))
            for request in task.requests
        ]
        assert len(set(sentences)) == (3 if paired else 9)


@pytest.mark.parametrize(("cities", "paired"), [("all", True), ("seen", False)])
def test_a_model_that_looks_at_the_answer_alone(toy_shards, cities, paired):
    looking = Looking(toy_shards.tokenizer, CITIES_SEEN + CITIES_UNSEEN if cities == "all" else CITIES_SEEN)
    task = drawn(toy_shards, replace(OPTIONS, cities=cities, paired=paired))
    scores = run_task(looking, task)
    assert {len(request.prompt) for request in task.requests} == {160 - 3 - 2}
    shares = [row for row in scores.measurements if row.name == "attention share"]
    assert len(shares) == 3 * 3 * 5
    for row in shares:
        assert row.value == pytest.approx(float(row.at["segment"] == "answer"), abs=1e-9)
        assert (row.standard_error, row.n) == (pytest.approx(0, abs=1e-9), 3)
    names = [item.item for item in scores.items]
    assert names == [f"document {i}" for i in range(3)] if paired else names[:4] == ["0/0", "0/1", "0/2", "0.5/0"]
    assert all(item.score == pytest.approx(item.weight) for item in scores.items)
    whole = {row.name: row for row in scores.measurements if not row.at}
    assert whole["signed attention on the answer"].n == 9
    (grid,) = (g for g in scores.grids if (g.at["form"], g.at["segment"]) == ("absolute", "answer"))
    assert grid.at["depth"] == 0.5
    assert grid.values == [[pytest.approx(1)] * 4]


@pytest.mark.parametrize("paired", [True, False])
def test_a_model_that_looks_everywhere_alike(toy_shards, uniform, paired):
    task = drawn(toy_shards, replace(OPTIONS, paired=paired, cities="all" if paired else "seen"))
    scores = run_task(uniform, task)
    for request in task.requests:  # the edges, found in the text
        start, end, question = answer_span(toy_shards.tokenizer, request.prompt, CITIES_SEEN + CITIES_UNSEEN)
        assert request.edges == (0, 1, max(1, start), end, question, len(request.prompt))
    lengths = [[b - a for a, b in pairwise(request.edges)] for request in task.requests]
    for row in scores.measurements:
        if row.name == "attention share":
            first = OPTIONS.depths.index(row.at["depth"]) * 3
            part = [document[SEGMENTS.index(row.at["segment"])] for document in lengths[first : first + 3]]
            assert row.value == pytest.approx(sum(part) / 3 / 155, abs=1e-6)


@pytest.mark.parametrize("attention_type", ["diff", "diff_v2", "softmax"])
def test_weights_near_zero_and_negative_are_those_of_float64_maps(toy_shards, attention_type):
    torch.manual_seed(1)
    sizes = {"vocab_size": toy_shards.tokenizer.vocab_size, "hidden_size": 32, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 200}
    network = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=attention_type, **sizes)).eval()
    for layer in network.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(10)  # so that weights differ as those of a trained model
    task = drawn(toy_shards, replace(OPTIONS, depths=[0.0, 1.0]))
    rows = run_task(CausalLanguageModel(network, toy_shards.tokenizer), task).measurements
    found = {(row.name, row.at.get("layer")): row for row in rows if "weights" in row.name}
    exact = copy.deepcopy(network).double()
    exact.set_attn_implementation("eager")
    layers = [[], [], []]
    for request in task.requests:
        with torch.no_grad():
            maps = exact(torch.tensor([request.prompt]), output_attentions=True).attentions
        for layer, own in zip(layers, maps, strict=True):
            layer.append(own[0, :, -1].numpy())
    by_layer = np.array(layers)  # (layers, documents, heads, tokens)
    expected = {"|weights| below 0.001": np.abs(by_layer) < 1e-3, "negative weights": by_layer < 0}
    for name, counted in expected.items():
        assert found[name, None].value == pytest.approx(counted.mean(), abs=1e-9)
        assert (found[name, None].n, found[name, None].units, found[name, None].better) == (6, 3, None)
        for layer in range(3):
            assert found[name, layer].value == pytest.approx(counted[layer].mean(), abs=1e-9)
            assert found[name, layer].detail
    assert 0.01 < found["|weights| below 0.001", None].value < 0.99
    negative = found["negative weights", None].value
    assert negative == 0 if attention_type == "softmax" else 0.01 < negative < 0.99


def test_near_zero_and_negative_weights_by_hand():
    """Two layers; the first has one head, of whose six weights two are near zero and two negative, the second two heads."""
    weights = torch.tensor([[0.5, -0.25, 0.0009, 0.001, -0.0009, 0.7], [0.0, 0.0, 0.2, 0.2, 0.2, 0.4], [-1.0] * 6])
    sums = row_sums([weights[:1], weights[1:]], (0, 1, 2, 4, 5, 6))
    task = object.__new__(AllocationTask)
    task.options, task._places = Options(length=160, depths=[0.5], documents=1), [(0.5, 0)]
    rows = {(row.name, row.at.get("layer")): row.value for row in task.score([sums]).measurements}
    assert [rows["|weights| below 0.001", layer] for layer in (None, 0, 1)] == pytest.approx([4 / 18, 2 / 6, 2 / 12])
    assert [rows["negative weights", layer] for layer in (None, 0, 1)] == pytest.approx([8 / 18, 2 / 6, 6 / 12])


def test_heads_of_signed_weights():
    """One document, one layer of two heads: signed sums as they are, the others over the head's own total."""
    options = Options(length=160, depths=[0.5], documents=1)
    task = object.__new__(AllocationTask)
    task.options, task._places = options, [(0.5, 0)]
    weights = torch.tensor([[0.5, -0.25, 0.25, 0.5, -0.5, 0.0], [-0.1, -0.1, -0.1, -0.1, -0.1, -0.1]])
    scores = task.score([row_sums([weights], (0, 1, 2, 4, 5, 6))])
    found = {(grid.at["form"], grid.at["segment"]): grid.values for grid in scores.grids}
    assert found["signed", "answer"] == [[0.75, pytest.approx(-0.2)]]
    assert found["absolute", "after"] == [[0.25, pytest.approx(1 / 6, abs=1e-6)]]
    assert found["positive", "answer"] == [[0.6, 0.0]]

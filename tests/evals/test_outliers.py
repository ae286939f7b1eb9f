"""Outliers: equal to a pass with plain hooks, exact top values and median, and memory that does not grow."""

import gc
import statistics

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer.errors import DataError, EvaluationError
from difftransformer_lab.evals import CausalLanguageModel, run_task
from difftransformer_lab.evals.probes.magnitudes import Magnitude, magnitudes
from difftransformer_lab.evals.tasks.outliers import Options, OutliersTask, merge, ranks

SIZES = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.3}


def llama():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2)).eval()


def rows_of(count, length):
    return torch.randint(258, (count, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def plain_pass(model, rows):
    """Every |q . k| / sqrt(d) and |hidden state|, by hooks on projections and layers and a rotation written here."""
    config, hidden, logits, projected = model.config, [], [], {}
    width = config.hidden_size // config.num_attention_heads
    handles = []
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            keep = lambda m, a, out, key=(index, name): projected.__setitem__(key, out)  # noqa: E731
            handles.append(getattr(layer.self_attn, name).register_forward_hook(keep))
        handles.append(layer.register_forward_hook(lambda m, a, out: hidden.append(out.flatten())))
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(rows.shape[1]), frequencies)
    turn = torch.polar(torch.ones_like(angles), angles)
    for row in rows:
        model(row[None])
        for index in range(config.num_hidden_layers):
            both = (projected[index, name][0] for name in ("q_proj", "k_proj"))
            q, k = (x.unflatten(-1, (-1, width)).transpose(0, 1) for x in both)
            q, k = (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
            k = k.repeat_interleave(len(q) // len(k), 0)
            scores = (q @ k.mT.conj()).real / width**0.5
            logits.append(scores[torch.ones_like(scores, dtype=torch.bool).tril()])
    for handle in handles:
        handle.remove()
    return torch.cat(logits).abs(), torch.cat(hidden).abs()


def test_equal_to_plain_hooks():
    model, rows = llama(), rows_of(6, 24)
    logits, hidden = plain_pass(model, rows)
    found = [magnitudes(model, list(part[:, None]), 20) for part in rows.split(2)]
    for key, expected in (("logits", logits), ("hidden", hidden)):
        count, largest, median = merge([part[key] for part in found], 20)
        assert count == len(expected)
        assert largest == pytest.approx(expected.topk(20).values.tolist(), rel=1e-5)
        assert median == pytest.approx(statistics.median(expected.tolist()), rel=2**-8)


def test_both_maps_are_pooled_and_a_shared_one_counts_once():
    torch.manual_seed(1)
    count = 10 * 11 // 2 * 2  # pairs, layers
    diff = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type="diff", **SIZES)).eval()
    grouped = SIZES | {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40}
    grouped = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type="grouped_diff", **grouped)).eval()
    for model, maps in ((diff, 2 * 2), (grouped, 4 + 1)):
        with torch.no_grad():
            found = magnitudes(model, [rows_of(1, 10)], 5)
        assert sum(found["logits"]["counts"]) == count * maps


def test_a_planted_outlier_is_found_exactly():
    """Layers that add nothing leave the embedding: one number of token 7, which occurs three times, in two layers."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data.clamp_(-1, 1)
    model.model.embed_tokens.weight.data[7, 3] = -1234.5
    rows = torch.full((1, 8), 9)
    rows[0, [1, 4, 5]] = 7
    with torch.no_grad():
        found = magnitudes(model, [rows], 8)
    assert found["hidden"]["largest"][:6] == [1234.5] * 6
    assert found["hidden"]["largest"][6] <= 1


def test_largest_and_median_over_parts():
    values = [float(value) for value in range(1, 102)]
    parts = []
    for start in range(4):
        part = Magnitude("x", 30)
        for value in values[start::4]:
            part.add(torch.tensor([-value, 0.5]), torch.tensor([True, False]))
        part.add(torch.empty(0))
        part.add(torch.ones(3), torch.zeros(3, dtype=torch.bool))
        parts.append(part.summary())
    # Whole numbers up to 256 are bf16's.
    assert merge(parts, 30) == (101, values[:-31:-1], 51.0)
    even = Magnitude("x", 3)
    even.add(torch.tensor([1.0, -2.0, 4.0, 0.0]))
    assert merge([even.summary()], 3)[2] == 1.5
    few = Magnitude("x", 5)
    few.add(torch.tensor([[3.0, 9.0], [0.0, 2.0]]), torch.tensor([[True, False], [True, True]]))
    assert few.summary()["largest"] == [3.0, 2.0, 0.0]


def test_numbers_that_are_not_finite_are_refused():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(EvaluationError, match="hidden states: some are not finite in this dtype; use --dtype fp32"):
            Magnitude("hidden states", 3).add(torch.tensor([1.0, bad]))


@pytest.mark.slow
def test_memory_does_not_depend_on_the_tokens():
    model, peaks, answers = llama(), [], []

    def measure(*_):
        kinds = (torch.Tensor, torch.nn.Parameter)  # and none that a compiler keeps in place of one
        objects = (thing for thing in gc.get_objects() if type(thing) in kinds)
        tensors = (thing for thing in objects if thing.device.type == "cpu" and thing.layout is torch.strided)
        peaks[-1] = max(peaks[-1], sum(tensor.nbytes for tensor in tensors))

    handle = model.model.layers[-1].register_forward_hook(measure)
    for count in (1, 4):
        rows = list(rows_of(count, 24)[:, None])
        stored = sum(row.nbytes for row in rows) + rows[0]._base.nbytes
        gc.collect()
        peaks.append(0)
        with torch.no_grad():
            answers.append(magnitudes(model, rows, 10))
        peaks[-1] -= stored
        del rows
    handle.remove()
    assert abs(peaks[1] - peaks[0]) < 4 * 24 * 8 * 4  # the rows themselves
    assert sum(answers[1]["logits"]["counts"]) == 4 * sum(answers[0]["logits"]["counts"])
    assert len(answers[1]["logits"]["largest"]) == 10


def test_the_task(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + 7 * i * i % 89) for i in range(600)))
    model = CausalLanguageModel(llama(), byte_tokenizer())
    task = OutliersTask(Options(text=str(text), tokens=330, window=10), model)
    assert [len(request.rows) for request in task.requests] == [2] * 13 + [1] * 7
    task = OutliersTask(Options(text=str(text), tokens=69, window=10, largest=12), model)
    rows = [row for request in task.requests for row in request.rows]
    assert len(set(rows)) == len(rows) == 6
    assert {len(row) for row in rows} == {10}
    scores = run_task(model, task)
    figures = {(row.name, row.at["rank"]): row for row in scores.measurements}
    assert [rank for name, rank in figures if name == "hidden states"] == [1, 2, 3, 10, "median", 4, 5, 6, 7, 8, 9, 12]
    assert figures["hidden states", 1].n == 60 * 32 * 2
    logits, hidden = plain_pass(model.model, torch.tensor(rows))
    assert figures["attention logits", 1].value == pytest.approx(logits.max().item(), rel=1e-5)
    assert figures["hidden states", "median"].value == pytest.approx(hidden.median().item(), rel=2**-7)
    with pytest.raises(DataError, match=r"601 tokens, and 1000 are needed for 100 rows of 10"):
        OutliersTask(Options(text=str(text), tokens=1000, window=10), model)


def test_ranks_of_the_curve():
    assert ranks(100) == [*range(1, 11), *range(20, 101, 10)]
    assert ranks(3) == [1, 2, 3]
    assert ranks(250) == [*range(1, 11), *range(20, 101, 10), 200, 250]

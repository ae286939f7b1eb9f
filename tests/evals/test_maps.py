"""Maps of a prompt: those of the op in float64, shares by hand, and what cannot be drawn."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer.errors import DataError, EvaluationError
from difftransformer_lab.evals import CausalLanguageModel, run_task
from difftransformer_lab.evals.probes.maps import head_maps
from difftransformer_lab.evals.tasks.maps import MapsTask, Options

SIZES = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 200, "initializer_range": 0.3}


def network(attention_type):
    torch.manual_seed(1)
    if attention_type == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)).eval()
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=attention_type, **SIZES)).eval()


def scores_of(attention_type, **options):
    model = CausalLanguageModel(network(attention_type), byte_tokenizer())
    return run_task(model, MapsTask(Options(**options), model))


def square(grid):
    assert [len(row) for row in grid.values] == list(range(1, len(grid.values) + 1))
    return torch.tensor([row + [0.0] * (len(grid.values) - len(row)) for row in grid.values], dtype=torch.float64)


@pytest.mark.parametrize("attention_type", ["diff", "diff_v2", "softmax", "llama"])
def test_maps_and_shares(attention_type):
    scores = scores_of(attention_type, prompt="ab abc ab")
    drawn = {(grid.at["layer"], grid.at["head"], grid.at["map"]): grid for grid in scores.grids if grid.name == "map"}
    differential = attention_type.startswith("diff")
    heads = 2 if attention_type == "diff" else 4
    kinds = ("A1", "A2", "A1 - lambda A2") if differential else ("A",)
    assert list(drawn) == [(layer, head, kind) for layer in range(3) for head in range(heads) for kind in kinds]
    model = network(attention_type).double()
    model.set_attn_implementation("eager")
    ids = torch.tensor([[256, *b"ab abc ab"]])
    with torch.no_grad():
        own = model(ids, output_attentions=True).attentions
    shares = {grid.name: grid.values for grid in scores.grids if grid.name != "map"}
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    for (layer, head, kind), grid in drawn.items():
        assert grid.labels[1:] == list("ab abc ab")
        weights = square(grid)
        if kind != kinds[-1]:
            torch.testing.assert_close(weights.sum(1), torch.ones(10, dtype=torch.float64), rtol=0, atol=2e-3)
            continue
        expected = own[layer][0, head].double()
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)
        negative = -expected.clamp(max=0).sum() / expected.abs().sum()
        assert shares["negative weight"][layer][head] == pytest.approx(negative.item(), abs=1e-5)
        tenth = 0.1 / torch.arange(1, 11).unsqueeze(1)
        near = ((expected.abs() < tenth) & causal).sum() / 55
        assert shares["near zero"][layer][head] == pytest.approx(near.item(), abs=1e-6)
        if differential:
            first, second = square(drawn[layer, head, "A1"]), square(drawn[layer, head, "A2"])
            near = ((first < tenth) & causal).sum() / 55
            assert shares["near zero in A1 alone"][layer][head] == pytest.approx(near.item(), abs=0.02)
            if attention_type == "diff":
                lam = model.model.layers[layer].self_attn.lam().item()
                assert shares["lambda"][layer][head] == pytest.approx(lam, abs=1e-5)
                torch.testing.assert_close(first - lam * second, weights, rtol=0, atol=1e-3)
    figures = {(row.name, row.at.get("layer")): row for row in scores.measurements}
    assert figures["near zero", 1].value == pytest.approx(sum(shares["near zero"][1]) / heads, abs=1e-5)
    assert figures["negative weight", None].n == 3 * heads
    assert (("lambda", 0) in figures) is differential


def test_chosen_layers_and_heads(tmp_path):
    (tmp_path / "prompt.txt").write_text("ab")
    scores = scores_of("softmax", prompt_file=str(tmp_path / "prompt.txt"), layers=[2, 0], heads=[3])
    assert [(grid.at["layer"], grid.at["head"]) for grid in scores.grids if grid.name == "map"] == [(0, 3), (2, 3)]
    assert len(next(grid for grid in scores.grids if grid.name == "map").values) == 3


def test_a_window_leaves_zeros():
    torch.manual_seed(1)
    config = DiffTransformerConfig(attention_type="diff", sliding_window=3, **SIZES)
    with torch.no_grad():
        found = head_maps(DiffTransformerForCausalLM(config).eval(), torch.arange(6).unsqueeze(0))
    assert found["maps"][0]["first"][5][:3] == [0.0, 0.0, 0.0]
    assert sum(found["maps"][0]["first"][5][3:]) == pytest.approx(1, abs=1e-3)


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(
        DataError, match="the prompt has 130 tokens, and maps of at most 128 can be read; give a shorter --prompt or"
    ):
        scores_of("softmax", prompt="x" * 129)
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        scores_of("softmax", prompt_file=str(tmp_path / "none.txt"))
    with pytest.raises(EvaluationError, match="no layer 3: the model has 3 with attention"):
        scores_of("softmax", layers=[3])
    with pytest.raises(EvaluationError, match="no head 2: layer 0 has 2"):
        scores_of("diff", heads=[2])

"""`bench models` and `bench generation`: models of one shape and of equal weights, and what is timed of them."""

import pytest
import torch

from difftransformer.model import DiffTransformerConfig, count
from difftransformer_lab.bench import Settings, model_work, models
from difftransformer_lab.bench.models import (
    DIFF,
    DIFFLLAMAS,
    LLAMA,
    TRANSFORMER,
    TWIN,
    V2,
    WORKS,
    ModelSize,
    build_equal_models,
    build_models,
    time_generation,
    time_models,
)
from difftransformer_lab.report.bench import bench_tables
from difftransformer_lab.results import Bench
from tests.support.environment import ENVIRONMENT

TINY = ModelSize({"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}, 2, 12)
NAMES = ["DIFF", V2, TWIN, "twin sdpa", LLAMA, *DIFFLLAMAS]
QUICK = Settings(repeats=3, seconds=1.0, threads=1)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(models.SIZES, "tiny", TINY)
    small = {"vocab_size": 50, "hidden_size": 18, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    monkeypatch.setattr(models, "MODEL", models.MODEL | small)
    monkeypatch.setattr(models, "CACHED_TOKENS", 40)


def test_models_have_one_shape():
    built = build_models("tiny")
    assert list(built) == NAMES
    twin = built[TWIN].num_parameters()
    assert built[LLAMA].num_parameters() == built["twin sdpa"].num_parameters() == twin
    assert (built[TWIN].config.attn_backend, built["twin sdpa"].config.attn_backend) == ("auto", "sdpa")
    # Four lambda vectors a layer of 4 numbers each; ours has the gain of the head norm beside them, 8 numbers.
    assert [built[name].num_parameters() - twin for name in ("DIFF", *DIFFLLAMAS)] == [2 * 24, 2 * 16, 2 * 16]


@pytest.mark.parametrize("size", models.SIZES)
def test_sizes_are_what_they_are_called(size):
    parameters = count(DiffTransformerConfig(**models.SIZES[size].fields, attention_type="softmax")).parameters
    assert parameters == pytest.approx(float(size.removesuffix("M")) * 1e6, rel=0.1)
    if size == "135M":
        assert parameters == 134_515_008  # SmolLM2-135M's own


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_models_are_timed(work, dtype):
    rows = time_models("tiny", dtype, work, QUICK)
    assert [row.implementation for row in rows] == NAMES
    for row in rows:
        assert (row.part, row.work, row.dtype, row.timing.rounds) == ("models", work, dtype, 3)
        assert row.shape == {"model": "tiny", "batch": 2 if work == "training step" else 1, "context_tokens": 12}
    (table,) = bench_tables(Bench(command="", created="", environment=ENVIRONMENT, foreign_cpu_share=None, rows=rows))
    assert table.header()[1] == "Llama sdpa, ms"
    assert table.header()[-1] == "DIFF over the faster DiffLlama"
    (row,) = table.rows
    seconds = {row.implementation: row.timing.median_seconds for row in rows}
    assert row[-1] == f"{seconds['DIFF'] / min(seconds[name] for name in DIFFLLAMAS):.2f}"


@torch.inference_mode()
def test_diff_and_diffllama_are_one_model():
    built = build_equal_models()
    ids = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = built[DIFFLLAMAS[0]](ids).logits
    for name in (DIFF, DIFFLLAMAS[1]):
        torch.testing.assert_close(built[name].eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
    twin = built[TRANSFORMER]
    assert twin.config.attention_type == "softmax"
    # But for lambda's four vectors a layer; the norm has no gain on either side.
    assert built[DIFF].num_parameters() - twin.num_parameters() == 2 * 4 * 4
    assert built[DIFF].num_parameters() == built[DIFFLLAMAS[0]].num_parameters()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_step_is_one_token_behind_the_cache(kind, monkeypatch):
    made = []
    name = "StaticCache" if kind == "static" else "DynamicCache"
    cache_class = getattr(model_work, name)
    monkeypatch.setattr(model_work, name, lambda *a, **options: made.append(cache_class(*a, **options)) or made[-1])
    built = build_equal_models()
    for model in built.values():
        call = model_work.next_token_work(model, 40, kind)
        for seen in (41, 42):
            assert call().shape == (1, 1, 50)
            assert int(made[-1].get_seq_length()) == seen
    assert len(made) == len(built)


def test_generation_is_timed_with_either_cache():
    rows = time_generation("fp32", QUICK)
    names = [DIFF, *DIFFLLAMAS, TRANSFORMER]
    assert [(row.implementation, row.shape["cache"]) for row in rows] == [
        (name, f"{kind} cache") for kind in ("static", "dynamic") for name in names
    ]
    assert all(row.timing.rounds == 3 and row.figures["cpu_seconds"] > 0 for row in rows)

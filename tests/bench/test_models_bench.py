"""`bench models`: models of one shape, what is timed of them, their ratios, their table."""

import pytest

from difftransformer.errors import ConfigError
from difftransformer.model import DiffTransformerConfig, count
from difftransformer_lab.bench import Settings, models, steps_of
from difftransformer_lab.bench.models import (
    DIFF,
    DIFFLLAMAS,
    LLAMA,
    TWIN,
    WORKS,
    ModelSize,
    build_models,
    build_variants,
    time_models,
    time_variants,
)
from difftransformer_lab.cli.main import main
from difftransformer_lab.report.bench import bench_tables
from difftransformer_lab.results import Bench, read_result

TINY = ModelSize({"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}, 2, 12)
NAMES = [DIFF, TWIN, LLAMA, *DIFFLLAMAS]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(models.SIZES, "tiny", TINY)


def test_models_have_one_shape(tiny):
    built = build_models("tiny")
    assert list(built) == NAMES
    twin = built[TWIN].num_parameters()
    assert built[LLAMA].num_parameters() == twin
    # Four lambda vectors a layer of 4 numbers each; ours has the gain of the head norm beside them, 8 numbers.
    assert [built[name].num_parameters() - twin for name in (DIFF, *DIFFLLAMAS)] == [2 * 24, 2 * 16, 2 * 16]


@pytest.mark.parametrize("size", models.SIZES)
def test_sizes_are_what_they_are_called(size):
    parameters = count(DiffTransformerConfig(**models.SIZES[size].fields, attention_type="softmax")).parameters
    assert parameters == pytest.approx(float(size.removesuffix("M")) * 1e6, rel=0.1)
    if size == "135M":
        assert parameters == 134_515_008  # SmolLM2-135M's own


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ratios(tiny, work, dtype):
    rows = time_models("tiny", dtype, work, rounds=3, budget_seconds=1.0)
    assert [row.implementation for row in rows] == NAMES
    seconds = {row.implementation: row.median_seconds for row in rows}
    for row in rows:
        assert (row.model, row.dtype, row.work, row.rounds) == ("tiny", dtype, work, 3)
        assert (row.batch, row.context_tokens) == (2 if work == "training step" else 1, 12)
        assert row.ratio_to_twin == row.median_seconds / seconds[TWIN]
        assert row.ratio_to_llama == row.median_seconds / seconds[LLAMA]
        assert row.ratio_to_diffllama == row.median_seconds / min(seconds[name] for name in DIFFLLAMAS)


@pytest.mark.parametrize("work", WORKS)
def test_variants_are_timed_at_equal_parameters(tiny, work):
    built = build_variants("tiny")
    assert set(built) >= {"softmax", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex"}
    sizes = {name: model.num_parameters() for name, model in built.items()}
    unit = 3 * TINY.fields["hidden_size"] * TINY.fields["num_hidden_layers"]  # weights of one more of intermediate_size
    assert all(abs(size - sizes["softmax"]) <= unit / 2 for size in sizes.values())
    rows = time_variants("tiny", "fp32", work, rounds=3, budget_seconds=1.0)
    assert {row.implementation: row.parameters for row in rows} == sizes
    seconds = {row.implementation: row.median_seconds for row in rows}
    assert all(row.ratio_to_twin == row.median_seconds / seconds["softmax"] for row in rows)


def test_the_command_of_variants(tiny, tmp_path, capsys):
    words = ["bench", "variants", "--sizes", "[tiny]", "--dtypes", "[fp32]", "--repeats", "3", "--seconds", "1"]
    assert main([*words, "--threads", "1", "--out", str(tmp_path)]) == 0
    result = read_result(tmp_path / "results.json", Bench)
    assert not result.models
    assert len(result.variants) == len(WORKS) * len(build_variants("tiny"))
    (table,) = bench_tables(result)
    assert len(table.rows) == len(WORKS)
    assert "Attention types" in capsys.readouterr().out


def test_sizes_are_chosen_by_name():
    assert len(steps_of("models", Settings())) == len(WORKS) * 3 * 2
    assert len(steps_of("models", Settings(sizes=["135M"], dtypes=["bf16"]))) == len(WORKS)
    assert not any("prefill" in step.label for step in steps_of("all", Settings()))
    with pytest.raises(ConfigError, match=r"--sizes: '1B' is unknown; choose from 0\.5M, "):
        Settings(sizes=["1B"])


def test_the_command(tiny, tmp_path, capsys):
    words = ["bench", "models", "--sizes", "[tiny]", "--dtypes", "[fp32]", "--repeats", "3", "--seconds", "1"]
    assert main([*words, "--threads", "1", "--out", str(tmp_path)]) == 0
    result = read_result(tmp_path / "results.json", Bench)
    assert len(result.models) == len(WORKS) * len(NAMES)
    (table,) = bench_tables(result)
    assert len(table.rows) == len(WORKS)
    assert "Whole models" in capsys.readouterr().out

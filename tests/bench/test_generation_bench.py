"""`bench generation`: the same weights in DIFF and DiffLlama, what a step does, its ratios, its table."""

import pytest
import torch

from difftransformer_lab.bench import Settings, generation, sort_rows, steps_of
from difftransformer_lab.bench import work as work_module
from difftransformer_lab.bench.generation import OURS, THEIRS, TWIN, build_models, time_generation
from difftransformer_lab.cli.main import main
from difftransformer_lab.report.bench import bench_tables
from difftransformer_lab.results import Bench, read_result

TINY = {"vocab_size": 50, "hidden_size": 18, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
NAMES = [OURS, *THEIRS, TWIN]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(generation, "MODEL", generation.MODEL | TINY)
    monkeypatch.setattr(generation, "CACHED_TOKENS", 40)


@torch.inference_mode()
def test_diff_and_diffllama_are_one_model():
    models = build_models()
    assert list(models) == NAMES
    ids = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = models[THEIRS[0]](ids).logits
    for name in (OURS, THEIRS[1]):
        torch.testing.assert_close(models[name].eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
    twin = models[TWIN]
    assert twin.config.attention_type == "softmax"
    # But for lambda's four vectors a layer; the norm has no gain on either side.
    assert models[OURS].num_parameters() - twin.num_parameters() == 2 * 4 * 4
    assert models[OURS].num_parameters() == models[THEIRS[0]].num_parameters()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_step_is_one_token_behind_the_cache(kind, monkeypatch):
    made = []
    name = "StaticCache" if kind == "static" else "DynamicCache"
    cache_class = getattr(work_module, name)
    monkeypatch.setattr(work_module, name, lambda *a, **options: made.append(cache_class(*a, **options)) or made[-1])
    for model in build_models().values():
        call = work_module.next_token_work(model, 40, kind)
        for seen in (41, 42):
            assert call().shape == (1, 1, 50)
            assert int(made[-1].get_seq_length()) == seen
    assert len(made) == len(NAMES)


def test_ratios_are_to_static_caches():
    rows = time_generation("fp32", rounds=3, budget_seconds=1.0)
    assert [(row.implementation, row.cache) for row in rows] == [
        (name, kind) for kind in ("static", "dynamic") for name in NAMES
    ]
    seconds = {(row.implementation, row.cache): row.median_seconds for row in rows}
    fastest = min(seconds[name, "static"] for name in THEIRS)
    for row in rows:
        assert row.tokens_per_second == 1 / row.median_seconds
        assert row.rate_over_diffllama == fastest / row.median_seconds
        assert row.rate_over_twin == seconds[TWIN, "static"] / row.median_seconds
        assert (row.rounds, row.cached_tokens) == (3, 40)
        assert row.median_cpu_seconds > 0


def test_the_part_is_measured_by_its_name_alone():
    settings = Settings(dtypes=["fp32", "bf16"])
    assert len(steps_of("generation", settings)) == 2
    assert not any("whole models" in step.label for step in steps_of("all", settings))


def test_the_command(tmp_path, capsys):
    words = ["bench", "generation", "--dtypes", "[fp32]", "--repeats", "3", "--seconds", "1", "--threads", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    result = read_result(tmp_path / "results.json", Bench)
    assert len(result.generation) == 2 * len(NAMES)
    (table,) = bench_tables(result)
    assert len(table.rows) == 2 * len(NAMES)
    assert "Decoding by whole models" in capsys.readouterr().out
    assert sort_rows(result.generation)["generation"] == result.generation

"""`bench diffllama`: the same work of both, its ratios, its table."""

import pytest

from difftransformer.families import acceleration
from difftransformer_lab.bench import Settings, accelerate, sort_rows, steps_of
from difftransformer_lab.bench.accelerate import OURS, THEIRS, WORKS, time_diffllama
from difftransformer_lab.bench.work import SPARE_TOKENS
from difftransformer_lab.cli.main import main
from difftransformer_lab.report.bench import bench_tables
from difftransformer_lab.results import Bench, read_result

TINY = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(accelerate, "MODEL", accelerate.MODEL | TINY | {"num_key_value_heads": 4, "head_dim": 4})
    monkeypatch.setattr(accelerate, "CONTEXT_TOKENS", 24)
    monkeypatch.setattr(accelerate, "CACHED_TOKENS", 40)


@pytest.mark.parametrize("work", WORKS)
def test_times_of_both(work, monkeypatch):
    calls = []
    op = acceleration.normed_differential_attention
    monkeypatch.setattr(
        acceleration, "normed_differential_attention", lambda *a, **options: calls.append(a) or op(*a, **options)
    )
    rows = time_diffllama(work, "fp32", rounds=3, budget_seconds=1.0)
    assert [row.implementation for row in rows] == [THEIRS, OURS]
    assert rows[0].ratio_to_diffllama == 1
    assert rows[1].ratio_to_diffllama == rows[1].median_seconds / rows[0].median_seconds
    assert all(row.rounds == 3 for row in rows)
    # A warm-up and three rounds of one of the two.
    assert len(calls) == (4 if work.startswith("attention") else 8)
    keys = {args[1].shape[2] for args in calls}
    if work == "decoding, dynamic cache":
        assert keys == {41, 42, 43, 44}
    elif work == "decoding, static cache":
        assert keys == {40 + SPARE_TOKENS}


def test_the_part_is_measured_by_its_name_alone():
    settings = Settings(dtypes=["fp32", "bf16"])
    assert len(steps_of("diffllama", settings)) == 2 * len(WORKS)
    assert not any("DiffLlama" in step.label for step in steps_of("all", settings))


def test_the_command(tmp_path, capsys):
    words = ["bench", "diffllama", "--dtypes", "[fp32]", "--repeats", "3", "--seconds", "1", "--threads", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    result = read_result(tmp_path / "results.json", Bench)
    assert [(row.work, row.implementation) for row in result.diffllama] == [
        (work, name) for work in WORKS for name in (THEIRS, OURS)
    ]
    (table,) = bench_tables(result)
    assert len(table.rows) == len(WORKS)
    assert "DiffLlama accelerated" in capsys.readouterr().out
    assert sort_rows(result.diffllama)["diffllama"] == result.diffllama

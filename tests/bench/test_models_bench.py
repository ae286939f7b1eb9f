"""`bench models`: models of one shape, and what is timed of them."""

import pytest

from difftransformer.model import DiffTransformerConfig, count
from difftransformer_lab.bench import models
from difftransformer_lab.bench.models import WORKS, build_models, time_models
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.bench.tables import time_tables
from difftransformer_lab.results import Bench
from tests.support.environment import ENVIRONMENT

TINY = ({"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}, 2, 12)
NAMES = ["DIFF", "DIFF V2", "twin", "twin sdpa", "Llama sdpa"]
QUICK = Settings(repeats=3, seconds=1.0, threads=1)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(models.SIZES, "tiny", TINY)


def test_models_have_one_shape():
    built = build_models("tiny")
    assert list(built) == NAMES
    twin = built["twin"].num_parameters()
    assert built["Llama sdpa"].num_parameters() == built["twin sdpa"].num_parameters() == twin
    assert (built["twin"].config.attn_backend, built["twin sdpa"].config.attn_backend) == ("auto", "sdpa")
    assert built["DIFF"].num_parameters() - twin == 2 * 24  # four vectors of 4 numbers and a gain of 8 in each layer


@pytest.mark.parametrize("size", models.SIZES)
def test_sizes_are_what_they_are_called(size):
    parameters = count(DiffTransformerConfig(**models.SIZES[size][0], attention_type="softmax")).parameters
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
    (table,) = time_tables(Bench(command="", created="", environment=ENVIRONMENT, foreign_cpu_share=None, rows=rows))
    assert table.header() == ["", "Llama sdpa, ms", *NAMES[:-1]]
    seconds = {row.implementation: row.timing.median_seconds for row in rows}
    assert table.rows[0][2] == f"{seconds['DIFF'] / seconds['Llama sdpa']:.2f}"

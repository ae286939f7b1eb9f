"""Benchmarks as on a user's CPU, where Triton's interpreter is not asked for: it takes minutes."""

import pytest

from difftransformer.ops import triton


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Triton's kernels run on a GPU or nowhere."""
    reason_on = triton._unavailable
    monkeypatch.setattr(
        triton, "_unavailable", lambda device: "runs on CUDA devices" if device == "cpu" else reason_on(device)
    )

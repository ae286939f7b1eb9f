"""The benchmark of the loss: what it times computes the same, and what is promised of memory."""

import pytest
import torch

from difftransformer_lab.bench.loss import loss_shapes
from difftransformer_lab.bench.loss_work import CHUNKED, LOSSES, WHOLE
from difftransformer_lab.bench.memory import peak_loss_bytes


def test_implementations_agree():
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (300,))
    found = {}
    for name, loss in LOSSES.items():
        value = loss(hidden, weight, targets)
        found[name] = [value.detach(), *torch.autograd.grad(value, (hidden, weight))]
    for name, values in found.items():
        for value, expected in zip(values, found[WHOLE], strict=True):
            assert torch.allclose(value, expected, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("shape", loss_shapes(("fp32",)), ids=lambda shape: f"{shape.hidden_size}x{shape.vocab_size}")
def test_memory(shape):
    whole, chunked = (peak_loss_bytes(name, shape=shape, threads=1) for name in (WHOLE, CHUNKED))
    assert whole > 2 * 4 * shape.tokens * shape.vocab_size
    assert chunked <= 0.4 * whole

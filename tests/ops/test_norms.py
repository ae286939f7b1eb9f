"""RMSNorm against its definition in float64 and against torch's own."""

import pytest
import torch

from difftransformer.ops import rms_norm


def definition(x, weight, eps):
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight.double()


def inputs(dtype, with_weight, width=33):
    generator = torch.Generator().manual_seed(0)
    x = (5 * torch.randn(2, 3, width, generator=generator)).to(dtype)
    return x, (torch.rand(width, generator=generator) + 0.5 if with_weight else None)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition(dtype, with_weight):
    x, weight = inputs(dtype, with_weight)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps / 2)
    torch.testing.assert_close(out.double(), definition(x, weight, 1e-5), rtol=1.01 * tolerance, atol=1e-7)


def test_low_precision_keeps_a_weight_in_fp32():
    """1.002 is 1 in bf16; times 300 the difference shows."""
    x = torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    assert rms_norm(x, torch.full((4,), 1.0047), 0.0)[0, 0].item() == pytest.approx(1.0078125)


def test_eps_counts():
    x = torch.zeros(2, 4)
    assert torch.equal(rms_norm(x, None, 1e-5), x)
    small = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(rms_norm(small, None, 3e-6), small / 2e-3)


@pytest.mark.parametrize("with_weight", [True, False])
def test_gradcheck(with_weight):
    x, weight = inputs(torch.float64, with_weight, width=5)
    x.requires_grad_()
    if weight is None:
        assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-5), x)
    else:
        assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight.double().requires_grad_()))

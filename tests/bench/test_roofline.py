"""The least work by formula against PyTorch's FLOP counter and against loops over the bytes."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from difftransformer_lab.bench.roofline import (
    FOUR_CALLS,
    FUSED,
    PEAKS,
    PLAIN,
    SCHEMES,
    SPLIT,
    TWO_CALLS,
    WIDE_SPLIT,
    Peak,
    attention_bytes,
    attention_flops,
    roofline_seconds,
    work_over_least,
)
from difftransformer_lab.results import AttentionShape

B, H, N, D = 2, 3, 16, 4


def shape(mode, dtype="bf16", length_tokens=N):
    return AttentionShape(dtype=dtype, mode=mode, length_tokens=length_tokens, heads=H, head_dim=D, batch=B)


def draw(heads, *size):
    return torch.randn(B, heads, *size)


def plain_forward(heads, width, value_width):
    """Two products."""
    probabilities = (draw(heads, N, width) @ draw(heads, width, N)).softmax(-1)
    return probabilities @ draw(heads, N, value_width)


def plain_backward(heads, width, value_width):
    """Five products: the scores again, dP, dV, dQ and dK."""
    query, key, value, grad = (draw(heads, N, w) for w in (width, width, value_width, value_width))
    probabilities = (query @ key.mT).softmax(-1)
    grad_p = grad @ value.mT
    _ = probabilities.mT @ grad
    grad_s = probabilities * grad_p
    return grad_s @ key, grad_s.mT @ query


def fused_forward():
    """For each map its scores and its sum, which is normalised last."""
    value = draw(H, N, 2 * D)
    first, second = ((draw(H, N, D) @ draw(H, D, N)).exp() for _ in range(2))
    return first @ value / first.sum(-1, keepdim=True) - second @ value / second.sum(-1, keepdim=True)


def fused_backward():
    """Both maps' scores; dP and dV once."""
    queries, keys = ([draw(H, N, D) for _ in range(2)] for _ in range(2))
    value, grad = draw(H, N, 2 * D), draw(H, N, 2 * D)
    maps = [(q @ k.mT).softmax(-1) for q, k in zip(queries, keys, strict=True)]
    grad_p = grad @ value.mT
    _ = (maps[0] - maps[1]).mT @ grad
    return [((p * grad_p) @ k, (p * grad_p).mT @ q) for p, q, k in zip(maps, queries, keys, strict=True)]


def split_backward(apart=False):
    """dV and dK in one pass, or each in its own, and dQ in another: the scores in all, dP where it is needed."""
    queries, keys = ([draw(H, N, D) for _ in range(2)] for _ in range(2))
    value, grad = draw(H, N, 2 * D), draw(H, N, 2 * D)

    def again():
        return [(q @ k.mT).softmax(-1) for q, k in zip(queries, keys, strict=True)], grad @ value.mT

    maps, grad_p = again()
    _ = (maps[0] - maps[1]).mT @ grad, [(p * grad_p).mT @ q for p, q in zip(maps, queries, strict=True)]
    if apart:
        _ = [q @ k.mT for q, k in zip(queries, keys, strict=True)]
    maps, grad_p = again()
    return [(p * grad_p) @ k for p, k in zip(maps, keys, strict=True)]


WAYS = {
    PLAIN: (lambda: plain_forward(2 * H, D, D), lambda: plain_backward(2 * H, D, D)),
    FUSED: (fused_forward, fused_backward),
    SPLIT: (fused_forward, split_backward),
    WIDE_SPLIT: (fused_forward, lambda: split_backward(apart=True)),
    TWO_CALLS: (
        lambda: [plain_forward(H, D, 2 * D) for _ in range(2)],
        lambda: [plain_backward(H, D, 2 * D) for _ in range(2)],
    ),
    FOUR_CALLS: (
        lambda: [plain_forward(H, D, D) for _ in range(4)],
        lambda: [plain_backward(H, D, D) for _ in range(4)],
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_flops_of_each_scheme(scheme):
    """Half of what a call without causal mask does; padding Q and K to 2 d costs what four calls do."""
    counts = []
    for way in WAYS[scheme]:
        with FlopCounterMode(display=False) as counter:
            way()
        counts.append(counter.get_total_flops())
    assert attention_flops(shape("forward"), scheme) == counts[0] / 2
    assert attention_flops(shape("backward"), scheme) == counts[1] / 2
    assert attention_flops(shape("forward+backward"), scheme) == sum(counts) / 2
    if scheme == FOUR_CALLS:
        with FlopCounterMode(display=False) as counter:
            plain_forward(2 * H, 2 * D, 2 * D)
            plain_backward(2 * H, 2 * D, 2 * D)
        assert counter.get_total_flops() == sum(counts)


def test_flops_of_decoding():
    """One query sees every key: nothing is halved."""
    with FlopCounterMode(display=False) as counter:
        _ = (draw(2 * H, 1, D) @ draw(2 * H, D, N)).softmax(-1) @ draw(2 * H, N, D)
    assert attention_flops(shape("decode")) == counter.get_total_flops()


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_of_every_tensor(dtype, itemsize):
    """Q, K, V in and O out; backward these four and dO in, three gradients out; decoding has one query."""
    tensor = torch.empty(B, H, N, 2 * D).numel() * itemsize
    assert attention_bytes(shape("forward", dtype)) == 4 * tensor
    assert attention_bytes(shape("backward", dtype)) == 8 * tensor
    assert attention_bytes(shape("forward+backward", dtype)) == 12 * tensor
    assert attention_bytes(shape("decode", dtype)) == 2 * tensor + 2 * tensor / N


def test_the_higher_limit_is_the_roofline():
    """By hand: arithmetic binds a long forward pass, memory binds decoding; differential attention takes 6 units, not 4."""
    peak = Peak(1e12, 1e12)
    long = shape("forward", length_tokens=4096)
    assert roofline_seconds(long, "torch sdpa", peak) == attention_flops(long, PLAIN) / 1e12
    assert roofline_seconds(long, "diff flex", peak) == pytest.approx(
        1.5 * roofline_seconds(long, "softmax triton", peak)
    )
    assert roofline_seconds(long, "DiffLlama sdpa", peak) == roofline_seconds(long, "normed triton", peak)
    decode = shape("decode", length_tokens=4096)
    assert roofline_seconds(decode, "diff triton", Peak(1e15, 1e12)) == attention_bytes(decode) / 1e12
    assert all(peak.flops_per_second > 100 * peak.bytes_per_second for peak in PEAKS.values())


def test_work_over_the_least():
    """Of what is known: fused 1, two calls 14 for 10 units backward, four calls twice; K and V read so often in decoding."""
    assert work_over_least(shape("forward"), "diff triton") == 1
    assert work_over_least(shape("backward"), "diff triton") is None
    assert work_over_least(shape("backward"), "diff triton deterministic") == 1.4
    wide = dataclasses.replace(shape("backward"), head_dim=128)
    assert work_over_least(wide, "diff triton deterministic") == 1.6
    assert work_over_least(shape("backward"), "diff flex") == 1.4
    assert work_over_least(shape("forward+backward"), "DiffLlama sdpa") == 28 / 16
    assert work_over_least(shape("decode"), "diff flex") == 1.5
    assert work_over_least(shape("decode"), "diff sdpa") == 2
    assert work_over_least(shape("forward"), "torch cudnn") == 1
    assert work_over_least(shape("forward"), "diff chunked") is None

"""Attention of peaked scores: at standard deviations of 20 and 60 nats nearly all exponentials are denormal numbers."""

import dataclasses
from functools import partial

from script import run

from difftransformer_lab.bench.attention import time_attention
from difftransformer_lab.bench.attention_work import AttentionShape
from difftransformer_lab.bench.settings import Settings, Step

SCORE_FACTORS = (1, 8, 20, 60)


def steps(settings: Settings) -> list[Step]:
    """List the shapes: our own kernels and PyTorch's on scores of several spreads."""
    ours = dataclasses.replace(settings, backends=[settings.defaults.kernel], peers=False)
    shapes = [
        AttentionShape(dtype=dtype, mode=mode, length_tokens=1024, heads=4, head_dim=64, score_factor=factor)
        for dtype in settings.dtypes or settings.defaults.dtypes
        for mode in ("forward", "forward+backward")
        for factor in SCORE_FACTORS
    ]
    return [
        Step(f"{shape} factor {shape.score_factor}", partial(time_attention, shape, ours, "peaked")) for shape in shapes
    ]


if __name__ == "__main__":
    run(steps, __doc__)

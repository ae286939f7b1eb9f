"""Attention of peaked scores: at standard deviations of 20 and 60 nats nearly all exponentials are denormal numbers."""

from functools import partial

from script import Steps, run

from difftransformer_lab.bench.attention import KERNELS, AttentionShape, attention_call, attention_rows, draw
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.results import BenchRow

SCORE_FACTORS = (1, 8, 20, 60)
LENGTH_TOKENS = 1024


def steps(settings: Settings) -> Steps:
    """List the shapes and the spreads of scores."""
    return {
        f"{dtype} {mode}, factor {factor}": partial(measure, dtype, mode, factor, settings)
        for dtype in settings.dtypes or ()
        for mode in ("forward", "forward+backward")
        for factor in SCORE_FACTORS
    }


def measure(dtype: str, mode: str, factor: float, settings: Settings) -> list[BenchRow]:
    """Time our own kernels and PyTorch's on scores of one spread."""
    shape, kernel = AttentionShape(dtype, mode, 1, LENGTH_TOKENS, 4, 64), KERNELS[settings.device]
    query, key, value = draw(shape, settings.device)
    data = [query * factor, key, value]
    names = ("torch sdpa", f"softmax {kernel}", f"diff {kernel}")
    builders = {name: partial(attention_call, name, shape, data) for name in names}
    return attention_rows("peaked", shape, settings, builders, score_factor=factor)


if __name__ == "__main__":
    run(steps, __doc__)

"""The loss over a vocabulary: logits of all tokens at once, in chunks, and PyTorch's own fused function."""

from functools import partial

from ..results import Dtype, LossShape, LossTiming
from .loss_work import LOSSES, WHOLE, loss_work
from .memory import device_peak_bytes, peak_loss_bytes
from .timing import time_interleaved


def time_loss(shape: LossShape, *, device: str, rounds: int, budget_seconds: float, threads: int) -> list[LossTiming]:
    """Time the implementations in turn, and measure the peak memory of each above its inputs."""
    works = {name: loss_work(name, shape, device) for name in LOSSES}
    timings = time_interleaved(works, rounds=rounds, budget_seconds=budget_seconds, device=device)
    weigh = partial(peak_loss_bytes, shape=shape, threads=threads)
    peaks = {name: weigh(name) if device == "cpu" else device_peak_bytes(work) for name, work in works.items()}
    return [
        LossTiming(
            **vars(timing),
            **vars(shape),
            implementation=name,
            ratio_to_whole=timing.median_seconds / timings[WHOLE].median_seconds,
            peak_bytes=peaks[name],
        )
        for name, timing in timings.items()
    ]


def loss_shapes(dtypes: tuple[Dtype, ...]) -> list[LossShape]:
    """List the shapes that are measured."""
    return [
        LossShape(dtype=dtype, tokens=tokens, hidden_size=width, vocab_size=words)
        for dtype in dtypes
        for tokens, width, words in ((2048, 128, 2048), (4096, 128, 20_000), (4096, 512, 20_000))
    ]

"""The loss over a vocabulary: logits of all tokens at once, in chunks, and PyTorch's own fused function."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from memory import device_peak_bytes, in_a_fresh_process
from script import Steps, run
from torch import Tensor

from difftransformer.model.nll import CHUNK_TOKENS, summed_nll
from difftransformer.model.weights import DTYPES
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.bench.timing import time_rows
from difftransformer_lab.results import BenchRow
from difftransformer_lab.studies.costs import peak_bytes

WHOLE, CHUNKED, TORCH = "whole logits", "chunked", "torch linear_cross_entropy"
SHORT_TOKENS = 64


class Shape(NamedTuple):
    """A loss over `vocab_size` logits of each of `tokens` hidden states."""

    tokens: int
    hidden_size: int
    vocab_size: int


SHAPES = (Shape(2048, 128, 2048), Shape(4096, 128, 20_000), Shape(4096, 512, 20_000))


def steps(settings: Settings) -> Steps:
    """List the shapes and the data types."""
    return {
        f"loss of {shape}, {dtype}": partial(measure, shape, dtype, settings)
        for dtype in settings.dtypes or ()
        for shape in SHAPES
    }


def measure(shape: Shape, dtype: str, settings: Settings) -> list[BenchRow]:
    """Time the implementations in turn, and measure the peak memory of each above its inputs."""
    device, threads = settings.device, settings.threads or torch.get_num_threads()
    builders = {name: partial(loss_work, name, shape, dtype, device) for name in LOSSES}
    row = partial(BenchRow, part="loss", work="forward+backward", dtype=dtype, shape=shape._asdict())
    rows = []
    for one in time_rows(builders, settings, row):
        if device == "cpu":
            peak = in_a_fresh_process(peak_in_this_process, one.implementation, shape, dtype, threads)
        else:
            peak = device_peak_bytes(builders[one.implementation]())
        rows.append(replace(one, figures={"peak_bytes": float(peak)}))
    return rows


def peak_in_this_process(name: str, shape: Shape, dtype: str, threads: int) -> int:
    """Measure the peak memory of a pass above its inputs, after a small one in which libraries allocate their workspaces."""
    torch.set_num_threads(threads)
    loss_work(name, shape._replace(tokens=SHORT_TOKENS, vocab_size=SHORT_TOKENS), dtype)()
    return peak_bytes(loss_work(name, shape, dtype))


def loss_work(implementation: str, shape: Shape, dtype: str, device: str = "cpu") -> Callable[[], None]:
    """Build a forward and backward pass of the loss on random numbers, with gradients of hidden states and weight."""
    draw = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden_size, generator=draw, device=device)
    weight = 0.02 * torch.randn(shape.vocab_size, shape.hidden_size, generator=draw, device=device)
    targets = torch.randint(shape.vocab_size, (shape.tokens,), generator=draw, device=device)
    hidden, weight = hidden.to(DTYPES[dtype]).requires_grad_(), weight.to(DTYPES[dtype]).requires_grad_()

    def step() -> None:
        hidden.grad = weight.grad = None
        LOSSES[implementation](hidden, weight, targets).backward()

    return step


def _whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    chunk = CHUNK_TOKENS[hidden.device.type]
    return summed_nll(hidden, weight, targets, chunk_tokens=chunk) / len(targets)


def _torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    # Its mean is summed in the dtype of the inputs, which is too coarse for bf16.
    return F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options).float().mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {WHOLE: _whole, CHUNKED: _chunked}
if hasattr(F, "linear_cross_entropy"):
    LOSSES[TORCH] = _torch


if __name__ == "__main__":
    run(steps, __doc__)

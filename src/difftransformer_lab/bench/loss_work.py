"""What the benchmark of the loss computes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from difftransformer.model.nll import CHUNK_TOKENS, summed_nll
from difftransformer.model.weights import DTYPES

from ..results import LossShape

WHOLE, CHUNKED, TORCH = "whole logits", "chunked", "torch linear_cross_entropy"


def loss_work(implementation: str, shape: LossShape, device: str = "cpu") -> Callable[[], None]:
    """Return a forward and backward pass of the loss on random numbers, with gradients of hidden states and weight."""
    draw, dtype = torch.Generator(device).manual_seed(0), DTYPES[shape.dtype]
    hidden = torch.randn(shape.tokens, shape.hidden_size, generator=draw, device=device)
    weight = 0.02 * torch.randn(shape.vocab_size, shape.hidden_size, generator=draw, device=device)
    targets = torch.randint(shape.vocab_size, (shape.tokens,), generator=draw, device=device)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()

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

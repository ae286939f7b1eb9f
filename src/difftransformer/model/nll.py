"""The loss that training and evaluation share, with the logits of all tokens or of a chunk of tokens at a time."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import ConfigError, DataError, ShapeError
from ..ops.problem import LOW_PRECISION, is_readable

# On a CPU, logits beyond the caches cost more time than the calls for each chunk.
WHOLE_LOGITS = {"cpu": 2**21, "cuda": 2**26}  # logits that are computed at once unless a chunk is given
CHUNK_TOKENS = {"cpu": 256, "cuda": 1024}


def next_token_nll(model: nn.Module, input_ids: Tensor, targets: Tensor, **where: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target in nats, (B, T) in fp32, and 0 for targets of -100.

    Args:
        model: A causal language model with the interface of transformers.
        input_ids: (B, T).
        targets: (B, T), the token after each of input_ids, or -100.
        where: position_ids of tokens that do not begin their sequence, or of packed documents, which start at 0 in each.
    """
    logits = model(input_ids=input_ids, use_cache=False, **where).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def summed_next_token_nll(
    model: nn.Module, input_ids: Tensor, targets: Tensor, *, z_loss: float = 0.0, **where: Any
) -> Tensor:
    """Return the sum of `next_token_nll`, a scalar; in chunks where the model `has_loss_in_chunks`.

    Args:
        model, input_ids, where: See `next_token_nll`.
        targets: (B, T), the token after each of input_ids; -100 leaves a token out.
        z_loss: See `summed_nll`.
    """
    has_chunks: Any = getattr(model, "has_loss_in_chunks", None)  # models of transformers have none
    if has_chunks is not None and has_chunks():
        labels: dict[str, Any] = {"labels": targets, "shift_labels": targets, "num_items_in_batch": 1, "z_loss": z_loss}
        return model(input_ids=input_ids, **labels, skip_logits=True, use_cache=False, **where).loss
    if not z_loss:
        return next_token_nll(model, input_ids, targets, **where).sum()
    logits = model(input_ids=input_ids, use_cache=False, **where).logits.float().flatten(0, 1)
    squares = logits.logsumexp(-1).square().masked_fill(targets.flatten() < 0, 0)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") + z_loss * squares.sum()


def loss_chunk(tokens: int, vocab_size: int, device: str) -> int | None:
    """Return the tokens of a chunk for a loss over `tokens`, or None where the logits of all are few."""
    device = device if device in CHUNK_TOKENS else "cuda"
    return None if tokens * vocab_size <= WHOLE_LOGITS[device] else CHUNK_TOKENS[device]


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    **_: Any,
) -> Tensor:
    """Return the loss of a causal language model as transformers defines it, without its logits.

    Args:
        hidden: (B, T, M), what the output layer maps to logits.
        weight: (V, M), weight of the output layer.
        labels: (B, T), token ids that are shifted here; `ignore_index` leaves a token out.
        chunk_tokens: See `summed_nll`.
        shift_labels: (B, T), labels that are shifted already, in place of `labels`.
        num_items_in_batch: Divisor of the summed loss; None means the number of labels.
        ignore_index: Label of tokens without a loss.
        z_loss: See `summed_nll`.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(hidden.device)
    how: dict[str, Any] = {"chunk_tokens": chunk_tokens, "ignore_index": ignore_index, "z_loss": z_loss}
    total = summed_nll(hidden, weight, targets, **how)
    return total / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def summed_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the summed negative log-likelihood of the targets in nats, a scalar in fp32.

    Logits exist for a chunk of tokens at a time. Their gradient is formed with them, because that of a sum is known before the
    backward pass: no logits are kept or computed twice. In place of them, gradients of `hidden` and `weight` are kept. The
    result has a first derivative only.

    A weight that is a DTensor, sharded by rows, is a vocabulary-parallel head: its ranks see the same tokens, each computes
    the logits of its rows, and every rank gets the whole loss and the whole gradient of `hidden`.

    Args:
        hidden: (..., M).
        weight: (V, M).
        targets: (...), token ids below V; `ignore_index` leaves a token out.
        chunk_tokens: Number of tokens whose logits are in memory at a time.
        ignore_index: Target of tokens without a loss.
        z_loss: Weight of the sum of the squares of log Z, which is added; Z is the sum of exponentials of a token's logits.

    Raises:
        ConfigError: chunk_tokens is below 1, or a DTensor is not sharded by rows on one mesh dimension.
        DataError: A target is not an id. On a GPU, as in `F.cross_entropy`, it is an assertion of the device.
        ShapeError: There is not a target for each row of hidden.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens={chunk_tokens}: give at least 1")
    if targets.shape != hidden.shape[:-1]:
        raise ShapeError(
            f"targets have shape {tuple(targets.shape)}, expected {tuple(hidden.shape[:-1])}, one for each token of hidden; "
            "omit logits_to_keep where labels are given"
        )
    _check_targets(targets, weight.shape[0], ignore_index)
    group: Any = None
    sharded: Any = weight  # a DTensor, whose import is slow and which only a distributed run has
    if hasattr(sharded, "placements"):
        if [placement.is_shard(0) for placement in sharded.placements] != [True]:
            raise ConfigError(
                f"weight has placements {sharded.placements}; shard its rows over one dimension of a mesh"
            )
        group = sharded.device_mesh.get_group()
        weight = sharded.to_local()
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    how = (chunk_tokens, ignore_index, z_loss, group, torch.is_grad_enabled())
    return _SummedNLL.apply(hidden.flatten(0, -2), weight, targets.flatten(), *how)


def _check_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    is_known = ((targets >= 0) & (targets < vocab_size)) | (targets == ignore_index)
    # Reading a value would wait for a device, end a graph, or fail where tensors have no values.
    if not is_readable(targets):
        torch._assert_async(is_known.all(), f"a label is neither an id below {vocab_size} nor {ignore_index}")
    elif not is_known.all():
        raise DataError(
            f"label {targets[~is_known][0].item()}: give ids from 0 to {vocab_size - 1}, or {ignore_index} for tokens "
            "without a loss"
        )


class _SummedNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        ignore_index: int,
        z_loss: float,
        group: Any,
        with_gradient: bool,
    ) -> Tensor:
        first = 0 if group is None else dist.get_rank(group) * weight.shape[0]
        total = torch.zeros((), device=hidden.device)
        can_fuse = with_gradient and group is None and hidden.is_cuda and hidden.dtype in LOW_PRECISION
        fused = _fused() if can_fuse else None
        if with_gradient:
            hidden_grad = torch.empty_like(hidden)
            # The sum over chunks in fp32, rounded once at the end.
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            wanted = targets[rows]
            if fused is not None:
                loss, gradient = fused(hidden[rows] @ weight.T, wanted, ignore_index, z_loss)
                total += loss
                hidden_grad[rows] = gradient @ weight
                weight_grad += gradient.T @ hidden[rows]
                continue
            counted = (wanted != ignore_index)[:, None]
            column = (wanted - first)[:, None]
            own = counted & (column >= 0) & (column < weight.shape[0])  # targets among this rank's rows
            column = column.where(own, 0)
            # In place from here on: one buffer holds logits, exponentials and their gradient in turn.
            scores = (hidden[rows] @ weight.T).float()
            largest = _reduced(scores.amax(-1, keepdim=True), "MAX", group)
            scores -= largest
            target = _reduced(scores.gather(1, column).where(own, 0), "SUM", group)
            normalizer = _reduced(scores.exp_().sum(-1, keepdim=True), "SUM", group)
            total += (normalizer.log() - target).where(counted, 0).sum()
            factor = counted / normalizer
            if z_loss:
                log_z = normalizer.log() + largest
                total += z_loss * log_z.square().where(counted, 0).sum()
                factor *= 1 + 2 * z_loss * log_z
            if with_gradient:
                scores *= factor
                scores.scatter_add_(1, column, -own.float())
                gradient = scores.to(weight.dtype)
                hidden_grad[rows] = gradient @ weight
                if weight.dtype == torch.float32:
                    weight_grad.addmm_(gradient.T, hidden[rows])
                else:
                    weight_grad += gradient.T @ hidden[rows]
        if with_gradient:
            ctx.save_for_backward(_reduced(hidden_grad, "SUM", group), weight_grad.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * scale, weight_grad * scale, None, None, None, None, None, None


@torch.compiler.assume_constant_result
@functools.cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return `loss_and_gradient` compiled, which reads the logits three times; None without Triton."""
    return torch.compile(loss_and_gradient, fullgraph=True) if find_spec("triton") else None


def loss_and_gradient(logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the summed loss of logits (N, V) for targets (N,), and its gradient in their dtype, as `summed_nll` defines it."""
    scores, counted = logits.float(), (targets != ignore_index)[:, None]
    log_z = scores.logsumexp(-1, keepdim=True)
    hit = counted & (torch.arange(scores.shape[1], device=scores.device) == targets[:, None])
    loss = (log_z + z_loss * log_z.square()).where(counted, 0).sum() - scores.where(hit, 0).sum()
    gradient = (scores - log_z).exp() * (1 + 2 * z_loss * log_z).where(counted, 0) - hit.float()
    return loss, gradient.to(logits.dtype)


def _reduced(value: Tensor, how: str, group: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(value, getattr(dist.ReduceOp, how), group)
    return value

"""How large a model's attention logits and hidden states are, in memory that does not grow with their number."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from difftransformer.attention import Attention
from difftransformer.errors import EvaluationError
from difftransformer.ops.logits import logits_of_rows
from difftransformer.ops.problem import Restrictions

from . import BINS
from .hooks import observing_inputs, on_the_op, written_out

_FIRST_NOT_FINITE = 0x7F80


class Magnitude:
    """Collects absolute values and keeps the largest of them and a histogram, from which the median follows.

    The largest values are exact. The histogram counts values rounded to bf16 (8 significant bits): exact for bf16 numbers, and
    within 2^-8 of any other.
    """

    def __init__(self, name: str, largest: int) -> None:
        self.name, self.largest = name, largest
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.top = torch.empty(0)

    def add(self, values: Tensor, allowed: Tensor | None = None) -> None:
        """Count more values, of any shape and floating dtype; with a bool mask only those where it is True.

        Raises:
            EvaluationError: A value is not finite.
        """
        sizes, count = values.detach().float().abs(), values.numel()
        if allowed is not None:
            # The others become zeros, which are subtracted below: this is cheaper than selecting the values.
            sizes = sizes.masked_fill_(~allowed, 0)
            count = int(allowed.sum()) * (values.numel() // allowed.numel())
        if not count:
            return
        sizes = sizes.flatten()
        places = sizes.bfloat16().view(torch.int16) & (BINS - 1)  # NaN may keep its sign bit
        bins = torch.bincount(places, minlength=BINS).cpu()
        bins[0] -= len(sizes) - count
        if int(bins[_FIRST_NOT_FINITE:].sum()):
            raise EvaluationError(f"{self.name}: some are not finite in this dtype; use --dtype fp32")
        self.counts += bins
        if len(self.top) == self.largest:
            sizes = sizes[sizes > self.top[-1]]
        best = sizes.topk(min(self.largest, count, len(sizes))).values.cpu()
        self.top = torch.cat((self.top, best)).sort(descending=True).values[: self.largest].clone()

    def summary(self) -> dict[str, Any]:
        """Return `largest` in descending order, and the bins that are not empty with their counts."""
        filled = self.counts.nonzero().flatten()
        return {"largest": self.top.tolist(), "bins": filled.tolist(), "counts": self.counts[filled].tolist()}


def magnitudes(model: Any, rows: Sequence[Tensor], largest: int) -> dict[str, Any]:
    """Measure how large attention logits and hidden states become (arXiv:2410.05258 section 3.7).

    Logits are the scaled logits of both maps, for keys that a query may attend to; a map that several heads share counts
    once. Hidden states are the output of each layer. The rows, (1, T) each, go one at a time through the model's own
    kernels; the logits are formed beside them, some rows of a map at a time. Memory does not grow with the number of rows.

    Returns:
        `Magnitude.summary` of `logits` and of `hidden`.

    Raises:
        EvaluationError: See `hooks.written_out`; or a value is not finite.
    """
    logits, hidden = Magnitude("attention logits", largest), Magnitude("hidden states", largest)
    with written_out(model) as tapped:
        pass

    def observe(layer: int, maps: Sequence[tuple[Tensor, Tensor]], restrictions: Restrictions, scale: float) -> None:
        module = tapped[layer]
        copies = module.layout.heads_per_second_map if isinstance(module, Attention) else 1
        for number, (query, key) in enumerate(maps):
            distinct = slice(None, None, copies if number else 1)  # heads that share a second map each form it
            for scores, allowed in logits_of_rows(query, key, restrictions, scale, distinct):
                logits.add(scores, allowed)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        hidden.add(output[0] if isinstance(output, tuple) else output)

    with on_the_op(model), ExitStack() as hooks, observing_inputs(tapped, observe):
        for block in _blocks(model, tapped[0]):
            hooks.callback(block.register_forward_hook(leave).remove)
        for row in rows:
            model(input_ids=row, use_cache=False, logits_to_keep=1)
    return {"logits": logits.summary(), "hidden": hidden.summary()}


def _blocks(model: nn.Module, attention: nn.Module) -> list[nn.Module]:
    """Return the model's layers: the list that contains the layer with this attention."""
    path = next(name for name, module in model.named_modules() if module is attention).split(".")
    while path:
        path.pop()
        holder = model.get_submodule(".".join(path))
        if isinstance(holder, nn.ModuleList):
            return list(holder)
    raise EvaluationError(f"{type(model).__name__}: its layers are in no list, so their output cannot be seen")

"""Does a model look into the future? A check of any causal model or module from outside, by its outputs alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import EvaluationError
from ..ops.problem import LOW_PRECISION
from ..progress import report

EVERY_POSITION = 512
"""Every position up to this one is tried, then the positions beside the borders of tiles of 16 tokens (and of larger tiles)."""
TILE = 16
_ALONE = 16  # most prefixes given alone beside the longest; outputs that depend on the length do so at every position
# Limits of a batch's inputs and outputs: a CPU gets larger blocks of memory from the system each time, and clears them.
_BATCH_TOKENS, _BATCH_NUMBERS = 4096, 2**22
# Largest change that rounding explains, in standard deviations of the outputs.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
TOLERANCE_BELOW_FP32 = 0.05


@dataclass(frozen=True)
class Change:
    """The largest change of an output.

    Attributes:
        size: In standard deviations of the outputs.
        output: Position of the output that changed most.
        position: Position of the first token that was changed or left out.
    """

    size: float
    output: int
    position: int


@dataclass(frozen=True)
class Causality:
    """Result of `check_causality`.

    Attributes:
        changed: Largest change of outputs before a position when all tokens from the position on are replaced.
        alone: Largest change of outputs before a position when the tokens before it are given alone.
        tolerance: Largest change that counts as rounding, in standard deviations of the outputs.
        positions: Number of positions that were tried.
    """

    changed: Change
    alone: Change
    tolerance: float
    positions: int

    @property
    def excess(self) -> float:
        """The largest change over the tolerance; up to 1 it is rounding."""
        return max(self.changed.size, self.alone.size) / self.tolerance

    @property
    def is_causal(self) -> bool:
        """Whether no output changed by more than the tolerance."""
        return self.excess <= 1


@torch.no_grad()
def check_causality(
    model: Callable[[Tensor], Any],
    inputs: Tensor,
    *,
    vocabulary: int | None = None,
    positions: Sequence[int] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Causality:
    """Check that no output depends on later inputs.

    For each position t, tokens from t on are replaced at random, which finds outputs that read them; many positions are tried
    in one batch. And for up to 17 positions, tokens before t are given alone, which also finds outputs that depend on the
    length, as in a model that normalises over time.

    Args:
        model: A function of a batch of inputs that returns a tensor (B, T, ...), or an output of transformers with `logits` or
            `last_hidden_state`, or a tuple that begins with such a tensor. Modules must be in evaluation mode.
        inputs: (B, T) token ids or (B, T, C) numbers, T at least 2.
        vocabulary: Number of token ids to draw from. None means the largest id of the inputs + 1.
        positions: Positions to try, from 1 to T - 1. None means all up to 512, then those beside every 16th.
        tolerance: Largest change that counts as rounding, in standard deviations of the outputs. None means 1e-9 in
            float64, 1e-4 in float32 and 0.05 below.
        seed: Seed of the replacements.

    Raises:
        EvaluationError: Inputs or positions have other shapes or values, outputs have other shapes or are not finite,
            or two equal calls differ, as with dropout.
    """
    length = _check_inputs(inputs, vocabulary)
    tried = _positions(length) if positions is None else list(positions)
    if not tried or not all(0 < position < length for position in tried):
        raise EvaluationError(f"positions {tried}: name some from 1 to {length - 1}, the last of the inputs")
    whole = _outputs(model, inputs)
    if not torch.equal(again := _outputs(model, inputs), whole):
        difference = (again - whole).abs().max().item()
        raise EvaluationError(f"two equal calls differ by up to {difference:.2g}; put the module in evaluation mode")
    if (spread := whole.double().std().item()) == 0:
        raise EvaluationError("all outputs are equal, which shows nothing; use a model with other weights")
    others = _replacements(inputs, vocabulary, seed)
    changed = []
    at_once = max(1, min(_BATCH_TOKENS // (inputs.shape[0] * length), _BATCH_NUMBERS // whole.numel()))
    for begin in range(0, len(tried), at_once):
        batch = tried[begin : begin + at_once]
        mixed = torch.cat([torch.cat((inputs[:, :position], others[:, position:]), 1) for position in batch])
        changed.append(_change(whole, _outputs(model, mixed), batch, spread))
        report(begin + len(batch), len(tried))
    step = -(-len(tried) // _ALONE)
    alone = [
        _change(whole[:, :t], _outputs(model, inputs[:, :t]), [t], spread) for t in sorted({*tried[::step], tried[-1]})
    ]
    if tolerance is None:
        tolerance = TOLERANCES.get(whole.dtype, TOLERANCE_BELOW_FP32)
    return Causality(_largest(changed), _largest(alone), tolerance, len(tried))


def positions_beside_tiles(length: int) -> list[int]:
    """List the positions of a sequence beside the borders of tiles of 16 tokens, and the last one."""
    return [t for t in range(1, length) if t % TILE in (0, 1, TILE - 1) or t == length - 1]


def _check_inputs(inputs: Tensor, vocabulary: int | None) -> int:
    """Return the number of positions."""
    if inputs.ndim < 2 or inputs.shape[1] < 2 or not inputs.numel():
        raise EvaluationError(
            f"inputs have shape {tuple(inputs.shape)}; give (B, T) ids or (B, T, C) numbers, T at least 2"
        )
    if not inputs.is_floating_point():
        largest, size = int(inputs.max()), _size(inputs, vocabulary)
        if size < 2 or size <= largest:
            raise EvaluationError(
                f"a vocabulary of {size} with ids up to {largest}; give one with every id and at least 2"
            )
    return inputs.shape[1]


def _size(inputs: Tensor, vocabulary: int | None) -> int:
    return int(inputs.max()) + 1 if vocabulary is None else vocabulary


def _positions(length: int) -> list[int]:
    return sorted({*range(1, min(EVERY_POSITION + 1, length)), *positions_beside_tiles(length)})


def _outputs(model: Callable[[Tensor], Any], inputs: Tensor) -> Tensor:
    output = model(inputs)
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    outputs = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(outputs, Tensor) or outputs.shape[:2] != inputs.shape[:2]:
        kind = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise EvaluationError(f"inputs of shape {tuple(inputs.shape)} gave {kind}; outputs must begin with (B, T)")
    if not torch.stack(outputs.aminmax()).isfinite().all():  # of every output it would be a tensor as large
        raise EvaluationError("some outputs are not finite, which hides what they depend on")
    return outputs.detach()


def _replacements(inputs: Tensor, vocabulary: int | None, seed: int) -> Tensor:
    """Draw inputs that differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    if inputs.is_floating_point():
        drawn = torch.randn(inputs.shape, generator=generator).to(inputs)
        return inputs + drawn.sign() * (1 + drawn.abs()) * inputs.std().clamp_min(1e-3)
    size = _size(inputs, vocabulary)
    shift = torch.randint(1, size, inputs.shape, generator=generator).to(inputs)
    return (inputs + shift) % size


def _largest(changes: list[Change]) -> Change:
    return max(changes, key=lambda change: change.size)


def _change(whole: Tensor, others: Tensor, positions: list[int], spread: float) -> Change:
    """Compare outputs (B, T, ...) with N other batches of outputs (N B, T, ...), batch n before position n."""
    last = max(positions)
    others, whole = others.unflatten(0, (len(positions), -1))[:, :, :last], whole[:, :last]
    if whole.dtype in LOW_PRECISION:
        others, whole = others.float(), whole.float()
    differences = (others - whole).abs_()
    by_output = differences.amax((1, *range(3, differences.ndim)))
    places = torch.tensor(positions, device=whole.device)
    is_before = torch.arange(last, device=whole.device) < places[:, None]
    size, place = by_output.masked_fill(~is_before, 0).flatten().max(0)
    index, output = divmod(int(place), last)
    return Change(size.item() / spread, output, positions[index])

"""Loss on a text: nats a token, bits a byte, and by position in the context."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from difftransformer.errors import ConfigError

from ...plots import curves, select
from ...results import Measurement, TaskResult
from ..engine import Scores, Task
from ..prompts.texts import TaskContext, separation, text_stream, window_start
from ..registry import TaskKind, at_least, refused, register
from ..requests import Loss
from ..scores import details, mean, over_windows

DEFAULT_WINDOW = 4096

logger = logging.getLogger(__name__)

_LARGEST_NATS = 700.0
"""The exponential of a larger loss is no float."""

Losses = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_CHOICES = [
    "Bits a byte count the bytes of the given text for which the scored tokens stand, so that tokenizers compare.",
    "The cumulative loss at position t is the mean over the tokens at positions 1 to t of all windows, each scored from its "
    "start.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loss on any text.

    Attributes:
        text: python-stdlib, a text file, a folder of them, hf:NAME[:CONFIG][:SPLIT], or validation for the text that a run
            held out.
        window: Tokens of a window; the model's context by default, at most 4096.
        stride: Targets that each window scores, its last ones, with all before as context; the whole window by default.
        windows: Largest number of windows.
        spread: Whether windows stand at even distances over the whole text; otherwise they follow one another from its
            start.
        add_bos_token: Whether each window begins with the token that begins texts, in place of its first one; by default if
            the tokenizer itself begins a text so.
        position_buckets: Number of parts of the window to report mean losses of; 0 for none.
    """

    text: str = "python-stdlib"
    window: int | None = None
    stride: int | None = None
    windows: int = 32
    spread: bool = False
    position_buckets: int = 0
    add_bos_token: bool | None = None

    def __post_init__(self) -> None:
        at_least(self, 2, "window")
        at_least(self, 1, "windows", "stride")
        at_least(self, 0, "position_buckets")
        if self.spread and self.stride is not None:
            raise refused(self, "stride", "windows that are spread score every target; leave one of the two out")


class PerplexityTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        self.options, self.data_name = options, options.text
        begin, begun = window_start(context.tokenizer, options.add_bos_token)
        window = options.window or min(context.context_tokens, DEFAULT_WINDOW)
        self.stride = window if options.stride is None else options.stride
        if self.stride > window:
            raise ConfigError(f"stride={self.stride} is above the window's {window} tokens; give less")
        wanted = window + 1 + self.stride * (options.windows - 1)
        text = text_stream(context, options.text, window + 1, enough=None if options.spread else wanted)
        stream = text.ids
        self.choices = [separation(context.tokenizer), begun, *_CHOICES, *filter(None, [text.loss])]
        if text.loss:
            logger.warning("%s: bits a byte: %s", options.text, text.loss)
        starts = list(range(0, min(len(stream), wanted) - window, self.stride))
        if options.spread:
            there = (len(stream) - 1) // window
            count = min(options.windows, there)
            starts = [index * there // count * window for index in range(count)]
        rows = [stream[start : start + window + 1].tolist() for start in starts]
        self.requests = [Loss((*begin, *row[len(begin) :])) for row in rows]
        self.sizes, self.is_spelt = np.array([text.sizes[start + 1 :][:window] for start in starts]), text.is_spelt
        self.separator = context.tokenizer.end_of_text

    def scored_by(self) -> Any:
        return self.separator if self.is_spelt else [self.separator, self.sizes.tolist()]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute nats a token, bits a byte, perplexity, and the loss by position."""
        losses, targets = np.array(answers, np.float64), np.array([request.ids[1:] for request in self.requests])
        is_text = targets != self.separator
        losses[~is_text] = 0.0
        first = np.zeros_like(is_text)
        first[1:, : losses.shape[1] - self.stride] = True  # the window before has scored these
        nats, tokens = np.where(first, 0.0, losses).sum(1), (is_text & ~first).sum(1)
        sizes = np.where(first, 0, self.sizes).sum(1)
        nll, items = over_windows("nll", "nats/token", nats, tokens, better="lower")
        bits, more = over_windows("bits per byte", "bits/byte", nats / math.log(2), sizes, better="lower")
        curves = [*self._by_position(losses, is_text)]
        for position in _positions(losses.shape[1]):
            curves += _mean("cumulative nll", losses[:, :position], is_text[:, :position], {"position": position})
        perplexity = [_perplexity(nll)] if nll.value < _LARGEST_NATS else []
        return Scores(measurements=[nll, bits, *perplexity, *details(curves)], items=[*items, *more])

    def _by_position(self, losses: Losses, is_text: Mask) -> Iterator[Measurement]:
        length = losses.shape[1]
        edges = np.linspace(0, length, min(self.options.position_buckets, length) + 1).round().astype(int).tolist()
        for start, end in pairwise(edges):
            at = {"start": start, "end": end}
            yield from _mean("nll by position", losses[:, start:end], is_text[:, start:end], at)


def _perplexity(nll: Measurement) -> Measurement:
    """Compute exp(loss). Its error is the loss's error times the derivative, exp(loss)."""
    value = math.exp(nll.value)
    error = None if nll.standard_error is None else value * nll.standard_error
    return replace(nll, name="perplexity", unit="per token", value=value, standard_error=error, better=None)


def _mean(name: str, losses: Losses, is_text: Mask, at: dict[str, Any]) -> Iterator[Measurement]:
    """Yield the mean loss over windows; nothing if all positions hold separators."""
    nats, tokens = losses.sum(1).tolist(), is_text.sum(1).tolist()
    if any(tokens):
        yield mean(name, "nats/token", nats, at, weights=tokens, better="lower")


def _positions(length: int) -> list[int]:
    """Powers of sqrt(2) up to the length, and the length."""
    powers = {round(2 ** (step / 2)) for step in range(2 * length.bit_length())}
    return sorted({position for position in powers if position < length} | {length})


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw a line for each model, positions on a log axis: the loss in each range, or the mean up to each position."""
    windows, text = " and ".join(sorted({str(result.data.requests) for result in results})), results[0].data.name
    where, bands = f"{windows} windows of {text}", "bands: one standard error"
    if any(select(result, "nll by position") for result in results):
        figure, ax = curves([_at_middles(result) for result in results], "nll by position", "position")
        ax.set_xlabel("position in the context (tokens, logarithmic)")
        ax.set_ylabel("loss (nats/token)")
        caption = (
            "Loss of the tokens in each range of positions (a marker at the range's middle), in nats a token, over "
            f"{where}: how far a longer context helps; {bands}."
        )
        return "Loss by position in the context", caption, figure
    figure, ax = curves(results, "cumulative nll", "position")
    ax.set_xlabel("position in the window (tokens)")
    ax.set_ylabel("mean loss up to here (nats/token)")
    return "Cumulative loss by position", f"Mean loss of all positions up to each, over {where}; {bands}.", figure


def _at_middles(result: TaskResult) -> TaskResult:
    """Place the loss of each range at its middle, geometric and counted from 1 so that a logarithm exists."""
    rows = select(result, "nll by position")
    ranges = [(row.at["start"] + 1, max(row.at["end"], row.at["start"] + 1)) for row in rows]
    middles = [replace(row, at={"position": (a * b) ** 0.5}) for row, (a, b) in zip(rows, ranges, strict=True)]
    return replace(result, measurements=middles)


register(TaskKind(name="perplexity", doc=__doc__, options=Options, make=PerplexityTask, draw=draw))

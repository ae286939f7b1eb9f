"""Loss on a text: nats a token, bits a byte, and by position in the context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ...data import Shards
from ...errors import ConfigError
from ...plots.curves import curves
from ...results import DocumentNll, ItemScore, NllResult, PositionBucket, TaskResult
from ..config import NllConfig
from ..engine import Scores, Task
from ..prompts.texts import token_stream
from ..registry import TaskKind, register
from ..requests import LanguageModel, Loss, answers_to
from ..scores import details, mean

DEFAULT_WINDOW = 4096


def evaluate_nll(model: LanguageModel, shards: Shards, config: NllConfig, *, context_tokens: int) -> NllResult:
    """Loss on fixed, evenly spread windows of the validation text.

    Bits a byte do not depend on the tokenizer: the summed loss over the bytes that the targets stand for. A window is one
    unit of the bootstrap.

    Args:
        model: The model.
        shards: Tokens and tokenizer.
        config: Number of windows and of position buckets.
        context_tokens: T, targets of a window.
    """
    import torch

    from ...data import validation_windows

    windows = torch.from_numpy(np.stack(list(validation_windows(shards, context_tokens, config.windows))))
    targets = windows[:, 1:]
    nll = torch.tensor(answers_to(model, [Loss(tuple(row)) for row in windows.tolist()]), dtype=torch.float64)
    byte_lengths = torch.from_numpy(shards.tokenizer.token_byte_lengths()).long()[targets]
    total_nats, total_bytes = nll.sum().item(), int(byte_lengths.sum())
    edges = torch.linspace(0, context_tokens, min(config.position_buckets, context_tokens) + 1).round().int().tolist()
    return NllResult(
        nll_nats_per_token=total_nats / nll.numel(),
        bits_per_byte=total_nats / math.log(2) / total_bytes,
        tokens=nll.numel(),
        bytes=total_bytes,
        context_tokens=context_tokens,
        by_position=[
            PositionBucket(
                start_tokens=start,
                end_tokens=end,
                nll_nats_per_token=nll[:, start:end].mean().item(),
                tokens=nll[:, start:end].numel(),
            )
            for start, end in pairwise(edges)
        ],
        documents=[
            DocumentNll(nll_nats=row.sum().item(), tokens=row.numel(), bytes=int(row_bytes.sum()))
            for row, row_bytes in zip(nll, byte_lengths, strict=True)
        ],
    )


_CHOICES = [
    "Documents follow one another with an end of text between them; a window may hold several.",
    "Bits a byte count the bytes that the scored tokens stand for, so that tokenizers compare.",
    "The cumulative loss at position t is the mean over positions 1 to t of all windows, each scored from its start.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loss on any text.

    Attributes:
        text: python-stdlib, a text file, a folder of them, or hf:NAME[:CONFIG][:SPLIT].
        window: Tokens of a window; the model's context by default, at most 4096.
        stride: Targets that each window scores, its last ones, with all before as context; the whole window by default.
        windows: Most windows, from the start of the text.
    """

    text: str = "python-stdlib"
    window: int | None = None
    stride: int | None = None
    windows: int = 32

    def __post_init__(self) -> None:
        if self.windows < 1 or (self.window is not None and self.window < 2):
            raise ConfigError(f"windows={self.windows}, window={self.window}: give at least 1 window of 2 tokens")
        if self.stride is not None and self.stride < 1:
            raise ConfigError(f"stride={self.stride}: give at least 1")


class PerplexityTask(Task):
    """Windows of a text. See `Task`."""

    def __init__(self, options: Options, model: LanguageModel) -> None:
        self.data_name, self.choices = options.text, _CHOICES
        window = options.window or min(model.context_tokens, DEFAULT_WINDOW)
        self.stride = window if options.stride is None else options.stride
        if self.stride > window:
            raise ConfigError(f"stride={self.stride} is above the window's {window} tokens; give less")
        wanted = window + 1 + self.stride * (options.windows - 1)
        stream = token_stream(model.tokenizer, options.text, window + 1, enough=wanted)
        starts = range(0, min(len(stream), wanted) - window, self.stride)
        self.requests = [Loss(tuple(stream[start : start + window + 1].tolist())) for start in starts]
        self.byte_lengths = model.tokenizer.token_byte_lengths()

    def score(self, answers: Sequence[Any]) -> Scores:
        """Nats a token, bits a byte and perplexity over all windows; the cumulative loss by position."""
        nats, tokens, sizes, items = [], [], [], []
        for index, (request, losses) in enumerate(zip(self.requests, answers, strict=True)):
            scored = len(losses) if index == 0 else min(self.stride, len(losses))
            nats.append(math.fsum(losses[-scored:]))
            tokens.append(float(scored))
            sizes.append(float(self.byte_lengths[list(request.ids[-scored:])].sum()))
            items.append(ItemScore(name="nll", item=f"window {index}", score=nats[-1], weight=tokens[-1]))
        nll = mean("nll", "nats/token", nats, {}, weights=tokens, better="lower")
        bits = mean("bits per byte", "bits/byte", [n / math.log(2) for n in nats], {}, weights=sizes, better="lower")
        length = len(answers[0])
        cumulative = np.cumsum(np.array(answers, np.float64), axis=1) / np.arange(1, length + 1)
        curve = [
            mean(
                "cumulative nll",
                "nats/token",
                cumulative[:, position - 1].tolist(),
                {"position": position},
                better="lower",
            )
            for position in _positions(length)
        ]
        return Scores(measurements=[nll, bits, *details(curve)], items=items)


def make(options: Options, model: LanguageModel) -> PerplexityTask:
    """The task for a model. See `PerplexityTask`.

    Raises:
        DataError: the text cannot be read, or is shorter than one window.
    """
    return PerplexityTask(options, model)


def _positions(length: int) -> list[int]:
    """Powers of sqrt(2) up to the length, and the length."""
    found = {round(2 ** (step / 2)) for step in range(2 * length.bit_length())}
    return sorted({position for position in found if position < length} | {length})


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the cumulative loss over the position on a log axis (like arXiv:2410.05258 Figure 4), a line for each model."""
    figure, ax = curves(results, "cumulative nll", "position", log=True)
    ax.set_xlabel("position in the window (tokens)")
    ax.set_ylabel("mean loss up to here (nats/token)")
    windows, text = " and ".join(sorted({str(result.data.requests) for result in results})), results[0].data.name
    caption = f"Mean loss of all positions up to each, over {windows} windows of {text}; bands: one standard error."
    return "Cumulative loss by position", caption, figure


register(TaskKind(name="perplexity", doc=__doc__, options=Options, make=PerplexityTask, draw=draw))

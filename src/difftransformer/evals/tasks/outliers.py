"""Activation outliers (arXiv:2410.05258 section 3.7, Table 5): the largest and the median of logits and hidden states.

Logits are |q . k| / sqrt(d) of every query and every key that it may attend to, in all heads and layers; for differential
attention those of both maps together. Hidden states are the output of each layer, behind both residual additions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError
from ...results import Measurement
from ..magnitudes import Spread, merged
from ..scores import details
from ..task import Magnitudes, Scores
from ..texts import Setting, token_stream

PARTS = 20
"""Requests that the rows are asked in: what is kept of each is small, and a run that was stopped goes on at the next."""

DEFAULT_WINDOW = 2048
_PAPER_RANKS = (1, 2, 3, 10, 100)
MEASURED = {"logits": "attention logits", "hidden": "hidden states"}

_CHOICES = [
    "Pairs of a query and a key that comes later are left out; the paper does not say whether it counts them.",
    "The text is the one named in the options; the paper does not name its own. Rows are cut from it without overlap, at "
    "places drawn by the seed, and may begin in the middle of a document.",
    "The largest values are exact. The median is that of the values rounded to bf16: exact in a bf16 model's hidden "
    "states, else within 2^-8 of itself.",
    "Logits are formed in fp32 from the queries and keys as the model computes them, whatever its dtype.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Outliers in any model.

    Attributes:
        text: python-stdlib, a text file, a folder of them, or hf:NAME[:CONFIG][:SPLIT].
        tokens: Tokens in all, to whole rows; the paper has 400,000.
        window: Tokens of a row; the model's context by default, at most 2048.
        largest: How many of the largest values are reported.
        seed: Of the rows' places.
    """

    text: str = "python-stdlib"
    tokens: int = 400_000
    window: int | None = None
    largest: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 2:
            raise ConfigError(f"window={self.window}: give at least 2 tokens")
        if self.tokens < 1 or self.largest < 1:
            raise ConfigError(f"tokens={self.tokens}, largest={self.largest}: give at least 1 of each")


class OutliersTask:
    """Rows of text, and what is largest in the model as it reads them. See `Task`."""

    def __init__(self, options: Options, setting: Setting) -> None:
        self.options, self.data_name, self.choices = options, options.text, _CHOICES
        window = options.window or min(setting.context_tokens, DEFAULT_WINDOW)
        wanted = max(1, options.tokens // window)
        stream = token_stream(setting, options.text)
        there = len(stream) // window
        if there < wanted:
            raise DataError(
                f"{options.text}: {len(stream)} tokens, and {wanted * window} are needed for {wanted} rows of {window}; "
                "name a longer text or ask for fewer --tokens"
            )
        chosen = np.sort(np.random.default_rng(options.seed).permutation(there)[:wanted])
        rows = [tuple(stream[place * window : (place + 1) * window].tolist()) for place in chosen]
        parts = [rows[part::PARTS] for part in range(min(PARTS, wanted))]
        self.requests = [Magnitudes(tuple(part), options.largest) for part in parts]

    def score(self, answers: Sequence[Any]) -> Scores:
        """The largest values by rank, and the median: first the paper's rows, then the other ranks of the curve."""
        first: list[Measurement] = []
        others: list[Measurement] = []
        for key, name in MEASURED.items():
            spread = merged([answer[key] for answer in answers], self.options.largest)
            for rank in ranks(len(spread.largest)):
                (first if rank in _PAPER_RANKS else others).append(
                    _figure(name, rank, spread.largest[rank - 1], spread)
                )
            first.append(_figure(name, "median", spread.median, spread))
        return Scores(measurements=first + details(others), items=[])


def _figure(name: str, rank: int | str, value: float, spread: Spread) -> Measurement:
    return Measurement(
        name=name,
        unit="absolute value",
        value=value,
        standard_error=None,
        n=spread.count,
        better=None if rank == "median" else "lower",
        at={"rank": rank},
    )


def ranks(largest: int) -> list[int]:
    """1 to 10, then by tens to 100, by hundreds to 1000 and so on, and the last."""
    found = []
    for power in count():
        found += [digit * 10**power for digit in range(1, 10) if digit * 10**power <= largest]
        if 10 ** (power + 1) > largest:
            break
    return sorted({*found, largest})


def make(options: Options, setting: Setting) -> OutliersTask:
    """Return the task for a model. See `OutliersTask`.

    Raises:
        DataError: the text cannot be read, or is too short.
    """
    return OutliersTask(options, setting)

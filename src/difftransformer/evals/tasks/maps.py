"""Attention maps of a prompt: A1, A2 and A1 - lambda A2 (arXiv:2410.05258 eq. 1), lambda by depth, weight below and near zero.

Over all queries of the prompt and the n keys that each may attend to, for a head's weights w:

    negative weight    sum of max(-w, 0) / sum of |w|
    near zero          share of weights with |w| < 1 / (10 n), a tenth of what even attention would give
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...data import Tokenizer
from ...errors import ConfigError, DataError
from ...results import Grid, Measurement
from ..scores import details, mean
from ..task import LanguageModel, Maps, Scores

MOST_TOKENS = 128
DEFAULT_PROMPT = "The magic Lisbon number is: 42\nThe magic Lisbon number is:"
SHOWN = {"first": "A1", "second": "A2", "weights": "A1 - lambda A2"}

_CHOICES = [
    "The prompt is one row that begins with the end of text, as a document does in training.",
    "Negative weight is its share of the sum of |w|; near zero means |w| < 1 / (10 n) where a query may attend to n keys.",
    "A lambda that differs by token is given as its mean over the prompt.",
    "A figure's n and standard error are over heads.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Attention maps of any model.

    Attributes:
        prompt: The text, at most 128 tokens with the one that begins it.
        prompt_file: A file with the text in place of prompt.
        layers: Whose maps are drawn, from 0; the first, the middle and the last by default.
        heads: Which of a layer, from 0; the first four by default.
    """

    prompt: str = DEFAULT_PROMPT
    prompt_file: str | None = None
    layers: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.prompt_file is None and not self.prompt:
            raise ConfigError("prompt='': give a text")
        if min((*self.layers, *self.heads), default=0) < 0:
            raise ConfigError(f"layers={self.layers}, heads={self.heads}: both are counted from 0")


class MapsTask:
    """One prompt, and every head's maps of it. See `Task`."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self.options, self.choices = options, _CHOICES
        self.data_name = options.prompt_file or "a prompt"
        ids = (tokenizer.end_of_text, *tokenizer.encode(_text(options)))
        if len(ids) > MOST_TOKENS:
            raise DataError(
                f"the prompt has {len(ids)} tokens, and maps of at most {MOST_TOKENS} can be read; give a shorter one"
            )
        self.labels = [tokenizer.decode([token]) for token in ids]
        self.requests = [Maps(ids, tuple(options.layers), tuple(options.heads))]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Shares over all heads, by layer and, as grids, by head; the maps of the chosen heads."""
        (found,) = answers
        measurements: list[Measurement] = []
        grids: list[Grid] = []
        differential = found["lambda"][0] is not None
        figures = {"negative weight": "negative", "near zero": "near_zero"}
        if differential:
            figures["near zero in A1 alone"] = "near_zero_first"
        for name, key in figures.items():
            heads = [value for layer in found[key] for value in layer]
            measurements.append(mean(name, "share", heads, {}))
            grids.append(Grid(name=name, at={}, values=_short(found[key])))
        for name, key in figures.items():
            measurements += details(
                mean(name, "share", heads, {"layer": layer}) for layer, heads in enumerate(found[key])
            )
        if differential:
            by_layer = enumerate(found["lambda"])
            measurements += details(mean("lambda", "", heads, {"layer": layer}) for layer, heads in by_layer)
            grids.append(Grid(name="lambda", at={}, values=_short(found["lambda"])))
        for drawn in found["maps"]:
            place = {"layer": drawn["layer"], "head": drawn["head"]}
            for key, name in SHOWN.items() if differential else [("weights", "A")]:
                grids.append(Grid(name="map", at=place | {"map": name}, values=drawn[key], labels=self.labels))
        return Scores(measurements=measurements, items=[], grids=grids)


def make(options: Options, model: LanguageModel) -> MapsTask:
    """The task for a model. See `MapsTask`.

    Raises:
        DataError: the file cannot be read, or the prompt is too long to be drawn.
    """
    return MapsTask(options, model.tokenizer)


def _text(options: Options) -> str:
    if options.prompt_file is None:
        return options.prompt
    try:
        return Path(options.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{options.prompt_file}: cannot be read as text ({error}); name a UTF-8 file") from None


def _short(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in rows]

"""Sensitivity to small changes of the input embeddings: gradient, and loss and accuracy under perturbation.

arXiv:2510.00517 reports that subtracting maps raises the sensitivity to adversarial changes. Here embeddings of tokens are
changed, in random directions and in that of the gradient's sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from difftransformer.errors import ConfigError, DataError

from ...plots.curves import handles, select
from ...plots.style import INK, WIDTH_INCHES, legend_above, line_style
from ...results import ItemScore, Measurement, TaskResult
from ..engine import Scores
from ..probes import Perturbed, ProbeTask
from ..prompts.texts import Setting, separation, token_stream
from ..registry import TaskKind, at_least, register
from ..scores import over_windows

DEFAULT_WINDOW = 256
DIRECTIONS = {"gradient_sign": "gradient sign", "random": "random signs"}
_RATES = (("gradient", "gradient norm", "nats/token per radius"), ("lipschitz", "Lipschitz estimate", "per radius"))
_COUNTED: tuple[tuple[str, str, str, Literal["lower", "higher"]], ...] = (
    ("nats", "loss", "nats/token", "lower"),
    ("right", "accuracy", "share", "higher"),
)

_CHOICES = [
    "A radius r moves every embedding by r times the mean length of the window's embeddings, by the same amount in each "
    "coordinate, so that models with embeddings of different sizes compare.",
    "The gradient norm is the sum of the lengths of dL / de_t over the positions, times the mean length of embeddings: to "
    "first order no perturbation of radius r raises the window's mean loss by more than r times it.",
    "The Lipschitz estimate is the largest change of all distributions of the next token (Euclidean, divided by the root of "
    "their number) per radius, at the smallest radius and over all directions tried: a lower bound.",
    "Windows are cut from the text without overlap, at random places, and may begin in the middle of a document.",
    "Embeddings have the model's dtype; in bf16 the smallest radii are rounded, so use --dtype fp32.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Small changes of the embeddings.

    Attributes:
        text: python-stdlib, a text file, a folder of them, hf:NAME[:CONFIG][:SPLIT], or validation for the text that a run
            held out.
        windows: Number of windows.
        window: Tokens of a window; the model's context by default, at most 256.
        radii: Lengths of the perturbations, relative to the mean length of the embeddings.
        draws: Random perturbations of each window and radius.
        seed: Seed of the places of the windows and of the random perturbations.
    """

    text: str = "python-stdlib"
    windows: int = 32
    window: int | None = None
    radii: list[float] = field(default_factory=lambda: [0.01, 0.03, 0.1])
    draws: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 2, "window")
        at_least(self, 1, "windows", "draws")
        if not self.radii or min(self.radii) <= 0 or len(set(self.radii)) < len(self.radii):
            raise ConfigError(f"radii={self.radii}: give one or more numbers above 0, each once")


class PerturbationTask(ProbeTask):
    """Windows of a text, whose embeddings are perturbed."""

    def __init__(self, options: Options, setting: Setting) -> None:
        self.options, self.data_name = options, options.text
        self.choices = [separation(setting.tokenizer), *_CHOICES]
        window = options.window or min(setting.context_tokens, DEFAULT_WINDOW)
        stream = token_stream(setting, options.text, window + 1)
        there = (len(stream) - 1) // window
        if there < options.windows:
            raise DataError(
                f"{options.text}: {len(stream)} tokens are {there} windows of {window}, and {options.windows} are needed; name "
                "a longer text or ask for fewer --windows"
            )
        places = np.sort(np.random.default_rng(options.seed).permutation(there)[: options.windows])
        separator, radii = setting.tokenizer.end_of_text, tuple(sorted(options.radii))
        rows = (tuple(stream[place * window : (place + 1) * window + 1].tolist()) for place in places)
        self.requests = [
            Perturbed(row, radii, options.draws, options.seed + index, separator) for index, row in enumerate(rows)
        ]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Return the gradient norm, the Lipschitz estimate, and the changes of loss and accuracy at each radius."""
        ones, tokens = [1.0] * len(answers), [answer["tokens"] for answer in answers]
        radii = self.requests[0].radii
        measurements: list[Measurement] = []
        items: list[ItemScore] = []
        for key, name, unit in _RATES:
            row, scores = over_windows(name, unit, [answer[key] for answer in answers], ones, better="lower")
            measurements.append(row)
            items += scores
        for place, (key, name, unit, better) in enumerate(_COUNTED):
            before = [answer[key] for answer in answers]
            measurements.append(over_windows(name, unit, before, tokens)[0])
            for direction, words in DIRECTIONS.items():
                for at, radius in enumerate(radii):
                    after = [answer[direction][at][place] for answer in answers]
                    change = [new - old for new, old in zip(after, before, strict=True)]
                    title = f"{name} change, {words}, radius {radius:g}"
                    row, scores = over_windows(title, unit, change, tokens, better=better)
                    where = {"radius": radius, "direction": words}
                    measurements.append(replace(row, name=f"{name} change", at=where, detail=radius < radii[-1]))
                    items += scores if radius == radii[-1] else []
        return Scores(measurements=measurements, items=items)


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the change of the loss over the radius, a line for each model and a panel for each direction."""
    figure = Figure(figsize=(WIDTH_INCHES, 3.8), layout="constrained")
    for ax, words in zip(figure.subplots(1, len(DIRECTIONS)), DIRECTIONS.values(), strict=True):
        for index, result in enumerate(results):
            rows = sorted(select(result, "loss change", direction=words), key=lambda row: row.at["radius"])
            errors = [row.standard_error or 0.0 for row in rows]
            x, y = [row.at["radius"] for row in rows], [row.value for row in rows]
            ax.errorbar(x, y, yerr=errors, **line_style(index), markersize=4, capsize=3)
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.axhline(0, color=INK, linewidth=0.6)
        ax.set_title(words, loc="left")
        ax.set_xlabel("radius, relative to the embeddings")
    figure.axes[0].set_ylabel("change of the loss (nats/token)")
    legend_above(figure, handles(results))
    caption = (
        f"Change of the loss where all embeddings of a window are moved, over {results[0].data.requests} windows of "
        f"{results[0].data.name}; the panels have different scales. Whiskers: one standard error over windows."
    )
    return "Small changes of the embeddings", caption, figure


register(TaskKind(name="perturbation", doc=__doc__, options=Options, make=PerturbationTask, draw=draw))

"""Any task under attention logits of few bits, and int8 or int4 layers.

This is arXiv:2410.05258 section 3.7, Figure 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from difftransformer.errors import ConfigError
from difftransformer.typed import build

from ...plots import handles, legend_above, line_style, panels, select
from ...results import ItemScore, Measurement, TaskResult
from ..engine import Scores, Task
from ..prompts.texts import TaskContext
from ..registry import Contrast, TaskKind, refused, register, registered_tasks, task_kind
from ..requests import Answers

Granularity = Literal["tensor", "head", "row"]
_Place = tuple[tuple[str, str], ...]

_SETTING = ("bits", "granularity")
_ASIDE = 0.05
_MOST_ROWS = 8

_CHOICES = [
    "Rounding is simulated: numbers are rounded to the grid but remain floating-point numbers. This measures accuracy, not "
    "speed or memory.",
    "Logits: absmax, symmetric, 2^(bits - 1) - 1 steps to each side, after training, computed for each forward pass; the two "
    "maps of a differential head are rounded separately; keys that a query may not attend to do not count for the largest "
    "value. 16 bits leave the logits unchanged.",
    "One step size holds for the logits of one query (row), of one head of a sequence (head) or of all heads (tensor); the "
    "paper does not say which. For head and tensor every prompt is computed on its own, in passes of up to 2048 tokens and "
    "then a token at a time.",
    "Weights: int8 with a step size for each output channel, or int4 with one for each 32 weights of a channel; activations: "
    "int8 with a step size for each token. This holds for every Linear but the output layer; embeddings and norms keep "
    "their dtype.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Any task under coarser numbers.

    Attributes:
        task: Name of the task.
        task_options: Options of the task, such as {"windows": 8}.
        bits: Bits of the attention logits; the paper has 16, 8, 6 and 4.
        granularity: Which logits share a step size: row, head or tensor.
        weights: Weights of the Linear layers: none (unchanged), int8 or int4.
        activations: Inputs of the Linear layers: none (unchanged) or int8.
    """

    task: str = "perplexity"
    task_options: dict[str, Any] = field(default_factory=dict)
    bits: list[int] = field(default_factory=lambda: [16, 8, 6, 4])
    granularity: list[Granularity] = field(default_factory=lambda: ["row"])
    weights: Literal["none", "int8", "int4"] = "none"
    activations: Literal["none", "int8"] = "none"

    def __post_init__(self) -> None:
        allowed = [name for name in registered_tasks() if name != "quantized"]
        if self.task not in allowed:
            raise refused(self, "task", f"choose one of {', '.join(allowed)}")
        if not self.bits or any(not 2 <= bits <= 16 for bits in self.bits) or len(set(self.bits)) < len(self.bits):
            raise refused(self, "bits", "give different numbers from 2 to 16")
        if not self.granularity or len(set(self.granularity)) < len(self.granularity):
            raise refused(self, "granularity", "give one or more of row, head, tensor, each once")
        self.inner()

    @property
    def seed(self) -> int:
        return int(getattr(self.inner(), "seed", 0))

    def inner(self) -> Any:
        return build(task_kind(self.task).options, self.task_options, source="task_options", error=ConfigError)


@dataclass(frozen=True)
class Quantized:
    """A request of the inner task, and the numbers under which it is asked."""

    request: Any
    bits: int
    granularity: Granularity
    weights: str = "none"
    activations: str = "none"

    @property
    def shown_tokens(self) -> int:
        return int(self.request.shown_tokens)

    def asked(self) -> list[Any]:
        return ["quantized", self.request.asked(), self.bits, self.granularity, self.weights, self.activations]


class QuantizedTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        self.task: Task = task_kind(options.task).make(options.inner(), context)
        self.rules = self.task.rules
        self.data_name = f"{options.task} on {self.task.data_name}"
        self.choices = [*_CHOICES, *self.task.choices]
        # 16 bits change nothing whatever the granularity, so they are asked once.
        self.settings: list[tuple[int, Granularity]] = [(16, "row")] if 16 in options.bits else []
        self.settings += [(bits, name) for name in options.granularity for bits in options.bits if bits < 16]
        self.granularities = list(options.granularity)
        self.requests = [
            Quantized(request, *setting, options.weights, options.activations)
            for setting, request in product(self.settings, self.task.requests)
        ]

    def scored_by(self) -> Any:
        return self.task.scored_by()

    def answer(self, model: Any, requests: Sequence[Quantized]) -> Answers:
        """Ask the model under each setting; the model must have a method `quantized`."""
        place = 0
        for setting, group in groupby(requests, lambda r: (r.bits, r.granularity, r.weights, r.activations)):
            inner = [request.request for request in group]
            with model.quantized(*setting) as coarse:
                for index, answer in self.task.answer(coarse, inner):
                    yield place + index, answer
            place += len(inner)

    def parts(self, model: Any) -> list[list[int]] | None:
        inner, count = self.task.parts(model), len(self.task.requests)
        if inner is None:
            return None
        return [[begin + index for index in part] for begin in range(0, len(self.requests), count) for part in inner]

    def judge(self, answers: Sequence[Any]) -> list[Any]:
        count = len(self.task.requests)
        settings = (answers[begin : begin + count] for begin in range(0, len(answers), count))
        judged = [answer for part in settings for answer in self.task.judge(part)]
        self.choices = [*_CHOICES, *self.task.choices]
        return judged

    def score(self, answers: Sequence[Any]) -> Scores:
        """Score the inner task under each setting."""
        measurements: list[Measurement] = []
        items: list[ItemScore] = []
        count = len(self.task.requests)
        for place, (bits, name) in enumerate(self.settings):
            scores = self.task.score(answers[place * count : (place + 1) * count])
            for granularity in self.granularities if bits == 16 else [name]:
                at = {"bits": bits, "granularity": granularity}
                measurements += [replace(row, at=row.at | at) for row in scores.measurements]
                items += [replace(item, name=f"{item.name}{_setting(bits, granularity)}") for item in scores.items]
        return Scores(measurements=measurements, items=items)

    def is_whole(self, result: TaskResult) -> bool:
        return self.task.is_whole(result)


def contrasts(result: TaskResult) -> list[Contrast]:
    """Contrast every figure at fewer bits with the same figure at the most bits, over the same items."""
    names = list(dict.fromkeys(item.name for item in result.items))
    most, *fewer = sorted(result.options["bits"], reverse=True)
    pairs = []
    for granularity in result.options["granularity"]:
        end = _setting(most, granularity)
        for name in names:
            figure = name.removesuffix(end)
            for bits in fewer if name.endswith(end) else ():
                words = f"{bits} bits minus {most} bits by {granularity}"
                first = figure + _setting(bits, granularity)
                pairs.append(Contrast(figure=figure, settings=words, first=first, second=name))
    return pairs


def _setting(bits: int, granularity: str) -> str:
    return f", {bits} bits by {granularity}"


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the task's first figure over the bits of the logits (like arXiv:2410.05258 Figure 8), a line for each model.

    Each place at which the figure was measured is a row of panels, with a panel for each granularity.
    """
    name, unit = results[0].measurements[0].name, results[0].measurements[0].unit
    shown = [row for row in results[0].measurements if row.name == name and not row.detail]
    places = list(dict.fromkeys(_place(row) for row in shown))
    granularities = list(dict.fromkeys(row.at["granularity"] for row in shown))
    drawn = places[:_MOST_ROWS]
    figure, axes = panels(0.9 + 3.0 * len(drawn), len(drawn), len(granularities), sharey="row")
    for row_of_axes, place in zip(axes, drawn, strict=True):
        for ax, granularity in zip(row_of_axes, granularities, strict=True):
            _lines(ax, results, name, place, granularity)
            ax.set_title(", ".join([*_words(place), f"a step for each {granularity}"]), loc="left")
        row_of_axes[0].set_ylabel(f"{name} ({unit})")
    for ax in axes[-1]:
        ax.set_xlabel("bits of the attention logits")
    legend_above(figure, handles(results))
    options = results[0].options
    left_out = f" The first {len(drawn)} of {len(places)} places." if len(drawn) < len(places) else ""
    caption = (
        f"{name[0].upper()}{name[1:]} of {results[0].data.name} under rounded attention logits; 16 bits leaves them alone. "
        f"Linear layers: weights {options['weights']}, activations {options['activations']}. "
        f"Whiskers: one standard error.{left_out}"
    )
    return "Coarser attention logits", caption, figure


def _lines(ax: Axes, results: Sequence[TaskResult], name: str, place: _Place, granularity: str) -> None:
    bits = sorted({row.at["bits"] for result in results for row in result.measurements}, reverse=True)
    for index, result in enumerate(results):
        own = (row for row in select(result, name, granularity=granularity) if _place(row) == place)
        by_bits = {row.at["bits"]: row for row in own}
        aside = _ASIDE * (index - (len(results) - 1) / 2)  # so that whiskers do not overlap
        rows = [by_bits[value] for value in bits if value in by_bits]
        x = [bits.index(value) + aside for value in bits if value in by_bits]
        errors = [row.standard_error or 0.0 for row in rows]
        ax.errorbar(x, [row.value for row in rows], errors, **line_style(index), capsize=3)
    ax.set_xticks(range(len(bits)), [str(value) for value in bits])


def _place(row: Measurement) -> _Place:
    return tuple((name, str(value)) for name, value in row.at.items() if name not in _SETTING)


def _words(place: _Place) -> list[str]:
    """Return words for a place; a task of lm-eval is named without its version."""
    at = dict(place)
    if "task" in at:
        shots = [f"{at['shots']} shots"] if "shots" in at else []
        return [at["task"], *shots]
    return [f"{name.replace('_', ' ')} {value}" for name, value in place]


register(TaskKind(name="quantized", doc=__doc__, options=Options, make=QuantizedTask, draw=draw, contrasts=contrasts))

"""Another task under coarser numbers (arXiv:2410.05258 section 3.7, Figure 8): logits of few bits, int8 or int4 layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...errors import ConfigError
from ...results import ItemScore, Measurement
from ...typed import build
from ..task import Granularity, Quantized, Scores, Task, Watch, Watched, unwatched
from ..texts import Setting
from . import TASKS, load_task, options_class

_CHOICES = [
    "Rounding is simulated: numbers are rounded to the grid and stay floating. It measures accuracy, not speed or memory.",
    "Logits: absmax, symmetric, 2^(bits - 1) - 1 steps to each side, after training and for each forward pass anew; the "
    "two maps of a differential head apart; keys that a query may not attend to do not count in the largest. 16 bits "
    "leaves them alone.",
    "A step is shared by one query's logits (row), by one head's of a sequence (head) or by all heads' (tensor); the paper "
    "does not say which. For head and tensor every prompt is computed on its own, in passes of up to 2048 tokens and "
    "then a token at a time.",
    "Weights: int8 with a step for each output channel, or int4 for each 32 weights of one; activations: int8, a step for "
    "each token. Every Linear but the output layer; embeddings and norms keep their dtype.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Any task under coarser numbers.

    Attributes:
        task: The task, with its own options in task_options.
        task_options: Options of the task, such as {"windows": 8}.
        bits: Bits of the attention logits; the paper has 16, 8, 6 and 4.
        granularity: Which logits share a step: row, head or tensor.
        weights: Of the Linear layers: none (as they are), int8 or int4.
        activations: What goes into the Linear layers: none or int8.
    """

    task: str = "perplexity"
    task_options: dict[str, Any] = field(default_factory=dict)
    bits: list[int] = field(default_factory=lambda: [16, 8, 6, 4])
    granularity: list[Granularity] = field(default_factory=lambda: ["row"])
    weights: Literal["none", "int8", "int4"] = "none"
    activations: Literal["none", "int8"] = "none"

    def __post_init__(self) -> None:
        allowed = [name for name in TASKS if name != "quantized"]
        if self.task not in allowed:
            raise ConfigError(f"task={self.task!r}: choose one of {', '.join(allowed)}")
        if not self.bits or any(not 2 <= bits <= 16 for bits in self.bits) or len(set(self.bits)) < len(self.bits):
            raise ConfigError(f"bits={self.bits}: give different numbers from 2 to 16")
        if not self.granularity or len(set(self.granularity)) < len(self.granularity):
            raise ConfigError(f"granularity={self.granularity}: give one or more of row, head, tensor, each once")
        self.inner()

    @property
    def seed(self) -> int:
        """The task's own."""
        return int(getattr(self.inner(), "seed", 0))

    def inner(self) -> Any:
        """The task's options.

        Raises:
            ConfigError: the task has no such option, or it has another type.
        """
        return build(options_class(self.task), self.task_options, source="task_options", error=ConfigError)


class QuantizedTask:
    """A task's requests once for each setting. See `Task`."""

    def __init__(self, options: Options, setting: Setting) -> None:
        self.task: Task = load_task(options.task, options.inner(), setting)
        self.data_name = f"{options.task} on {self.task.data_name}"
        self.choices = [*_CHOICES, *self.task.choices]
        # 16 bits are left alone whatever shares a step, so they are asked once.
        self.settings: list[tuple[int, Granularity]] = [(16, "row")] if 16 in options.bits else []
        self.settings += [(bits, name) for name in options.granularity for bits in options.bits if bits < 16]
        self.granularities = list(options.granularity)
        self.requests = [
            Quantized(request, bits, name, options.weights, options.activations)
            for bits, name in self.settings
            for request in self.task.requests
        ]

    @property
    def watch(self) -> Watch:
        """Of the task, where its scoring takes long."""
        return self.task.watch if isinstance(self.task, Watched) else unwatched

    @watch.setter
    def watch(self, watch: Watch) -> None:
        if isinstance(self.task, Watched):
            self.task.watch = watch

    def score(self, answers: Sequence[Any]) -> Scores:
        """The task's own figures and items, with the bits and what shares a step."""
        measurements: list[Measurement] = []
        items: list[ItemScore] = []
        count = len(self.task.requests)
        for place, (bits, name) in enumerate(self.settings):
            scores = self.task.score(answers[place * count : (place + 1) * count])
            for granularity in self.granularities if bits == 16 else [name]:
                at = {"bits": bits, "granularity": granularity}
                measurements += [replace(row, at=row.at | at) for row in scores.measurements]
                items += [replace(item, name=f"{item.name}, {bits} bits by {granularity}") for item in scores.items]
        return Scores(measurements=measurements, items=items)


def make(options: Options, setting: Setting) -> QuantizedTask:
    """The task for a model. See `QuantizedTask`.

    Raises:
        ConfigError: options that the task does not have.
        DataError: the task's data cannot be read, or does not fit the model.
    """
    return QuantizedTask(options, setting)

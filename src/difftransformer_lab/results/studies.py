"""Results of studies: one file for each trained run, and an index that says which runs a study is made of.

A run's file does not name a study, so several studies can share it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from .base import Environment
from .curves import Curve, mean_over_steps, steps_to
from .plans import Change, Correction, RegisteredPlan
from .tasks import TaskResult, headlines, title_of


@dataclass(frozen=True, kw_only=True)
class RunFigure:
    task: str
    name: str
    unit: str
    better: Literal["lower", "higher"] | None
    at: dict[str, Any]
    value: float
    n: int


def utc(text: str) -> datetime:
    """Read a time, in UTC where it names no zone."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One trained and evaluated run.

    Attributes:
        data_sha256: SHA-256 of the tokenised text and the tokenizer.
        created: When the record was made.
        began: When the run was first started; empty where that is unknown, as in records of earlier versions.
        train_seconds: Time spent in training steps.
        step_seconds: Median time of a step.
        total_seconds: Time from the start of the process to its end, evaluation included.
        figures: Figures of the evaluations.
        curves: Metrics over training steps, by name, each of at most 50 points.
        evaluations: Whole results of the tasks, by their names in the recipe; empty where only `figures` are kept.
        diverged_after: Last step of a run that diverged (loss or gradient not finite) and was not evaluated; else None.
    """

    recipe: dict[str, Any]
    data_sha256: str
    created: str
    environment: Environment
    parameters: int
    train_tokens: int
    train_seconds: float
    step_seconds: float
    total_seconds: float
    figures: list[RunFigure]
    curves: dict[str, Curve]
    evaluations: dict[str, TaskResult] = field(default_factory=dict)
    began: str = ""
    diverged_after: int | None = None

    @property
    def start(self) -> datetime:
        """When the run was first started: as recorded, else `total_seconds` before its record."""
        if self.began:
            return utc(self.began)
        return utc(self.created) - timedelta(seconds=self.total_seconds)


@dataclass(frozen=True, kw_only=True)
class StudyArm:
    """One arm: a name, its label in tables and figures, and what it is in a sentence."""

    name: str
    label: str
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class StudyAxis:
    """One axis: its name and the names of its values, in order. `numbers` are what they stand for on a numeric axis."""

    name: str
    values: list[str]
    label: str = ""
    numbers: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class StudyFigure:
    """One figure that a study compares its arms by: an evaluation's figure, or one that is read off a curve.

    Attributes:
        label: Name in tables and sentences.
        task: Evaluation of the recipe.
        name: Name of the measurement.
        at: Where it was taken; empty for the figure over everything.
        curve: Curve of a run, in place of an evaluation.
        reaches: Level of the curve, from above for a curve in nats and from below for others. A run that never reaches it
            counts with its last step.
        area: Whether the figure is the mean of the curve over its steps, and not its last value.
        better: The direction that is an improvement.
        unit: Unit of the values; "share" for values from 0 to 1.
        secondary: Whether the figure is in tables alone, and in no sentence.
        paper: What the paper reports for each arm, by name.
        source: Where the paper reports it.
    """

    label: str
    task: str = ""
    name: str = ""
    at: dict[str, Any] = field(default_factory=dict)
    curve: str = ""
    reaches: float | None = None
    area: bool = False
    better: Literal["lower", "higher"] = "lower"
    unit: str = ""
    secondary: bool = False
    paper: dict[str, float] = field(default_factory=dict)
    source: str = ""

    @property
    def slug(self) -> str:
        """The label for files and addresses."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.label.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class StudyMember:
    """One run of a study: its arm, its value on each axis, its seed, and its file beside the index.

    A run with `is_tuning` was trained to choose the learning rate and is in no comparison.
    """

    arm: str
    point: dict[str, str]
    seed: int
    file: str
    is_tuning: bool = False


@dataclass(frozen=True, kw_only=True)
class ChosenRate:
    """The learning rate chosen for an arm at a point, with the mean figure of each rate tried, over the tuning seeds.

    The mean is None for a rate at which a run diverged.
    """

    arm: str
    point: dict[str, str]
    learning_rate: float
    tried: list[tuple[float, float | None]]

    @property
    def is_at_edge(self) -> bool:
        """Whether it is the smallest or largest of several rates, so that a better one may lie beyond."""
        return len(self.tried) > 1 and self.learning_rate in (self.tried[0][0], self.tried[-1][0])


@dataclass(frozen=True, kw_only=True)
class ArmSize:
    arm: str
    attention_type: str
    parameters: int
    train_flops_per_token: int
    kv_bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """A model's cost. Measured figures are None where nothing was measured (a size known by formula only)."""

    model: str
    label: str
    parameters: int
    train_step_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    peak_training_bytes: int | None = None
    weights_and_kv_bytes_4k: int
    weights_and_kv_bytes_64k: int


@dataclass(frozen=True, kw_only=True)
class BaselineNll:
    """A byte n-gram model fitted to the same training text and scored on the same validation text."""

    name: str
    bits_per_byte: float


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The distance of a converted model from its source, both in fp32 and with the attention written out.

    Attributes:
        tokens: Positions compared.
        largest_logit_difference: The largest over all positions and the whole vocabulary.
        largest_logit: The largest absolute logit of the source, for scale.
        mean_kl_nats: Kullback-Leibler divergence of the next token's distribution, source to result, averaged over tokens.
        greedy_tokens: Length of the greedy continuations compared, with each model's own kernels.
        greedy_same_tokens: Number of them, from the first, that are the same.
        of: Fingerprint of both models and of the positions; empty if unknown.
    """

    tokens: int
    largest_logit_difference: float
    largest_logit: float
    mean_kl_nats: float
    greedy_tokens: int
    greedy_same_tokens: int
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """What became of a pretrained model before it was trained on.

    Attributes:
        drift: Distance of each arm's model from it.
        before: Figures of the unconverted model.
    """

    source: str
    drift: dict[str, Drift]
    before: list[RunFigure]


@dataclass(frozen=True, kw_only=True)
class StudyIndex:
    """A study: its question, its arms, axes and figures, and the runs that are there.

    Attributes:
        preset: Name of its size.
        about: What the reader must know to read the answer.
        analysis: "arms" compares arms at every point; "scaling" also fits power laws over the axes size and tokens.
        arms: The arms; the rest are compared with `reference`.
        axes: The axes; each arm is trained at every combination of their values.
        figures: The figures, the most important one first.
        members: The runs that are there.
        planned: Number of runs that the study asks for, tuning included.
        rates: Learning rates that were chosen.
        command: Command that wrote the index.
        plan: The plan of a study that confirms; None for one that explores.
        changes: What is disclosed, such as a change after data were seen.
        correction: What stands, where the answers turned out to be confounded.
        sizes: Sizes of the arms' models, where all runs of an arm have one.
        costs: Measured costs.
        costs_foreign_cpu_share: Share of the machine's CPU time that other processes took meanwhile, or None if unknown.
        baselines: Models of text that were scored beside the arms.
        upcycling: What a pretrained model became before the training.
    """

    name: str
    preset: str
    question: str
    about: str
    analysis: Literal["arms", "scaling"]
    reference: str
    arms: list[StudyArm]
    axes: list[StudyAxis]
    figures: list[StudyFigure]
    members: list[StudyMember]
    planned: int
    rates: list[ChosenRate]
    command: str
    plan: RegisteredPlan | None = None
    changes: list[Change] = field(default_factory=list)
    correction: Correction | None = None
    sizes: list[ArmSize] = field(default_factory=list)
    costs: list[CostRow] = field(default_factory=list)
    costs_foreign_cpu_share: float | None = None
    baselines: list[BaselineNll] = field(default_factory=list)
    upcycling: Upcycling | None = None


def headline_figures(evaluations: Mapping[str, TaskResult]) -> list[StudyFigure]:
    """Return the figures of a study that names none: the headline figures of every task.

    The first ones of a task are bits a byte of a loss, else its first figure wherever that was taken. The others are secondary.
    """
    figures: list[StudyFigure] = []
    for task, result in evaluations.items():
        rows = headlines(result)
        bits = [row for row in rows if row.unit == "bits/byte"][:1]
        leading = bits or [row for row in rows if row.name == rows[0].name]
        for row in [*leading, *(row for row in rows if row not in leading)]:
            label = title_of(row, result)
            if bits and row.name == "nll":
                label += " per token"
            if any(one.label == label for one in figures):
                label += f" ({task})"
            figures.append(
                StudyFigure(
                    label=label,
                    task=task,
                    name=row.name,
                    at=row.at,
                    better=row.better or "higher",
                    unit=row.unit,
                    secondary=row not in leading,
                )
            )
    return figures


def measured(record: RunRecord, figure: StudyFigure) -> RunFigure | None:
    """Return the evaluation's figure behind a study's figure; None for a curve, or if the run has none."""
    if figure.curve:
        return None
    wanted = (figure.task, figure.name, figure.at)
    return next((one for one in record.figures if (one.task, one.name, one.at) == wanted), None)


def figure_of(record: RunRecord, figure: StudyFigure) -> float | None:
    """Return a study's figure of one run; None if the run lacks it or diverged.

    A curve gives the first step at which it reaches the figure's level, by linear interpolation between its points, or its
    last step if it never does; its mean over the steps if the figure is an area; and its last value otherwise.
    """
    if record.diverged_after is not None:
        return None
    if not figure.curve:
        figure_here = measured(record, figure)
        return figure_here.value if figure_here else None
    curve = record.curves.get(figure.curve)
    if curve is None or not curve.steps:
        return None
    if figure.reaches is not None:
        step = reached_at(curve, figure)
        return float(curve.steps[-1]) if step is None else step
    return mean_over_steps(curve) if figure.area else curve.values[-1]


def figures_there(record: RunRecord, figure: StudyFigure) -> str:
    """List what a run has in place of a figure that it lacks: the places of its name, else names of its task, or curves."""
    of_task = [one for one in record.figures if one.task == figure.task]
    places = [f"{one.name} at {one.at or 'all'}" for one in of_task if one.name == figure.name]
    return ", ".join(record.curves if figure.curve else places or dict.fromkeys(one.name for one in of_task))


def reached_at(curve: Curve, figure: StudyFigure) -> float | None:
    """Return the step at which a curve first reaches a figure's level; None if it never does."""
    assert figure.reaches is not None
    return steps_to(curve, figure.reaches, rising=not figure.curve.endswith("_nats"))

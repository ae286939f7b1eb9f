"""A study: arms x axes x seeds over one recipe, read from a YAML file and expanded to runs."""

import copy
import itertools
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from difftransformer.errors import ConfigError
from difftransformer.reading import is_plain_name
from difftransformer.typed import build, unknown_key

from ..recipe_files import check_name, read_mapping, read_recipe, shipped_recipes
from ..results import (
    OWN_BEST,
    Change,
    ChosenRate,
    Correction,
    RunRecord,
    StudyArm,
    StudyAxis,
    StudyFigure,
    figure_of,
    groups_of,
)
from .plan import load_plan
from .recipe import MOST_SEEDS, Recipe, identity, override, parsed_change, recipe_from

UPCYCLED = "upcycled to "
"""What start_from and data.tokenizer of a planned run begin with, where they name a model that the study makes."""
LEARNING_RATE = "training.optimizer.learning_rate"
TRAINING = "training"
"""Stands for a task in figures of the training itself."""
CURVES = (
    "train_loss_nats",
    "gradient_norm",
    "validation_loss_nats",
    "validation_accuracy",
    "validation_answer_nll_nats",
)
"""Curves of every run. There are also `lambda 0` and so on, and with `logs.evaluate_every` the tasks' curves."""


@dataclass(frozen=True, kw_only=True)
class ArmConfig:
    """One arm.

    Attributes:
        label: Name in tables and figures; the arm's own name by default.
        about: What it is, in a sentence.
        seeds: Number of seeds, where it is not the study's.
        upcycle: What the study's source becomes in this arm, such as "diff" (see `families.upcycle_folder`).
        set: Values of the recipe by dotted key, such as `model.attention_type: diff`.
    """

    label: str = ""
    about: str = ""
    upcycle: str = ""
    seeds: int | None = None
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AxisValue:
    """One value of an axis.

    Attributes:
        set: Values of the recipe by dotted key.
        number: What the value stands for on a numeric axis.
        seeds: Number of seeds, where it is more than the study's.
    """

    set: dict[str, Any] = field(default_factory=dict)
    number: float | None = None
    seeds: int | None = None


@dataclass(frozen=True, kw_only=True)
class AxisConfig:
    """One axis: its values by name. Each arm is trained at every combination of the values of all axes."""

    label: str = ""
    values: dict[str, AxisValue] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How the learning rate is chosen, for each arm alike.

    Attributes:
        learning_rates: Rates that are tried. With none the recipe's rate is used.
        seeds: Number of seeds for each rate, counted from 1000, apart from the reported seeds.
        per: Names of axes. A rate is chosen at each of their values, at the first value of every other axis.
        extensions: How often one more rate is tried beyond a best rate at the edge, by the ratio between the edge and its
            neighbour.
    """

    learning_rates: list[float] = field(default_factory=list)
    seeds: int = 2
    per: list[str] = field(default_factory=list)
    extensions: int = 0


@dataclass(frozen=True, kw_only=True)
class PresetConfig:
    """A size of the study.

    Attributes:
        about: What a reader must know about this size.
        recipe: Another recipe than the study's.
        set: Values of the recipe by dotted key; values of arms and axes come after these.
        arm_set: Values of the recipe by arm, which come after the arm's own, as where a model has more heads.
        seeds: Number of seeds.
        arms: Names of the arms; None means all.
        axes: Names of values by axis; an axis that is not named keeps all.
        tuning: How the learning rate is chosen.
        figures: Other figures than the study's.
        plan: Name or file of the plan of a size that confirms: its contrasts then say which runs are made, and `seeds` is not
            used.
        changes: What is disclosed of this size, such as a change after data were seen.
        correction: What stands of its answers, where they turned out to be confounded.
    """

    about: str = ""
    recipe: str = ""
    set: dict[str, Any] = field(default_factory=dict)
    arm_set: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: int = 3
    arms: list[str] | None = None
    axes: dict[str, list[str]] = field(default_factory=dict)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    figures: list[StudyFigure] = field(default_factory=list)
    plan: str = ""
    changes: list[Change] = field(default_factory=list)
    correction: Correction | None = None


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """A study.

    Attributes:
        name: Name of its folder.
        question: The question that it answers.
        about: What a reader must know to read the answer.
        recipe: Recipe that every run starts from: a shipped one by its name, or a file, also beside the study's.
        source: Pretrained model that every arm starts from, by the name of its folder or file; empty for new models.
        reference: The arm to compare with.
        arms: The arms by name.
        axes: The axes by name.
        figures: What the arms are compared by, the most important first. The first one also chooses learning rates. Without
            any, arms are compared by the headline figures of every task, and records keep the tasks' whole results.
        presets: Sizes of the study by name.
        analysis: "arms", or "scaling" for power laws over the axes size and tokens.
    """

    name: str
    question: str
    about: str = ""
    recipe: str
    source: str = ""
    reference: str
    arms: dict[str, ArmConfig]
    axes: dict[str, AxisConfig] = field(default_factory=dict)
    figures: list[StudyFigure] = field(default_factory=list)
    presets: dict[str, PresetConfig]
    analysis: Literal["arms", "scaling"] = "arms"

    def __post_init__(self) -> None:
        check_name(self.name)
        self._check_arms()
        self._check_axes()
        for where, figures in {
            "": self.figures,
            **{f"presets.{k}.": one.figures for k, one in self.presets.items()},
        }.items():
            _check_study_figures(where, figures, self.arms)
        if not self.presets:
            raise ConfigError("presets: empty; give at least one, such as laptop")
        self._check_seeds()
        for name, preset in self.presets.items():
            self._check_preset(f"presets.{name}", preset)

    def _check_arms(self) -> None:
        if self.reference not in self.arms:
            raise ConfigError(f"reference: no arm {self.reference!r}; choose one of {', '.join(self.arms)}")
        if len(self.arms) < 2:
            raise ConfigError(f"arms: only {self.reference}; name at least one beside the reference")
        by_label: dict[str, str] = {}
        for name, one_arm in self.arms.items():
            label = one_arm.label or name
            if other := by_label.get(label):
                raise ConfigError(f"arms: {other} and {name} have the label {label!r}; change one")
            by_label[label] = name
            if bool(one_arm.upcycle) != bool(self.source):
                raise ConfigError(
                    f"arms.{name}.upcycle is {one_arm.upcycle!r} and source is {self.source!r}; a study of a pretrained "
                    "model has a source, and each arm says what becomes of it"
                )

    def _check_axes(self) -> None:
        for name, axis in self.axes.items():
            if not axis.values:
                raise ConfigError(f"axes.{name}: no values; give at least one")
        for name in (*self.arms, *self.axes, *(value for axis in self.axes.values() for value in axis.values)):
            if not is_plain_name(name) or " " in name:
                raise ConfigError(f"{name!r} names files; use letters, digits, points, hyphens and underscores")
        if self.analysis == "scaling" and not {"size", "tokens"} <= self.axes.keys():
            raise ConfigError(
                "analysis: scaling fits laws over the axes size and tokens; add them, or leave analysis out"
            )

    def _check_preset(self, where: str, preset: PresetConfig) -> None:
        if preset.tuning.learning_rates and not (preset.figures or self.figures):
            raise ConfigError(f"{where}.tuning: learning rates are chosen by the first of figures; name one")
        _check_names(f"{where}.arms", preset.arms or [], self.arms)
        _check_names(f"{where}.arm_set", preset.arm_set, self.arms)
        _check_names(f"{where}.axes", preset.axes, self.axes)
        for axis_name, values in preset.axes.items():
            _check_names(f"{where}.axes.{axis_name}", values, self.axes[axis_name].values)
        _check_names(f"{where}.tuning.per", preset.tuning.per, self.axes)
        if preset.arms is not None and self.reference not in preset.arms:
            raise ConfigError(f"{where}.arms: the reference {self.reference} is missing")
        if preset.arms == [self.reference]:
            raise ConfigError(f"{where}.arms: only {self.reference}; name at least one beside the reference")

    def _check_seeds(self) -> None:
        counts = {f"arms.{name}.seeds": arm.seeds for name, arm in self.arms.items()}
        for name, preset in self.presets.items():
            counts |= {f"presets.{name}.seeds": preset.seeds, f"presets.{name}.tuning.seeds": preset.tuning.seeds}
        for name, axis in self.axes.items():
            counts |= {f"axes.{name}.values.{value}.seeds": one.seeds for value, one in axis.values.items()}
        for where, count in counts.items():
            if count is not None and not 1 <= count <= MOST_SEEDS:
                raise ConfigError(f"{where}={count}: give 1 to {MOST_SEEDS}")


def _check_study_figures(where: str, figures: Sequence[StudyFigure], arms: Collection[str]) -> None:
    """Check that each figure is of a task or of a curve, and that no two have the same name in files."""
    if figures and figures[0].secondary:
        raise ConfigError(
            f"{where}figures: {figures[0].label!r} comes first and is secondary; put a primary figure first"
        )
    by_slug: dict[str, str] = {}
    for one in figures:
        if bool(one.curve) == bool(one.task):
            raise ConfigError(f"{where}figures: {one.label!r} needs either a task and its name, or a curve")
        if (one.reaches is not None or one.area) and not one.curve:
            raise ConfigError(f"{where}figures: {one.label!r} has reaches or area, which are of a curve; name one")
        if one.slug in by_slug:
            labels = f"{by_slug[one.slug]!r} and {one.label!r}"
            raise ConfigError(f"{where}figures: {labels} have the same name in files; change a label")
        by_slug[one.slug] = one.label
        _check_names(f"{where}figures: {one.label!r}: paper", one.paper, arms)


def _check_names(where: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check that each name is known, and named once."""
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise ConfigError(f"{where}: {unknown_key(name, known)}")
        if name in seen:
            raise ConfigError(f"{where}: {name} is named twice; name it once")
        seen.add(name)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run that a study asks for: its arm, its value on each axis, its seed and its recipe."""

    arm: str
    label: str
    point: Mapping[str, str]
    seed: int
    recipe: Recipe
    is_tuning: bool = False

    @cached_property
    def identity(self) -> str:
        return identity(self.recipe)

    @property
    def title(self) -> str:
        place = "".join(f", {axis} {value}" for axis, value in self.point.items())
        rate = f", learning rate {self.recipe.training.optimizer.learning_rate:g}" if self.is_tuning else ""
        return f"{self.label}{place}{rate}, seed {self.seed}"


class Design:
    """A study at one of its sizes.

    Args:
        config: The study.
        preset: Name of the size.
        seeds: Number of seeds, whatever preset, arms and axes say.
        changes: Values of the recipe that come last, such as "training.steps=100".
        document: The recipe as plain data; by default the study's.
        first_seed: Seed of the first run of each arm.
        file: What the study was read from, if that is not shipped.

    Raises:
        ConfigError: There is no such preset, or a value that the recipe does not take.
    """

    def __init__(
        self,
        config: StudyConfig,
        preset: str,
        *,
        seeds: int | None = None,
        changes: Sequence[str] = (),
        document: dict[str, Any] | None = None,
        first_seed: int = 0,
        file: str = "",
    ) -> None:
        if preset not in config.presets:
            raise ConfigError(f"--preset {preset}: {config.name} has {', '.join(config.presets)}")
        self.config, self.name, self.preset = config, preset, config.presets[preset]
        self._seeds, self._changes, self._first_seed = seeds, list(changes), first_seed
        self._file = file or config.name
        self._document = read_recipe(self.preset.recipe or config.recipe) if document is None else document
        self._recipe = cache(self._make_recipe)  # seeds share it
        self.arms = self.preset.arms or list(config.arms)
        self.figures = self.preset.figures or config.figures
        self.values = {axis: self.preset.axes.get(axis) or list(one.values) for axis, one in config.axes.items()}
        self.points = [
            dict(zip(self.values, combination, strict=True)) for combination in itertools.product(*self.values.values())
        ]
        self.plan = load_plan(self.preset.plan) if self.preset.plan else None
        if self.plan is not None:
            self._check_plan()
            self._check_followed()
        self._check_figures(self.reported())  # every recipe is checked before anything is trained

    def run(
        self, arm: str, point: Mapping[str, str], seed: int, rate: float | None = None, *, is_tuning: bool = False
    ) -> PlannedRun:
        recipe = self._recipe(arm, tuple(point.items()), rate).with_seed(seed)
        label = self.config.arms[arm].label or arm
        return PlannedRun(arm=arm, label=label, point=point, seed=seed, recipe=recipe, is_tuning=is_tuning)

    def _make_recipe(self, arm: str, point: tuple[tuple[str, str], ...], rate: float | None) -> Recipe:
        one = self.config.arms[arm]
        axes = (self.config.axes[axis].values[value].set for axis, value in point)
        sets = [self.preset.set, *axes, one.set, self.preset.arm_set.get(arm, {})]
        document = copy.deepcopy(self._document) | {"name": self.config.name}
        for values in sets:
            for key, value in values.items():
                override(document, key, value, said=f"{self.config.name}: {key}")
        for change in self._changes:
            override(document, *parsed_change(change), said=f"--set {change}")
        if rate is not None:
            override(document, LEARNING_RATE, rate, said=LEARNING_RATE)
        if self.config.source:
            document |= {"model": {}, "start_from": f"{UPCYCLED}{one.upcycle} {self.config.source}"}
            override(document, "data.tokenizer", f"{UPCYCLED}softmax {self.config.source}", said="data.tokenizer")
        return recipe_from(document, source=f"{self.config.name}, arm {arm}")

    @cached_property
    def tuning(self) -> list[PlannedRun]:
        """The runs that choose learning rates, before any extension; none where the study tries none."""
        tuning = self.preset.tuning
        places = itertools.product(range(tuning.seeds), self.tuned_points, tuning.learning_rates, self.arms)
        return [self._tuning_run(arm, point, seed, rate) for seed, point, rate, arm in places]

    def tuning_beyond(self, chosen: ChosenRate) -> list[PlannedRun]:
        """The runs of one more learning rate beyond a chosen one at the edge; none if it is not at the edge."""
        if not chosen.is_at_edge:
            return []
        tried = [rate for rate, _ in chosen.tried]
        inner = tried[1] if chosen.learning_rate == tried[0] else tried[-2]
        rate = float(f"{chosen.learning_rate**2 / inner:.6g}")
        return [self._tuning_run(chosen.arm, chosen.point, seed, rate) for seed in range(self.preset.tuning.seeds)]

    def _tuning_run(self, arm: str, point: Mapping[str, str], seed: int, rate: float) -> PlannedRun:
        return self.run(arm, point, 1000 + seed, rate, is_tuning=True)

    def arms_in_turn(self) -> list[list[str]]:
        """Return the arms in the order of tuning: the arms of the first contrast, then what the next one adds, and so on.

        So the first question is decided before other arms are tuned. Without a plan all arms are one group.
        """
        contrasts = self.plan.contrasts if self.plan else []
        groups = [[arm for term in contrast.terms for arm in term.arms] for contrast in contrasts]
        turns: list[list[str]] = []
        for group in (*groups, self.arms):
            before = {arm for turn in turns for arm in turn}
            turns.append([arm for arm in self.arms if arm in group and arm not in before])
        return [turn for turn in turns if turn]

    @property
    def tuned_points(self) -> list[dict[str, str]]:
        """The points at which learning rates are chosen: all at which no axis sets one."""
        axes = self.config.axes
        own_rate = {
            (axis, value) for axis in axes for value, one in axes[axis].values.items() if LEARNING_RATE in one.set
        }
        points = [point for point in self.points if point == self.tuned_point(point)]
        return [point for point in points if not own_rate & point.items()]

    def reported(self, rates: Sequence[ChosenRate] | None = None) -> list[PlannedRun]:
        """Return the runs that are compared, all arms of a seed side by side.

        Args:
            rates: Learning rates that were chosen. Runs that need another one are left out. None stands for the recipe's rates,
                where only the number and the kinds of runs matter.
        """
        known = self._chosen(rates)
        if self.plan is not None:
            return self._planned(rates, known)
        most = max(self._count(arm, point) for arm in self.arms for point in self.points)
        return [
            self.run(arm, point, self._first_seed + seed, known[arm, place(point)])
            for seed, point, arm in itertools.product(range(most), self.points, self.arms)
            if seed < self._count(arm, point) and (arm, place(point)) in known
        ]

    def _chosen(self, rates: Sequence[ChosenRate] | None) -> dict[tuple[str, str], float | None]:
        """Return the known learning rates by arm and `place`; None stands for the recipe's own rate."""
        chosen = {(one.arm, place(one.point)): one.learning_rate for one in rates or []}
        tuned = [place(point) for point in self.tuned_points] if self.preset.tuning.learning_rates else []
        known: dict[tuple[str, str], float | None] = {}
        for point in self.points:
            where = place(self.tuned_point(point))
            for arm in self.arms:
                if rates is None or where not in tuned or (arm, where) in chosen:
                    known[arm, place(point)] = chosen.get((arm, where))
        return known

    def _planned(
        self, rates: Sequence[ChosenRate] | None, known: Mapping[tuple[str, str], float | None]
    ) -> list[PlannedRun]:
        """Return the runs of the plan's contrasts, in the order of its questions; each run once.

        Without any rates, a setting that is chosen by tuning is taken to be the first.
        """
        assert self.plan is not None
        if rates is None:
            anything: dict[str, Any] = {"learning_rate": 0.0, "tried": [(0.0, 0.0)]}
            places = itertools.product(self.arms, self.tuned_points)
            rates = [ChosenRate(arm=arm, point=point, **anything) for arm, point in places]
        axes, lower_is_better = self.described_axes(), self.figures[0].better == "lower"
        runs: dict[tuple[str, str, int], PlannedRun] = {}
        for contrast in self.plan.contrasts:
            groups = groups_of(contrast, axes, rates, lower_is_better=lower_is_better) or {}
            points = {group: dict(zip(self.values, group[1], strict=True)) for group in groups}
            if any((arm, place(point)) not in known for (arm, _), point in points.items()):
                continue
            for seed, ((arm, _), point) in itertools.product(contrast.every_seed, points.items()):
                runs.setdefault((arm, place(point), seed), self.run(arm, point, seed, known[arm, place(point)]))
        return list(runs.values())

    @property
    def command(self) -> str:
        words = ["difftransformer", "study", self._file, "--preset", self.name]
        words += ["--source", self.config.source] if self.config.source else []
        words += [] if self._seeds is None else ["--seeds", str(self._seeds)]
        return shlex.join([*words, *(word for change in self._changes for word in ("--set", change))])

    def _check_figures(self, runs: Sequence[PlannedRun]) -> None:
        """Check that the runs will have what the figures ask for."""
        tasks = dict.fromkeys([*(spec.name for run in runs for spec in run.recipe.evaluation), TRAINING])
        for figure in self.figures:
            if figure.task:
                _check_names(f"{self.config.name}: figures: {figure.label!r}: task {figure.task}", [figure.task], tasks)
            elif not figure.curve.startswith("lambda ") and not any(run.recipe.logs.evaluate_every for run in runs):
                _check_names(
                    f"{self.config.name}: figures: {figure.label!r}: curve {figure.curve}", [figure.curve], CURVES
                )

    def lacking(self, run: PlannedRun, record: RunRecord) -> list[StudyFigure]:
        """Return the figures that the recipe asks for and the record lacks."""
        asked = {TRAINING, *(spec.name for spec in run.recipe.evaluation)}
        planned = [figure for figure in self.figures if figure.task in asked or figure.curve in CURVES]
        return [figure for figure in planned if figure_of(record, figure) is None]

    def _check_followed(self) -> None:
        """Check that no option asks for other runs than the plan does."""
        advice = f"{self.name} follows the plan {self.preset.plan}, which says what is run; change a copy of the study's file"
        if self._seeds is not None:
            raise ConfigError(f"--seeds {self._seeds}: {advice}")
        if self._changes:
            planned = Design(self.config, self.name, document=self._document)
            places = itertools.product(self.arms, self.points)
            if any(self.run(*one, 0).identity != planned.run(*one, 0).identity for one in places):
                raise ConfigError(f"--set {self._changes[0]}: {advice}")

    def _check_plan(self) -> None:
        """Check that the plan is of this study and names nothing unknown."""
        plan, source = self.plan, self.preset.plan
        assert plan is not None
        if (plan.study, plan.preset) != (self.config.name, self.name):
            raise ConfigError(
                f"{source}: the plan of {plan.study}, preset {plan.preset}, in {self.config.name}, preset {self.name}; name "
                "the plan of this size"
            )
        labels = {figure.label for figure in self.figures}
        for contrast in plan.contrasts:
            where = f"{source}: contrast {contrast.name!r}"
            _check_names(f"{where}: figure", [contrast.figure], labels)
            for term in contrast.terms:
                _check_names(f"{where}: arms", term.arms, self.arms)
                _check_names(f"{where}: at", term.at, self.values)
                for axis, value in term.at.items():
                    _check_names(f"{where}: at.{axis}", [value], [OWN_BEST, *self.values[axis]])
        named = {arm for contrast in plan.contrasts for term in contrast.terms for arm in term.arms}
        if unasked := [arm for arm in self.arms if arm not in named]:
            raise ConfigError(
                f"arms: no contrast of the plan {source} is about {', '.join(unasked)}; add one to the plan, or name the other "
                f"arms in presets.{self.name}.arms"
            )

    def is_tuned(self, rates: Sequence[ChosenRate]) -> bool:
        """Whether these are the rates of every arm at every point where one is chosen."""
        return len(rates) == len({(run.arm, place(run.point)) for run in self.tuning})

    def tuned_point(self, point: Mapping[str, str]) -> dict[str, str]:
        return self.points[0] | {axis: point[axis] for axis in self.preset.tuning.per}

    def _count(self, arm: str, point: Mapping[str, str]) -> int:
        if self._seeds is not None:
            return self._seeds
        own = [self.config.axes[axis].values[value].seeds for axis, value in point.items()]
        return max(self.config.arms[arm].seeds or self.preset.seeds, *(number or 0 for number in own), 1)

    @property
    def about(self) -> str:
        return f"{self.config.about} {self.preset.about}".strip()

    def seeds(self) -> tuple[int, int]:
        """Return the smallest and the largest number of seeds of a comparison."""
        if self.plan is not None:
            counts = [contrast.seeds for contrast in self.plan.contrasts]
        else:
            reference = self.config.reference
            others = [arm for arm in self.arms if arm != reference]
            pairs = itertools.product(others, self.points)
            counts = [min(self._count(arm, point), self._count(reference, point)) for arm, point in pairs]
        return min(counts, default=0), max(counts, default=0)

    def described_arms(self) -> list[StudyArm]:
        arms = {name: arm for name, arm in self.config.arms.items() if name in self.arms}
        return [StudyArm(name=name, label=arm.label or name, about=arm.about) for name, arm in arms.items()]

    def described_axes(self) -> list[StudyAxis]:
        axes = []
        for name, values in self.values.items():
            axis = self.config.axes[name]
            numbers = [axis.values[value].number for value in values]
            known = [number for number in numbers if number is not None]
            all_known = known if len(known) == len(numbers) else None
            axes.append(StudyAxis(name=name, label=axis.label or name, values=values, numbers=all_known))
        return axes


def place(point: Mapping[str, str]) -> str:
    """Write a point as one word, for files and keys."""
    return "-".join(f"{axis}{value}" for axis, value in point.items())


def load_study(path: Path | str) -> StudyConfig:
    """Read a study, or one that is shipped by its name.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a wrong type or an impossible combination.
    """
    expected = "a study is a mapping with name, question, recipe, arms, figures and presets"
    document = read_mapping(path, shipped_recipes("studies"), expected)
    config = build(StudyConfig, document, source=str(path), error=ConfigError)

    def resolved(recipe: str) -> str:
        beside = Path(path).parent / recipe
        return str(beside) if recipe and beside.is_file() else recipe

    presets = {name: replace(preset, recipe=resolved(preset.recipe)) for name, preset in config.presets.items()}
    return replace(config, recipe=resolved(config.recipe), presets=presets)

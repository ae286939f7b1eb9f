"""The shipped studies with their plans, claims and committed records: each says what it is, and what one names another has."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from difftransformer.model import count
from difftransformer.train.memory import step_bytes
from difftransformer_lab.recipe_files import shipped_recipes
from difftransformer_lab.results import OWN_BEST, ChosenRate, RunRecord, StudyIndex, read_result
from difftransformer_lab.studies import Design, load_study, recipe_from
from difftransformer_lab.studies.plan import FIRST_SEED, load_plan
from difftransformer_lab.studies.recipe import identity

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = DOCS / "results" / "studies"
STUDIES = sorted(shipped_recipes("studies"))
SIZES = [(name, size) for name in STUDIES for size in load_study(name).presets]
PLANS = sorted(shipped_recipes("plans"))
SUPERSEDED = {"scaling": 54}
"""Runs that no table uses, as the changes of their study say."""
GPU_BYTES = 0.9 * 80 * 2**30
ROW = re.compile(r"^\| `(\w+)`(?:, `([\w-]+)`)? \| (?:`([\w-]+)`|none) \| (\d+), (\d+) \|", re.MULTILINE)
"""What docs/studies.md says of a size: its plan, its runs, and how many of them choose learning rates."""
TOLD = {(study, size or "laptop"): rest for study, size, *rest in ROW.findall((DOCS / "studies.md").read_text("utf-8"))}


def contrasts_of(plan):
    return [contrast for question in plan.questions for contrast in question.contrasts]


def test_every_study_has_a_size_for_a_laptop_and_one_for_a_gpu():
    assert len(TOLD) == 18
    assert TOLD.keys() <= {*SIZES}
    assert all({"laptop", "gpu"} <= load_study(name).presets.keys() for name in STUDIES)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_size_of_a_study(name, size):
    design = Design(load_study(name), size, seeds=None if (name, size) in TOLD else 2)  # more seeds change nothing else
    runs = design.reported()
    assert design.preset.about
    check_runs(design, runs)
    if (name, size) in TOLD:
        tuning = len(design.tuning)
        assert [design.preset.plan, str(tuning + len(runs)), str(tuning)] == TOLD[name, size]
    if design.plan is not None:
        check_plan(design, runs)
    if not design.config.source:
        check_models(design, {(run.arm, *run.point.values()): run for run in runs})


def check_runs(design, runs):
    """Check that runs measure the figures of their study."""
    if design.plan is None:  # a plan may ask for a run in a tuned setting and in one of a stated rate
        assert len({run.identity for run in runs}) == len(runs)
    for run in [*runs, *design.tuning]:
        measured = {spec.name for spec in run.recipe.evaluation} | {"training"}
        figures = [figure for figure in design.figures if figure.task and not (run.is_tuning and figure.secondary)]
        assert {figure.task for figure in figures} <= measured


def check_plan(design, runs):
    """Check that the plan's seeds are asked for, and that its settings which tuning chooses are among those it tries."""
    asked = {(run.arm, run.seed) for run in runs}
    assert all(run.seed < FIRST_SEED for run in design.tuning)
    for contrast in contrasts_of(design.plan):
        seeds = range(contrast.first_seed, contrast.first_seed + contrast.seeds)
        for term in contrast.terms:
            assert {(arm, seed) for arm in term.arms for seed in seeds} <= asked
            for axis in (axis for axis, value in term.at.items() if value == OWN_BEST):
                assert {point[axis] for point in design.tuned_points} < set(design.config.axes[axis].values)


def check_models(design, runs):
    """Check that arms have as many parameters as their reference, as axes say, and that models fit on one GPU."""
    config = {place: run.recipe.planned_config() for place, run in runs.items()}
    if design.name == "clean":  # whose points are learning rates, which differ by arm
        config["twin", "fan-in-0.004"] = config["twin", "fan-in-0.008"]
    for (arm, *point), own in config.items():
        twin = config[design.config.reference, *point]
        parameters, wanted = (count(one).parameters for one in (own, twin))
        vectors = 6 * own.head_dim * own.num_hidden_layers  # the lambda vectors and the gain of DIFF
        assert 0.96 * wanted < parameters < 1.01 * wanted + vectors, arm  # one key for both maps takes 3 % away
        assert own.num_hidden_layers == twin.num_hidden_layers
    for place, run in runs.items():
        training = run.recipe.training
        if design.config.analysis == "scaling":
            numbers = {axis: design.config.axes[axis].values[value].number for axis, value in run.point.items()}
            assert numbers["tokens"] == training.steps * training.batch_tokens
            assert numbers["size"] == count(config[place].twin("softmax")).parameters
        if design.name != "laptop":
            assert step_bytes(config[place], training, run.recipe.parallel).total < GPU_BYTES


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_what_each_outcome_means(name):
    """A sentence for every outcome that can be decided, and the reasons in general."""
    plan = load_plan(name)
    assert load_study(plan.study).presets[plan.preset].plan == name
    assert plan.about
    for contrast in contrasts_of(plan):
        assert contrast.above.endswith(".")
        assert contrast.below.endswith(".")
        assert contrast.within.endswith(".") == (contrast.smallest is not None)
        assert math.fsum(term.weight for term in contrast.terms) == pytest.approx(0)


def test_slopes_have_the_weights_of_least_squares():
    """A difference that grows by 3 per unit of the axis has a slope of 3, and one that is the same everywhere of 0."""
    plans = [(plan, contrast) for plan in map(load_plan, PLANS) for contrast in contrasts_of(plan)]
    slopes = [(plan, contrast) for plan, contrast in plans if contrast.name.startswith("slope")]
    assert len(slopes) == 1
    for plan, contrast in slopes:
        for name, axis in load_study(plan.study).axes.items():
            if name not in contrast.terms[0].at:
                continue
            scale = math.log if name == "size" else float
            at = [scale(axis.values[term.at[name]].number) for term in contrast.terms]
            first = contrast.terms[0].arms
            grown = [3 * x + 7 if term.arms == first else 0 for x, term in zip(at, contrast.terms, strict=True)]
            slope = math.fsum(y * term.weight for y, term in zip(grown, contrast.terms, strict=True))
            assert slope == pytest.approx(3, rel=1e-3)


def extended(design):
    """The runs that choose learning rates, with all that extensions may ask for at either edge."""
    runs = {(run.arm, tuple(run.point.items())): run for run in design.tuning}
    beyond = []
    for (arm, point), edge in itertools.product(runs, (0, -1)):
        tried = sorted(design.preset.tuning.learning_rates)
        for _ in range(design.preset.tuning.extensions):
            figures = [(rate, 0.0) for rate in tried]
            best = ChosenRate(arm=arm, point=dict(point), learning_rate=tried[edge], tried=figures)
            further = design.tuning_beyond(best)
            assert len(further) == design.preset.tuning.seeds
            tried = sorted([*tried, further[0].recipe.training.optimizer.learning_rate])
            beyond += further
    return [*design.tuning, *beyond]


def test_extensions_of_learning_rates_are_asked_for(monkeypatch):
    """Two at either edge of each arm, as far from it as it is from the next rate."""
    study = load_study("start")
    preset = study.presets["laptop"]
    tuning = dataclasses.replace(preset.tuning, learning_rates=[0.002, 0.004, 0.016], seeds=2, extensions=2)
    monkeypatch.setitem(study.presets, "laptop", dataclasses.replace(preset, tuning=tuning))
    design = Design(study, "laptop")
    rates = Counter(run.recipe.training.optimizer.learning_rate for run in extended(design)[len(design.tuning) :])
    places = len({(run.arm, *run.point.values()) for run in design.tuning})
    assert rates == dict.fromkeys((0.001, 0.0005, 0.064, 0.256), 2 * places)


def test_committed_records_are_runs_that_studies_ask_for():
    """All are read; a run that an index names is one that its study asks for today, and no other is lost unknown."""
    identities = {
        path.resolve(): identity(recipe_from(read_result(path, RunRecord).recipe, source=str(path)))
        for path in RECORDS.glob("*/runs/*.json")
    }
    asked = set()
    for file in sorted(RECORDS.glob("*/*.json")):
        index = read_result(file, StudyIndex)
        design = Design(load_study(index.name), index.preset)
        assert file == RECORDS / index.name / f"{design.name}.json"
        assert [figure.label for figure in index.figures] == [figure.label for figure in design.figures]
        wanted = {run.identity for run in [*extended(design), *design.reported(index.rates)]}
        for member in index.members:
            assert identities[(file.parent / member.file).resolve()] in wanted, member.file
        asked |= wanted
    lost = {}
    for file, known in identities.items():
        if known not in asked:
            lost.setdefault(file.parents[1].name, []).append(file.name)
    assert {study: len(files) for study, files in lost.items()} == SUPERSEDED, lost

"""The shipped plans, the claims that rest on them, and the committed records: what one names, the other has."""

import math
from pathlib import Path

import pytest

from difftransformer_lab.recipe_files import shipped_recipes
from difftransformer_lab.report.claims import read_claims
from difftransformer_lab.results import OWN_BEST, RunRecord, StudyIndex, read_result
from difftransformer_lab.studies import Design, load_study
from difftransformer_lab.studies.design import identity
from difftransformer_lab.studies.plan import FIRST_SEED, load_plan
from difftransformer_lab.studies.recipe import recipe_from

PLANS = sorted(shipped_recipes("plans"))
RECORDS = Path(__file__).parents[2] / "docs" / "results" / "studies"
INDEXES = sorted(RECORDS.glob("*/*.json"))
SUPERSEDED = {"scaling": 54}
"""Runs that no table uses, as the changes of their study say."""


def contrasts_of(plan):
    return [contrast for question in plan.questions for contrast in question.contrasts]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_that_of_its_study(name):
    plan = load_plan(name)
    design = Design(load_study(plan.study), plan.preset)
    assert design.preset.plan == name
    asked = {(run.arm, run.seed) for run in design.reported()}
    for contrast in contrasts_of(plan):
        seeds = range(contrast.first_seed, contrast.first_seed + contrast.seeds)
        assert {(arm, seed) for term in contrast.terms for arm in term.arms for seed in seeds} <= asked
    assert all(run.seed < FIRST_SEED for run in design.tuning)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_what_each_outcome_means(name):
    """A sentence for every outcome that can be decided, and the reasons in general."""
    plan = load_plan(name)
    assert plan.about
    for contrast in contrasts_of(plan):
        assert contrast.above.endswith(".")
        assert contrast.below.endswith(".")
        assert contrast.within.endswith(".") == (contrast.smallest is not None)
        assert math.fsum(term.weight for term in contrast.terms) == pytest.approx(0)


def test_slopes_have_the_weights_of_least_squares():
    """A difference that grows by 3 per unit of the axis has a slope of 3, and one that is the same everywhere of 0."""
    slopes = [
        (plan, contrast)
        for plan in map(load_plan, PLANS)
        for contrast in contrasts_of(plan)
        if contrast.name.startswith("slope")
    ]
    assert len(slopes) == 4
    for plan, contrast in slopes:
        for axis in load_study(plan.study).axes.items():
            name, values = axis[0], axis[1].values
            if name not in contrast.terms[0].at:
                continue
            scale = math.log if name == "size" else float
            at = [scale(values[term.at[name]].number) for term in contrast.terms]
            first = contrast.terms[0].arms
            grown = [3 * x + 7 if term.arms == first else 0 for x, term in zip(at, contrast.terms, strict=True)]
            assert math.fsum(y * term.weight for y, term in zip(grown, contrast.terms, strict=True)) == pytest.approx(
                3, rel=1e-3
            )


def test_claims_rest_on_contrasts_of_plans():
    planned = {(plan.study, contrast.name) for plan in map(load_plan, PLANS) for contrast in contrasts_of(plan)}
    named = [(test.study, test.contrast) for claim in read_claims() for test in (*claim.tests, *claim.beside)]
    assert named
    assert set(named) <= planned


def test_an_own_best_setting_is_among_tuned_ones():
    for plan in map(load_plan, PLANS):
        design = Design(load_study(plan.study), plan.preset)
        for contrast in contrasts_of(plan):
            for term in contrast.terms:
                for axis, value in term.at.items():
                    if value == OWN_BEST:
                        assert {point[axis] for point in design.tuned_points} < set(design.config.axes[axis].values)


@pytest.mark.parametrize("file", INDEXES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_committed_index_is_of_a_size_that_its_study_has(file):
    index = read_result(file, StudyIndex)
    design = Design(load_study(index.name), index.preset)
    assert file == RECORDS / index.name / f"{design.name}.json"
    assert [figure.label for figure in index.figures] == [figure.label for figure in design.figures]
    assert all((file.parent / member.file).is_file() for member in index.members)


def test_no_committed_record_is_lost():
    """Every record is a run that some size of a study asks for, or one that is known to be superseded."""
    asked = set()
    for file in INDEXES:
        index = read_result(file, StudyIndex)
        design = Design(load_study(index.name), index.preset)
        asked |= {run.identity for run in [*design.tuning, *design.reported(index.rates)]}
    lost = {}
    for file in sorted(RECORDS.glob("*/runs/*.json")):
        recipe = recipe_from(read_result(file, RunRecord).recipe, source=str(file))
        if identity(recipe) not in asked:
            lost.setdefault(file.parents[1].name, []).append(file.name)
    assert {study: len(files) for study, files in lost.items()} == SUPERSEDED, lost

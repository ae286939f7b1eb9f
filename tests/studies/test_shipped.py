"""The shipped studies: every size of each can be planned, says what it is, and fits where it is meant to run."""

from pathlib import Path

import pytest

from difftransformer.model import count
from difftransformer.train.plan import Layout, rank_bytes, sizes_of
from difftransformer_lab.recipe_files import shipped_recipes
from difftransformer_lab.results import RunRecord, StudyIndex, read_result
from difftransformer_lab.studies import Design, load_study, recipe_from
from difftransformer_lab.studies.design import identity
from difftransformer_lab.studies.records import RunStore

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "studies"
STUDIES = sorted(shipped_recipes("studies"))
SIZES = [(name, size) for name in STUDIES for size in load_study(name).presets]
GPU_BYTES = 0.9 * 80 * 2**30


@pytest.fixture(params=SIZES, ids="-".join)
def design(request):
    name, size = request.param
    return Design(load_study(name), size)


def test_every_study_has_a_size_for_a_laptop_and_one_for_a_gpu():
    assert all({"laptop", "gpu"} <= load_study(name).presets.keys() for name in STUDIES)


def test_runs_measure_the_figures_of_their_study(design):
    assert design.preset.about
    runs = design.reported()
    if design.plan is None:  # a plan may ask for a run in a tuned setting and in one of a stated rate
        assert len({run.identity for run in runs}) == len(runs)
    for run in [*runs, *design.tuning]:
        measured = {spec.name for spec in run.recipe.evaluation} | {"training"}
        figures = [figure for figure in design.figures if figure.task and not (run.is_tuning and figure.secondary)]
        assert {figure.task for figure in figures} <= measured


def test_arms_have_as_many_parameters_as_their_reference(design):
    if design.config.source:
        return
    config = {(run.arm, *run.point.values()): run.recipe.planned_config() for run in design.reported()}
    reference = design.config.reference
    for (arm, *point), own in config.items():
        parameters, wanted = (count(one).parameters for one in (own, config[reference, *point]))
        vectors = 6 * own.head_dim * own.num_hidden_layers  # the lambda vectors and the gain of DIFF
        assert 0.96 * wanted < parameters < 1.01 * wanted + vectors, arm  # one key for both maps takes 3 % away
        assert own.num_hidden_layers == config[reference, *point].num_hidden_layers


def test_numbers_of_axes_are_those_of_the_models(design):
    if design.config.analysis != "scaling":
        return
    for run in design.reported():
        numbers = {axis: design.config.axes[axis].values[value].number for axis, value in run.point.items()}
        training = run.recipe.training
        assert numbers["tokens"] == training.steps * training.batch_tokens
        assert numbers["size"] == count(run.recipe.planned_config().twin("softmax")).parameters


def test_models_fit_on_one_gpu(design):
    if design.config.source or design.name == "laptop":
        return
    for run in design.reported():
        config, training = run.recipe.planned_config(), run.recipe.training
        sizes = sizes_of(config, training)
        layout = Layout(micro_rows=sizes.rows // training.accumulation, accumulation=training.accumulation)
        assert rank_bytes(sizes, layout).total < GPU_BYTES


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_committed_record_is_found(path):
    """The run that an index names is one that its study asks for today."""
    index = read_result(path, StudyIndex)
    design = Design(load_study(index.name), index.preset)
    wanted = {run.identity for run in [*design.tuning, *design.reported(index.rates)]}
    for member in index.members:
        file = path.parent / member.file
        recipe = recipe_from(read_result(file, RunRecord).recipe, source=str(file))
        assert identity(recipe) in wanted, member.file


def test_every_committed_record_is_read(caplog):
    files = {path.resolve() for path in RunStore(RECORDS)._found.values()}
    assert caplog.messages == []
    assert files == {path.resolve() for path in RECORDS.glob("*/runs/*.json")}

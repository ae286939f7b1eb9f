"""Plans of studies: the runs that they ask for, what does not fit a study, and when a plan is registered."""

import subprocess
from datetime import datetime

import pytest
import torch
import yaml

from difftransformer.errors import ConfigError
from difftransformer_lab import environment
from difftransformer_lab.results import ChosenRate, RunRecord, read_result
from difftransformer_lab.studies import Study, costs
from difftransformer_lab.studies.plan import load_plan, registered


def planned(**fields):
    """A contrast of both arms at each one's best number of needles."""
    term = {"arms": ["diff"], "weight": 1, "at": {"needles": "own best"}}
    other = {"arms": ["twin"], "weight": -1, "at": {"needles": "own best"}}
    words = {"above": "More.", "below": "Less.", "figure": "loss"}
    return {"name": "best", "terms": [term, other], "seeds": 2, **words} | fields


@pytest.fixture
def plan(document, tmp_path):
    """Give the study a plan of these contrasts, and return its file."""

    def write(*contrasts):
        file = tmp_path / "plan.yaml"
        questions = [{"question": "?", "contrasts": contrasts}]
        plain = {"study": document["name"], "preset": "laptop", "questions": questions}
        file.write_text(yaml.safe_dump(plain))
        document["presets"]["laptop"]["plan"] = str(file)
        return file

    return write


@pytest.mark.parametrize(("fields", "names", "message"), [
    ({}, ["bets"], "holm names 'bets', which is no contrast of the plan; it has best"),
    ({"margin": 0.1}, ["best"], "margin=0.1 under holm, whose p-values are against 0"),
])  # fmt: skip
def test_contrasts_under_holm_are_those_of_the_plan_and_have_no_margin(plan, fields, names, message):
    file = plan(planned(**fields))
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"holm": names}))
    with pytest.raises(ConfigError, match=message):
        load_plan(str(file))


def test_a_plan_says_which_runs_are_made(design, document, plan):
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [1.0e-3, 1.0e-2], "seeds": 1, "per": ["needles"]}
    fixed = {"set": {"training.retrieval.max_needles": 1, "training.optimizer.learning_rate": 2.0e-3}}
    document["axes"]["needles"]["values"]["fixed"] = fixed
    terms = [{"arms": ["diff", "twin"], "weight": 1, "at": {"needles": "fixed"}}]
    plan(planned(), planned(name="fixed", terms=terms, first_seed=2001, seeds=1))
    asked = design()
    assert [point["needles"] for point in asked.tuned_points] == ["one", "two"]
    known = asked.reported([])  # before any rate is chosen
    fixed = {("diff", "fixed", 2001), ("twin", "fixed", 2001)}
    assert {(run.arm, run.point["needles"], run.seed) for run in known} == fixed
    assert {run.recipe.training.optimizer.learning_rate for run in known} == {2e-3}
    losses = {("diff", "one"): 3.0, ("diff", "two"): 2.0, ("twin", "one"): 1.0, ("twin", "two"): 4.0}
    rates = [
        ChosenRate(arm=arm, point={"needles": where}, learning_rate=1e-2, tried=[(1e-3, 9.0), (1e-2, loss)])
        for (arm, where), loss in losses.items()
    ]
    runs = {(run.arm, run.point["needles"], run.seed): run for run in asked.reported(rates)}
    best = {(arm, where, seed) for arm, where in (("diff", "two"), ("twin", "one")) for seed in (2000, 2001)}
    assert runs.keys() == best | fixed
    assert {runs[key].recipe.training.optimizer.learning_rate for key in best} == {1e-2}


def test_a_question_does_not_wait_for_the_rates_of_another(design, document, plan, trained, tmp_path, monkeypatch):
    document["arms"] = {"dex": {"label": "DEX", "set": {"model.attention_type": "dex"}}} | document["arms"]
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [5.0e-3], "seeds": 1, "per": ["needles"]}
    document["axes"]["needles"]["values"].pop("two")
    terms = [{"arms": [arm], "weight": sign, "at": {"needles": "own best"}} for arm, sign in (("dex", 1), ("twin", -1))]
    plan(planned(seeds=1), planned(name="dex", terms=terms, seeds=1))
    monkeypatch.setattr(environment, "commit", lambda: "0" * 40 + "-dirty")
    with pytest.raises(ConfigError, match="runs need committed code, and"):
        Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1)
    monkeypatch.setattr("difftransformer_lab.studies.study.check_committed", lambda: None)
    index = Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1)
    first = [(arm, is_tuning) for is_tuning in (True, False) for arm in ("DIFF", "Transformer")]
    order = [(title.split(",")[0], "learning rate" in title) for title in trained]
    assert order == [*first, ("DEX", True), ("DEX", False)]
    assert index.planned == len(index.members) == 6


def test_a_plan_in_doublings_has_its_arms_timed_in_turns(design, document, plan, trained, tmp_path, monkeypatch):
    document["axes"]["needles"]["values"].pop("two")
    terms = [{"arms": [arm], "weight": sign} for arm, sign in (("diff", 1), ("twin", -1))]
    plan(planned(terms=terms, scale="doublings", seeds=1))
    monkeypatch.setattr("difftransformer_lab.studies.study.check_committed", lambda: None)
    monkeypatch.setattr("difftransformer_lab.studies.costs.STEPS", 4)

    def train(**options):
        return Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1, **options)

    train(only=["diff"])
    timed = train()
    assert {row.model: row.label for row in timed.costs} == {"diff": "DIFF", "twin": "Transformer"}
    files = {one.arm: tmp_path / "results" / "small" / one.file for one in timed.members}
    for row in timed.costs:
        assert row.train_step_seconds > 0
        assert row.parameters == read_result(files[row.model], RunRecord).parameters
    assert train().costs == timed.costs  # nothing was trained


# Both warnings are the compiler's own.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_types_that_are_timed_in_turns_have_code_of_their_own(design, document, tmp_path, monkeypatch):
    """Beyond its limit the compiler says nothing and runs a layer as it is, and that type would look slow."""
    document["axes"]["needles"]["values"].pop("two")
    document["arms"]["v2"] = {"set": {"model.attention_type": "diff_v2"}}
    document["presets"]["laptop"]["set"] = {"training.compile": True}
    study = Study(design(), tmp_path / "results")
    prepared = {run.arm: study.prepared(run) for run in study.design.reported([])}
    shards = prepared["twin"].shards
    compile_layer, layers = torch.nn.Module.compile, []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: layers.append(compile_layer(layer, backend="eager")))
    monkeypatch.setattr(costs, "STEPS", 2)
    recipes = {arm: one.recipe for arm, one in prepared.items()}
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        rows = costs.time_steps(recipes, shards, labels=dict.fromkeys(recipes, ""), device="cpu")
    torch.compiler.reset()
    assert len(layers) == sum(recipe.model["num_hidden_layers"] for recipe in recipes.values())
    assert [row.model for row in rows] == list(recipes)


@pytest.mark.parametrize(("fields", "message"), [
    ({"first_seed": 1999}, "seeds 1999 to 2000; begin at 2000 or above"),
    ({"seeds": 0}, "give at least 1 seed"),
    ({"figure": "los"}, "figure: unknown key"),
    ({"terms": [{"arms": ["dif"], "weight": 1}]}, "arms: unknown key; did you mean diff"),
    ({"terms": [{"arms": ["diff"], "weight": 1, "at": {"needle": "one"}}]}, "at: unknown key; did you mean needles", ),
    ({"terms": [{"arms": ["diff"], "weight": 1, "at": {"needles": "ten"}}]}, "at.needles: unknown key"),
    ({"terms": []}, "a term without arms"),
    ({"smallest": 0.1, "within": ""}, "smallest without within"),
    ({"below": "It is materially lower."}, "below says 'materially', and is decided by lying below 0 alone"),
    ({"above": "It matters: the loss is higher by at least 0.1."}, "above says 'by at least'"),
])  # fmt: skip
def test_plans_that_do_not_fit(design, plan, fields, message):
    plan(planned(**fields))
    with pytest.raises(ConfigError, match=message):
        design()


def test_an_arm_that_no_contrast_is_about_is_refused(design, document, plan):
    """Its learning rates would be tried, and nothing reported."""
    document["arms"]["half"] = {"set": {"training.steps": 4}}
    plan(planned())
    with pytest.raises(ConfigError, match=r"arms: no contrast of the plan .* is about half; .* in presets.laptop.arms"):
        design()
    document["presets"]["laptop"]["arms"] = ["diff", "twin"]
    assert {run.arm for run in design().reported([])} <= {"diff", "twin"}


def test_no_option_asks_for_other_runs_than_a_plan(design, document, plan):
    plan(planned())
    for options, given in (
        ({"seeds": 3}, "--seeds 3"),
        ({"changes": ["training.steps=5"]}, "--set training.steps=5"),
        ({"changes": ["model.attention_type=diff"]}, "--set model.attention_type=diff"),  # another twin alone
    ):
        with pytest.raises(ConfigError, match=f"{given}: laptop follows the plan .*plan.yaml, which says what is run"):
            design(**options)
    assert len(design(changes=["data.folder=elsewhere"]).reported()) == 4  # the same runs
    del document["presets"]["laptop"]["plan"]
    explored = design(seeds=2, changes=["training.steps=5"])
    assert explored.command.endswith("--preset laptop --seeds 2 --set training.steps=5")


def test_a_plan_twice_or_of_another_study(design, document, plan):
    file = plan(planned(), planned())
    with pytest.raises(ConfigError, match="contrast 'best' stands twice"):
        design()
    file.write_text(file.read_text().replace(f"study: {document['name']}", "study: other"))
    plan(planned())
    file.write_text(file.read_text().replace("preset: laptop", "preset: gpu"))
    with pytest.raises(ConfigError, match=r"preset gpu, in .*, preset laptop; name the plan of this size"):
        design()


def test_a_plan_is_registered_by_its_commit(plan, tmp_path):
    file = plan(planned())
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    assert registered(str(file), load_plan(str(file))).commit == ""
    for words in (["init", "-q"], ["add", "plan.yaml"], ["commit", "-q", "-m", "plan"]):
        subprocess.run([*git, *words], check=True)
    here = registered(str(file), load_plan(str(file)))
    log = subprocess.run([*git, "log", "-1", "--format=%H %cI"], check=True, capture_output=True, text=True)
    commit, committed = log.stdout.split()
    assert here.commit == commit
    assert datetime.fromisoformat(here.committed) == datetime.fromisoformat(committed)
    assert here.sha256 == subprocess.run(["sha256sum", file], check=True, capture_output=True, text=True).stdout[:64]
    (tmp_path / "other").write_text("")
    for words in (["add", "other"], ["commit", "-q", "-m", "other"]):
        subprocess.run([*git, *words], check=True)
    assert registered(str(file), load_plan(str(file))) == here  # by the commit that gave it this content
    file.write_text(file.read_text() + "# changed\n")
    assert registered(str(file), load_plan(str(file))).commit == ""


def test_nothing_is_still_to_come_once_the_rates_of_a_plan_are_chosen(design, document, plan, tmp_path):
    """The best number of needles is the second one, and a plan is taken to ask for the first until that is known."""
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [1.0e-3], "seeds": 1, "per": ["needles"]}
    plan(planned())
    study = Study(design(), tmp_path / "results")
    assert study.planned() == 4 + 4
    study.rates = lambda: [
        ChosenRate(arm=arm, point={"needles": needles}, learning_rate=1e-3, tried=[(1e-3, loss)])
        for arm in ("diff", "twin") for needles, loss in (("one", 2.0), ("two", 1.0))
    ]  # fmt: skip
    assert study.planned() == 4 + 4

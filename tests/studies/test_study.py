"""Studies: what they ask for, what they share and keep, and what they train again."""

import json
import shutil
from collections import Counter
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer.data import byte_tokenizer
from difftransformer.errors import ConfigError, DataError, EvaluationError
from difftransformer.ops import build
from difftransformer.train import read_metrics
from difftransformer_lab.analysis import analyse, read_records
from difftransformer_lab.analysis.page import study_page, write_page
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.engine import task_sha256
from difftransformer_lab.results import ChosenRate, RunRecord, StudyIndex, read_result
from difftransformer_lab.statistics import detectable
from difftransformer_lab.studies import Study, recipe_from
from difftransformer_lab.studies import run as run_module
from difftransformer_lab.studies.evaluation import draw_tasks
from difftransformer_lab.studies.jobs import watched_by
from difftransformer_lab.studies.recipe import identity
from difftransformer_lab.studies.run import main as run_main
from tests.support.cases import threads

STEPS = 4
LOSS = {"label": "loss", "task": "perplexity", "name": "nll", "unit": "nats/token"}


def test_arms_axes_and_seeds(document, design):
    document["arms"]["diff"]["seeds"] = 2
    document["axes"]["needles"]["values"]["one"]["seeds"] = 3
    document["axes"]["width"] = {"values": {"32": {}, "64": {"set": {"model.hidden_size": 64}}}}
    document["presets"]["laptop"] = {"seeds": 1, "set": {"training.steps": 7}}
    runs = design().reported()
    counts = Counter((run.arm, run.point["needles"], run.point["width"]) for run in runs)
    assert counts == {
        (arm, needles, width): 3 if needles == "one" else 2 if arm == "diff" else 1
        for arm in ("diff", "twin")
        for needles in ("one", "two")
        for width in ("32", "64")
    }
    for run in runs:
        recipe = run.recipe
        assert recipe.training.seed == run.seed
        assert recipe.training.steps == 7
        assert recipe.model["hidden_size"] == int(run.point["width"])
        assert recipe.model["attention_type"] == {"diff": "diff", "twin": "softmax"}[run.arm]
        assert recipe.training.retrieval.max_needles == {"one": 1, "two": 2}[run.point["needles"]]
    assert {run.seed for run in design(seeds=2).reported()} == {0, 1}


def test_a_preset_takes_a_part(document, design):
    document["arms"]["other"] = {}
    document["presets"]["tiny"] = {"seeds": 1, "axes": {"needles": ["two"]}, "arms": ["twin", "other"]}
    assert [(run.arm, run.point) for run in design("tiny").reported()] == [
        (arm, {"needles": "two"}) for arm in ("twin", "other")
    ]


@pytest.mark.parametrize(("path", "value", "message"), [
    (("reference",), "none", "reference: no arm 'none'"),
    (("arms", "diff"), {"label": "Transformer"}, "arms: diff and twin have the label 'Transformer'"),
    (("figures",), [{"label": "x"}], "'x' needs either a task and its name, or a curve"),
    (("axes", "needles", "values"), {}, "axes.needles: no values"),
    (("axes", "needles", "values"), {"a b": {}}, "'a b' names files"), (("presets",), {}, "presets: empty"),
    (("arms",), {"twin": {}}, "arms: only twin; name at least one beside the reference"),
    (("presets", "laptop", "arms"), ["twin"], "presets.laptop.arms: only twin; name at least one beside the reference"),
    (("figures",), [LOSS, LOSS | {"name": "other"}], "figures: 'loss' and 'loss' have the same name in files"),
    (("figures",), [LOSS | {"label": "at 8"}, LOSS | {"label": "At-8"}], "'at 8' and 'At-8' have the same name in files"),
    (("presets", "laptop", "figures"), [LOSS, LOSS], "presets.laptop.figures: 'loss' and 'loss' have the same"),
    (("figures",), [LOSS | {"task": "perplexty"}], "'loss': task perplexty: unknown key; did you mean perplexity? allowed: "),
    (("figures",), [{"label": "loss", "curve": "validation_los_nats"}], "curve validation_los_nats: unknown key; did you"),
    (("figures",), [LOSS | {"paper": {"dif": 1.0}}], "figures: 'loss': paper: unknown key; did you mean diff?"),
    (("figures",), [LOSS | {"reaches": 1.0}], "'loss' has reaches or area, which are of a curve"),
    (("analysis",), "scaling", "analysis: scaling fits laws over the axes size and tokens"),
    (("arms", "diff", "seeds"), 0, "arms.diff.seeds=0: give 1 to"),
    (("axes", "needles", "values", "one", "seeds"), -1, "axes.needles.values.one.seeds=-1: give 1 to"),
    (("presets", "laptop", "tuning"), {"learning_rates": [0.1], "seeds": 0}, "presets.laptop.tuning.seeds=0: give 1 to"),
    (("presets", "laptop", "arms"), ["diff", "twin", "diff"], "presets.laptop.arms: diff is named twice"),
    (("presets", "laptop", "axes"), {"needles": ["one", "one"]}, "presets.laptop.axes.needles: one is named twice"),
    (("presets", "laptop", "seeds"), 0, "presets.laptop.seeds=0"),
    (("presets", "laptop", "arms"), ["diff"], "the reference twin is missing"),
    (("presets", "laptop", "arms"), ["dif"], "did you mean diff?"),
    (("presets", "laptop", "arm_set"), {"dif": {}}, "presets.laptop.arm_set: unknown key"),
    (("presets", "laptop", "axes"), {"needle": ["one"]}, "did you mean needles?"),
    (("presets", "laptop", "axes"), {"needles": ["three"]}, "presets.laptop.axes.needles: unknown key"),
    (("presets", "laptop", "tuning"), {"per": ["width"]}, "presets.laptop.tuning.per: unknown key"),
    (("arms", "diff", "set"), {"model.attention_typ": "diff"}, "did you mean attention_type?"),
    (("recipe",), "nowhere.yaml", "nowhere.yaml: no such file"),
], ids=lambda value: ".".join(value) if isinstance(value, tuple) else None)  # fmt: skip
def test_mistakes_are_named(document, design, path, value, message):
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as error:
        design()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_preset_names_those_there_are(design):
    with pytest.raises(ConfigError, match="--preset gpu: small has laptop"):
        design("gpu")


def test_tasks_are_drawn_for_each_run_s_own_lengths(document, design, tmp_path):
    """The prompts of many-shot classification grow to the model's positions, where windows of text do not."""
    lines = [{"text": f"word {index}", "label": f"kind {index % 2}"} for index in range(100)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    icl = {"task": "icl", "options": {"train_file": str(tmp_path / "train.jsonl"), "items": 4}}
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe["evaluation"] += [icl]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    values = {str(length): {"set": {"model.max_position_embeddings": length}} for length in (128, 512)}
    document["axes"] = {"length": {"values": values}}
    study = Study(design(), tmp_path / "results")
    for run in study.design.reported():
        prepared, length = study.prepared(run), int(run.point["length"])
        task = prepared.tasks["icl"]
        longest = max(len(request.prompt) for request in task.requests)
        assert length / 2 < longest <= length
        assert task_sha256(task) == task_sha256(draw_tasks(prepared.recipe, prepared.shards)["icl"])
    assert study.prepared(study.design.reported()[0]).tasks is study.prepared(study.design.reported()[1]).tasks


def test_a_run_without_a_planned_figure_is_an_error(document, design, trained, tmp_path):
    document["axes"], document["arms"]["diff"]["set"]["evaluation.perplexity"] = {}, None
    document["figures"] += [{"label": "loss there", "task": "perplexity", "name": "nll", "at": {"position": 7}}]
    with pytest.raises(EvaluationError, match="Transformer, seed 0: has no figure 'loss there'"):
        Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1)
    (kept,) = (tmp_path / "results").glob("small/runs/*.json")
    assert kept.name.startswith("diff")  # which is not asked for it


def test_a_figure_that_no_finished_run_has_is_an_error(document, design, trained, tmp_path):
    """Runs that are there already are not trained again, and an empty page says nothing."""
    document["axes"], results, out = {}, tmp_path / "results", tmp_path / "out"
    Study(design(), results).train(out, at_once=1)
    trained.clear()
    index = (results / "small" / "laptop.json").read_bytes()
    for figure, there in (
        (LOSS | {"name": "nlll"}, "nll, bits per byte"),
        (LOSS | {"at": {"position": 7}}, "nll at all"),
        ({"label": "loss", "curve": "lambda 9"}, "lambda 0, lambda 1"),
    ):
        document["figures"] = [figure]
        with pytest.raises(EvaluationError, match=f"no run has the figure 'loss'; .*runs have .*{there}"):
            Study(design(), results).train(out, at_once=1)
    assert trained == []
    assert (results / "small" / "laptop.json").read_bytes() == index


def test_a_study_keeps_what_it_trained(document, design, trained, tmp_path):
    results = tmp_path / "results"
    index = Study(design(), results).train(tmp_path / "out", at_once=1)
    assert len(trained) == index.planned == 4
    assert {(one.arm, one.point["needles"], one.seed) for one in index.members} == {
        (arm, needles, 0) for arm in ("diff", "twin") for needles in ("one", "two")
    }
    assert read_result(results / "small" / "laptop.json", StudyIndex) == index
    assert index.axes[0].values == ["one", "two"]
    assert index.axes[0].numbers is None  # only one of them has a number
    for member in index.members:
        record = read_result(results / "small" / member.file, RunRecord)
        (folder,) = (tmp_path / "out" / "runs").glob(f"{member.arm}-seed0-{identity_of(record)[:10]}")
        steps, validations = read_metrics(folder / "metrics.jsonl")
        assert record.curves["train_loss_nats"].values == pytest.approx([line.loss_nats for line in steps], rel=1e-5)
        assert record.curves["validation_accuracy"].steps == [2, 4]
        last = validations[-1].validation_loss_nats
        assert record.curves["validation_loss_nats"].values[-1] == pytest.approx(last, rel=1e-5)
        assert ("lambda 0" in record.curves) == (member.arm == "diff")
        evaluated = json.loads((folder / "evals" / "step-000004" / "perplexity.json").read_text())["result"]
        nll = next(row["value"] for row in evaluated["measurements"] if row["name"] == "nll")
        assert next(one.value for one in record.figures if one.name == "nll") == nll
        assert record.train_tokens == STEPS * 256
        assert record.environment.threads >= 1

    trained.clear()
    again = Study(design(), results).train(tmp_path / "elsewhere", at_once=1)  # the runs' folders are not needed
    assert (trained, again.members) == ([], index.members)

    document["name"] = "other"
    document["axes"] = {}  # two needles is what the recipe has
    shared = Study(design(), results).train(tmp_path / "out", at_once=1)
    assert trained == []
    assert {one.file.split("/")[:2][0] for one in shared.members} == {".."}
    assert read_result(results / "other" / shared.members[0].file, RunRecord)

    Study(design(seeds=2), results).train(tmp_path / "out", at_once=1)
    assert trained == ["DIFF, seed 1", "Transformer, seed 1"]


def test_runs_share_within_the_study_alone(document, design, trained, tmp_path, monkeypatch):
    """Neither with a folder beside theirs, nor with a run by other code, whose commit a record would not name."""
    wsd = {"shape": "wsd", "warmup_steps": 1, "decay_steps": 1, "floor": 0.0}
    document["presets"]["laptop"]["set"] = {"training.checkpoint_every": 1, "training.keep_checkpoints": 9}
    document["presets"]["laptop"]["set"] |= {f"training.schedule.{key}": value for key, value in wsd.items()}
    document["axes"] = {"steps": {"values": {str(steps): {"set": {"training.steps": steps}} for steps in (3, 4)}}}

    build.load()  # as the command does
    copied, copy = [], run_module._copy_folder
    monkeypatch.setattr(run_module, "_copy_folder", lambda source, to: (copied.append((source, to)), copy(source, to)))
    Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1)
    assert [source.name for source, _ in copied] == ["step-000002"] * 2
    for source, to in copied:
        assert (source.parents[1] / "began").read_text() == (to.parents[1] / "began").read_text()
        assert source.parents[2] == to.parents[2] == tmp_path / "out" / "runs"
    whole = {path.parents[1].name: path for path in (tmp_path / "out").glob("runs/*/checkpoints/step-000004")}
    copied.clear()

    for path in (tmp_path / "results").glob("small/runs/*-steps3-*.json"):  # the shorter runs
        record = json.loads(path.read_text())
        del record["sha256"]
        record["result"]["environment"]["commit"] = "another"
        path.write_text(json.dumps(record))
    for path in (tmp_path / "results").glob("small/runs/*-steps4-*.json"):
        path.unlink()
    for name in whole:
        shutil.move(tmp_path / "out/runs" / name, tmp_path / name)
    Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1)
    assert copied == []

    document["axes"]["steps"]["values"].pop("3")
    shutil.copytree(source.parents[1], tmp_path / "foreign" / "runs" / "beside")
    Study(design(), tmp_path / "others").train(tmp_path / "foreign", at_once=1)
    assert copied == []
    for name, path in whole.items():  # where it began is nowhere to be seen
        weights = (tmp_path / name / "checkpoints" / path.name / "model.safetensors").read_bytes()
        assert (path / "model.safetensors").read_bytes() == weights


def identity_of(record):
    return identity(recipe_from(record.recipe, source="record"))


def test_which_records_are_used(design, trained, tmp_path, document, caplog):
    """Those of an earlier release, and those of another machine if it has a whole seed; none that is changed or cut."""
    document["axes"] = {}
    results = tmp_path / "results"
    study = Study(design(), results)
    index = study.train(tmp_path / "out", at_once=1)
    trained.clear()
    path = results / "small" / index.members[0].file
    old = json.loads(path.read_text())
    del old["sha256"], old["result"]["recipe"]["training"]["z_loss"]  # as a release without this option wrote it
    path.write_text(json.dumps(old))
    assert None not in Study(design(), results).files(study.design.reported())

    old["result"]["recipe"]["training"]["steps"] = 5
    path.write_text(json.dumps(old))
    assert Study(design(), results).files(study.design.reported())[0] is None

    path.write_text(path.read_text()[:-50])
    Study(design(), results).train(tmp_path / "out", at_once=1)
    assert [line for line in caplog.messages if path.name in line and "is not used" in line]
    assert trained == []  # the run's folder still has everything
    assert read_result(path, RunRecord)

    def move(member, data):
        path = results / "small" / member.file
        changed = json.loads(path.read_text())
        del changed["sha256"]
        changed["result"]["data_sha256"] = data
        path.write_text(json.dumps(changed))

    move(index.members[0], "another machine's")
    study = Study(design(), results)
    assert [file is None for file in study.files(study.design.reported())] == [True, False]
    move(index.members[1], "another machine's")
    study = Study(design(), results)
    assert None not in study.files(study.design.reported())


def test_a_record_made_again_says_when_the_run_began(design, trained, tmp_path, document):
    document["axes"] = {}
    Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1)
    (folder, _) = sorted((tmp_path / "out" / "runs").iterdir())
    (folder / "began").write_text("2026-01-02T03:04:05+00:00")
    index = Study(design(), tmp_path / "others").train(tmp_path / "out", at_once=1)
    assert len(trained) == 2  # nothing was trained again
    record, other = (read_result(tmp_path / "others" / "small" / one.file, RunRecord) for one in index.members)
    assert record.start == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert other.began
    assert datetime.fromisoformat(other.began) <= datetime.fromisoformat(other.created)


def test_when_a_run_began_elsewhere_is_unknown(design, trained, tmp_path, document):
    """Such as in a folder of an earlier version."""
    document["axes"] = {}
    document["presets"]["laptop"]["set"] = {"training.checkpoint_every": 2}
    study = Study(design(), tmp_path / "results")
    study.train(tmp_path / "out", at_once=1)
    run = study.design.reported()[0]
    folder = study.store.run_folder(run, tmp_path / "out")
    assert (folder / "began").exists()
    (folder / "began").unlink()
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:06d}")
    with threads(1):
        assert run_main([str(folder), "1", "cpu", *map(str, study.prepared(run).shards.folders)]) == 0
    assert (folder / "checkpoints" / f"step-{STEPS:06d}").exists()
    assert not (folder / "began").exists()


def test_rates_are_kept_where_the_data_are_others(design, trained, tmp_path, document, monkeypatch):
    """A machine with other text goes on with the rates that were chosen, and tunes the arms that have none."""
    document["axes"] = {}
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [1.0e-3, 1.0e-2], "seeds": 1}
    results = tmp_path / "results"
    study = Study(design(), results)
    study._train([run for run in study.design.tuning if run.arm == "twin"], tmp_path / "out", 1, "cpu")
    assert {rate.arm for rate in study.rates()} == {"twin"}
    monkeypatch.setattr(Study, "_data_sha256", lambda self, shards: "of another machine")
    elsewhere = Study(design(), results)
    assert {rate.arm for rate in elsewhere.rates()} == {"twin"}
    trained.clear()
    elsewhere.train(tmp_path / "elsewhere", at_once=1)
    assert [title for title in trained if "learning rate" in title and title.startswith("Transformer")] == []
    assert {rate.arm for rate in elsewhere.rates()} == {"diff", "twin"}


def test_a_recipe_chooses_the_dtype_of_evaluations(document, design, trained, tmp_path):
    document["axes"] = {}
    fp32 = {run.identity for run in design().reported()}
    document["presets"]["laptop"]["set"] = {"evaluation_dtype": "bf16"}
    assert fp32.isdisjoint(run.identity for run in design().reported())
    Study(design(), tmp_path / "results").train(tmp_path / "out", at_once=1)
    evaluated = list((tmp_path / "out").glob("runs/*/evals/step-000004/*.json"))
    assert len(evaluated) == 4  # two tasks of two runs
    for path in evaluated:
        assert json.loads(path.read_text())["result"]["model"]["dtype"] == "bfloat16"


def test_the_learning_rate_is_chosen_on_other_seeds(design, trained, tmp_path, document):
    document["axes"]["needles"]["values"] = {"one": {"set": {"training.retrieval.max_needles": 1}}, "two": {}}
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [1.0e-7, 5.0e-3, 1.0e-6], "seeds": 2}
    study = Study(design(), tmp_path / "results")
    assert {run.seed for run in study.design.tuning} == {1000, 1001}
    assert {run.point["needles"] for run in study.design.tuning} == {"one"}
    assert len(study.design.tuning) == 2 * 2 * 3
    assert study.rates() == []
    assert study.planned() == 12 + 4
    index = study.train(tmp_path / "out", at_once=1)
    assert index.planned == len(index.members) == 12 + 4
    assert {rate.arm: rate.learning_rate for rate in index.rates} == {"diff": 5e-3, "twin": 5e-3}
    for rate in index.rates:
        files = [m.file for m in index.members if m.is_tuning and m.arm == rate.arm]
        records = [read_result(study.index_file.parent / file, RunRecord) for file in files]
        for learning_rate, mean in rate.tried:
            values = [
                next(one.value for one in record.figures if one.name == "nll")
                for record in records
                if record.recipe["training"]["optimizer"]["learning_rate"] == learning_rate
            ]
            assert len(values) == 2
            assert mean == pytest.approx(sum(values) / 2)
    reported = [read_result(study.index_file.parent / m.file, RunRecord) for m in index.members if not m.is_tuning]
    assert {record.recipe["training"]["optimizer"]["learning_rate"] for record in reported} == {5e-3}
    # Every run has this loss at its first step, so the figure behind decides.
    tied = {"label": "steps", "curve": "validation_loss_nats", "reaches": 1e3, "unit": "steps"}
    document["figures"] = [tied, *document["figures"]]
    rates = Study(design(), tmp_path / "results").rates()
    assert all(len({mean for _, mean in rate.tried}) == 1 for rate in rates)
    assert {rate.arm: rate.learning_rate for rate in rates} == {"diff": 5e-3, "twin": 5e-3}


@pytest.mark.slow
def test_further_rates_are_tried_where_the_best_lies_at_the_edge(design, trained, tmp_path, document):
    """Of rates so small that nothing is learned, the larger one is better, so a next one follows, as often as allowed."""
    document["axes"] = {}
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [1.0e-7, 1.0e-6], "seeds": 1, "extensions": 2}
    study = Study(design(), tmp_path / "results")
    index = study.train(tmp_path / "out", at_once=1)
    tried = {rate.arm: [tried for tried, _ in rate.tried] for rate in index.rates}
    assert tried == {arm: [pytest.approx(10.0**power) for power in (-7, -6, -5, -4)] for arm in ("diff", "twin")}
    assert index.planned == len(index.members) == 2 * 4 + 2
    assert sum("learning rate" in title for title in trained) == 8
    reported = [read_result(study.index_file.parent / m.file, RunRecord) for m in index.members if not m.is_tuning]
    assert {record.recipe["training"]["optimizer"]["learning_rate"] for record in reported} == {1e-4}
    document["presets"]["laptop"]["tuning"]["extensions"] = 0
    assert [rate.learning_rate for rate in Study(design(), tmp_path / "results").rates()] == [1e-6, 1e-6]
    # With a best rate inside, nothing is added.
    document["presets"]["laptop"]["tuning"] = {
        "learning_rates": [1.0e-7, 5.0e-3, DIVERGING],
        "seeds": 1,
        "extensions": 2,
    }
    inside = Study(design(), tmp_path / "inside")
    inside.train(tmp_path / "inside-out", at_once=1)
    assert [len(rate.tried) for rate in inside.rates()] == [3, 3]


DIVERGING = 1e30


def page_of(study, folder):
    return write_page(study_page(analyse(read_records(study.index_file))), folder / "page")


@pytest.mark.slow
def test_a_rate_at_which_a_run_diverges_is_not_chosen(design, trained, tmp_path, document, caplog):
    document["axes"] = {}
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [1.0e-3, DIVERGING], "seeds": 1}
    study = Study(design(), tmp_path / "results")
    index = study.train(tmp_path / "out", at_once=1)
    assert index.planned == len(index.members) == 4 + 2
    for rate in index.rates:
        means = dict(rate.tried)
        assert (rate.learning_rate, means[DIVERGING]) == (1e-3, None)
        assert means[1e-3] > 0
    assert "DIFF, learning rate 1e+30, seed 1000 diverged after step" in caplog.text
    lines = (page_of(study, tmp_path).parent / "tables" / "rates.md").read_text().splitlines()
    header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    shown = [(row[header.index("chosen rate")].split()[0], row[header.index("1e+30")]) for row in rows[:2]]
    assert shown == [("0.001", "diverged")] * 2
    trained.clear()
    Study(design(), tmp_path / "results").train(tmp_path / "elsewhere", at_once=1)
    assert trained == []
    document["presets"]["laptop"]["tuning"]["learning_rates"] = [DIVERGING]
    with pytest.raises(EvaluationError, match=r"a run diverged at each of the learning rates 1e\+30; add lower ones"):
        Study(design(), tmp_path / "results").rates()


def test_a_study_goes_on_after_a_run_that_diverges(design, trained, tmp_path, document):
    document["axes"] = {}
    document["presets"]["laptop"]["seeds"] = 2
    document["arms"]["diff"]["set"]["training.optimizer.learning_rate"] = DIVERGING
    study = Study(design(), tmp_path / "results")
    index = study.train(tmp_path / "out", at_once=1)
    assert len(trained) == index.planned == len(index.members) == 4
    records = {m.arm: read_result(study.index_file.parent / m.file, RunRecord) for m in index.members}
    assert records["twin"].diverged_after is None
    assert 0 < records["diff"].diverged_after < STEPS
    assert [one.name for one in records["diff"].figures] == ["gradient spikes", "largest gradient norm"]
    after = records["diff"].diverged_after
    page = page_of(study, tmp_path)
    runs = (page.parent / "tables" / "runs.md").read_text().splitlines()
    assert [line.split("|")[3] for line in runs[2:4]] == [f" diverged after step {after} "] * 2
    assert page.read_text().count(f"diverged after step {after}") >= 2


def test_a_preset_has_a_recipe_and_values_of_its_own(design, document, toy, tmp_path):
    toy["training"]["steps"] = 9
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(toy))
    document["about"] = "Needles."
    document["presets"]["gpu"] = {
        "about": "Nine steps.", "recipe": "large.yaml", "set": {"model.num_attention_heads": 8},
        "arm_set": {"twin": {"model.num_attention_heads": 2}},
    }  # fmt: skip
    large = design("gpu")
    assert (design().about, large.about) == ("Needles.", "Needles. Nine steps.")
    for run in large.reported():
        assert run.recipe.training.steps == 9
        assert run.recipe.model["num_attention_heads"] == {"diff": 8, "twin": 2}[run.arm]
    assert {run.recipe.training.steps for run in design().reported()} == {STEPS}


def test_learning_rates_per_axis(design, document):
    document["axes"]["steps"] = {"values": {number: {"set": {"training.steps": int(number)}} for number in ("4", "8")}}
    document["presets"]["laptop"]["tuning"] = {"learning_rates": [1.0e-3, 1.0e-2], "seeds": 1, "per": ["needles"]}
    tuned = design()
    points = [{"needles": "one", "steps": "4"}, {"needles": "two", "steps": "4"}]
    assert tuned.tuned_points == points
    assert len(tuned.tuning) == 2 * 2 * 2
    chosen = [
        ChosenRate(arm="diff", point=point, learning_rate=rate, tried=[(rate, 1.0)])
        for point, rate in zip(points, (1e-2, 1e-3), strict=True)
    ]
    runs = tuned.reported(chosen)
    assert {run.arm for run in runs} == {"diff"}  # the other arm's rates are not known yet
    for run in runs:
        assert run.recipe.training.optimizer.learning_rate == {"one": 1e-2, "two": 1e-3}[run.point["needles"]]
    assert {run.arm for run in tuned.reported()} == {"diff", "twin"}


@pytest.mark.slow
def test_arms_of_several_machines_make_one_study(design, trained, tmp_path, document, fails):
    document["axes"] = {}
    words = ["study", str(tmp_path / "study.yaml"), "--results", str(tmp_path / "results"), "--out"]
    design()
    for arm in ("twin", "diff"):
        assert main([*words, str(tmp_path / arm), "--only", arm]) == 0
        assert {path.name.partition("-")[0] for path in (tmp_path / arm / "runs").iterdir()} == {arm}
    assert len(trained) == 2
    assert main([*words, str(tmp_path / "page")]) == 0
    assert len(trained) == 2  # all records were there
    assert (tmp_path / "page" / "laptop" / "index.html").exists()
    assert "--only tiwn: unknown key; did you mean twin?" in fails(*words, "x", "--only", "tiwn")


def test_jobs_weigh_as_much_as_their_flops(design, trained, tmp_path, document):
    document["arms"] = {number: {"set": {"training.steps": int(number)}} for number in ("4", "8")}
    document |= {"axes": {}, "reference": "4"}
    seen = []
    study = Study(design(seeds=1), tmp_path / "results")
    with watched_by(lambda jobs: seen.append([job.flops for job in jobs])):
        study.train(tmp_path / "out", at_once=torch.get_num_threads())
    ((short, long),) = {tuple(flops) for flops in seen}
    assert long == 2 * short > 0


def test_the_command(design, trained, tmp_path, document, monkeypatch, capsys, fails):
    monkeypatch.chdir(tmp_path)
    document["axes"] = {}
    design()
    with monkeypatch.context() as unprepared:
        unprepared.setattr("difftransformer_lab.studies.study.prepare_shards", lambda data: pytest.fail("prepared"))
        assert main(["study", "study.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "2 runs, 0 are there, 2 to train" in out
    assert "of the differences by seed: none with 1 seed" in out
    assert main(["study", "study.yaml", "--dry-run", "--seeds", "5"]) == 0
    out = capsys.readouterr().out
    assert f"{detectable(5):.1f} with 5 seeds" in out
    assert "10 runs, 0 are there, 10 to train\n  diff: 5 reported\n  twin: 5 reported\n" in out
    assert main(["study", "study.yaml", "--dry-run", "--seeds", "5", "--only", "twin"]) == 0
    assert "5 runs, 0 are there, 5 to train\n  twin: 5 reported\n" in capsys.readouterr().out
    missing = f"data.source={tmp_path / 'missing'}"
    assert main(["study", "study.yaml", "--dry-run", "--set", missing]) == 0
    assert "2 runs, 0 are there, 2 to train" in capsys.readouterr().out
    assert not (tmp_path / "docs").exists()
    assert main(["study", "study.yaml", "--set", "training.steps=2"]) == 0
    out = capsys.readouterr().out
    assert "Report: reports/studies/small/laptop/index.html" in out
    page = (tmp_path / "reports/studies/small/laptop/index.html").read_text("utf-8")
    assert "difftransformer study study.yaml --preset laptop" in page
    record = read_result(next((tmp_path / "reports/studies/small/runs").glob("diff-seed0-*.json")), RunRecord)
    assert record.recipe["training"]["steps"] == 2
    assert str(tmp_path) not in json.dumps(record.recipe["data"].get("folder", ""))
    next((tmp_path / "reports/studies/small/runs").glob("twin-*.json")).unlink()
    with monkeypatch.context() as gone:
        gone.setattr("difftransformer_lab.studies.study.prepare_shards", Mock(side_effect=DataError("no text")))
        assert main(["study", "study.yaml", "--set", "training.steps=2", "--dry-run"]) == 0
    assert "2 runs; none could be looked up: no text" in capsys.readouterr().out
    assert main(["study", "study.yaml", "--only", "twin", "--set", "training.steps=1"]) == 0
    before = "difftransformer study study.yaml --preset laptop --set training.steps=2"
    assert f"small/laptop.json: replaces the index of {before}, whose runs stay" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "reports")
    assert "--preset huge: small has laptop" in fails("study", "study.yaml", "--preset", "huge")
    assert "no such file" in fails("study", "nowhere")


def test_arms_that_start_from_a_pretrained_model(document, design, trained, tmp_path, toy):
    source = tmp_path / "pretrained"
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    model.save_pretrained(source)
    byte_tokenizer().save(source)
    toy["training"] |= {"steps": 2, "checkpoint_every": 2, "context_stages": [[0, 64]], "retrieval": None}
    toy["evaluation"] = toy["evaluation"][:1]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(toy))
    document |= {
        "source": "pretrained", "axes": {}, "reference": "plain",
        "arms": {"diff": {"upcycle": "diff"}, "plain": {"upcycle": "softmax"}},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--source None: the study small starts from pretrained"):
        Study(design(), tmp_path / "results")
    study = Study(design(), tmp_path / "results", source=str(source), models=tmp_path / "models")
    changes = [f"data.source={tmp_path / 'missing'}"]
    lacking = Study(design(changes=changes), tmp_path / "results", source=str(source), models=tmp_path / "models")
    with pytest.raises(DataError, match="missing"):
        lacking.prepared(lacking.design.reported()[0])
    index = study.train(tmp_path / "out", at_once=1)
    assert len(trained) == len(index.members) == 2
    assert index.command == "difftransformer study small --preset laptop --source pretrained"
    records = {m.arm: read_result(study.index_file.parent / m.file, RunRecord) for m in index.members}
    assert records["diff"].parameters > records["plain"].parameters
    first = {arm: record.curves["train_loss_nats"].values[0] for arm, record in records.items()}
    assert first["diff"] == pytest.approx(first["plain"], rel=1e-4)  # both start with the function of the source
    assert str(tmp_path) not in json.dumps(records["diff"].recipe | {"data": None})
    again = Study(design(), tmp_path / "results", source=str(source), models=tmp_path / "elsewhere")
    assert None not in again.files(again.design.reported())
    with torch.no_grad():
        model.lm_head.weight += 1
    model.save_pretrained(source)
    message = (
        r"models/softmax: was made of another model than .*/pretrained, or by an earlier release; choose another --out"
    )
    with pytest.raises(ConfigError, match=message):
        Study(design(), tmp_path / "results", source=str(source), models=tmp_path / "models").train(
            tmp_path / "out", at_once=1
        )
    assert len(trained) == 2
    other = Study(design(), tmp_path / "results", source=str(source), models=tmp_path / "others")
    assert other.prepared(other.design.reported()[0]).data_sha256 != records["diff"].data_sha256
    document["arms"]["diff"] = {}
    with pytest.raises(ConfigError, match=r"arms\.diff\.upcycle is ''"):
        design()

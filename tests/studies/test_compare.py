"""The comparison, end to end on a toy: what it writes, what it reuses, what it refuses."""

import copy
import dataclasses
import json
import math
import shutil
import statistics
import subprocess
import sys

import pytest
import yaml

from difftransformer.errors import CheckpointError, ConfigError, DataError, DiffTransformerError
from difftransformer.model import DiffTransformerForCausalLM
from difftransformer.train import checkpoints, read_metrics
from difftransformer_lab.cli.main import main
from difftransformer_lab.report import write_report
from difftransformer_lab.report.metrics import compare_metrics
from difftransformer_lab.results import Comparison, TaskResult, read_result
from difftransformer_lab.studies import compare, recipe_from, start_run
from difftransformer_lab.studies.jobs import Job, run_jobs
from difftransformer_lab.studies.run import main as run_main
from tests.support.cases import threads
from tests.support.missing import without

STEPS = 4


@pytest.fixture(scope="session")
def _study(tmp_path_factory):
    return tmp_path_factory.mktemp("study") / "toy"


@pytest.fixture
def study_document(toy):
    toy["training"] |= {"steps": STEPS, "checkpoint_every": 2, "context_stages": [[0, 64]]}
    toy["evaluation"][1]["options"]["lengths"] = [96]
    toy["evaluation"][2]["options"]["length"] = 96
    toy["compare"] = {"seeds": 2, "jobs": 2}
    return toy


def run_here(jobs, **options):
    """Run jobs in this process, which takes less than to load torch in processes of their own."""
    with threads(1):
        assert all(run_main([str(job.folder), "1", "cpu"]) == 0 for job in jobs if not job.done)


@pytest.fixture
def study(_study, study_document, tmp_path, warm_children):
    """The command's whole output for two models and two seeds, made once, and a recipe file to run it again.

    The first seed runs as the command runs it, in a process for each model, the other in this process.
    """
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(study_document))
    if not _study.exists():

        def half_here(jobs, **options):
            run_jobs([job for job in jobs if job.folder.name.endswith("-seed0")], **options)
            run_here([job for job in jobs if job.folder.name.endswith("-seed1")])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("difftransformer_lab.studies.comparison.run_jobs", half_here)
            assert main(["compare", str(path), "--out", str(_study)]) == 0
    return _study, path


@pytest.fixture
def copied(study, tmp_path):
    """A copy that may be damaged."""
    folder, path = study
    shutil.copytree(folder, tmp_path / "study")
    return tmp_path / "study", path


@pytest.fixture
def comparison(study):
    return read_result(study[0] / "results.json", Comparison)


def test_what_it_writes(study, comparison):
    folder, _ = study
    assert "<html" in (folder / "index.html").read_text().lower()
    assert [(run.model, run.seed) for run in comparison.runs] == [
        ("diff", 0), ("diff", 1), ("softmax", 0), ("softmax", 1)
    ]  # fmt: skip
    assert comparison.seeds == [0, 1]
    assert [model.attention_type for model in comparison.models] == ["diff", "softmax"]
    assert [baseline.name for baseline in comparison.baselines] == ["byte bigram"]
    assert comparison.recipe["training"]["steps"] == STEPS
    for run in comparison.runs:
        steps, validations = read_metrics(folder / run.run / "metrics.jsonl")
        assert run.train_loss_nats.values == [line.loss_nats for line in steps]
        assert run.train_loss_nats.steps == list(range(1, STEPS + 1))
        assert run.validation_loss_nats.values == [line.validation_loss_nats for line in validations]
        assert run.train_tokens == STEPS * 256
        assert len(run.lambda_values) == (STEPS if run.model == "diff" else 0)
        assert list(run.evaluations) == ["perplexity", "needle", "allocation"]
        for name, result in run.evaluations.items():
            assert read_result(folder / run.run / "evals" / "step-000004" / f"{name}.json", TaskResult) == result


def test_sizes_are_those_of_the_models(study, comparison):
    folder, _ = study
    for summary, cost in zip(comparison.models, comparison.costs, strict=False):
        newest = checkpoints(folder / "runs" / f"{summary.model}-seed0")[-1]
        model = DiffTransformerForCausalLM.from_pretrained(newest)
        assert summary.parameters == cost.parameters == sum(p.numel() for p in model.parameters())
    one, two = (model.parameters for model in comparison.models)
    assert abs(one - two) <= 2 * 6 * 8  # 6 head_dim a layer


def test_costs_are_measured_for_both_and_computed_for_the_smaller(comparison):
    diff, softmax, smaller = comparison.costs
    for row in (diff, softmax):
        assert 0 < row.train_step_seconds < 60
        assert row.prefill_tokens_per_second > 0
        assert row.decode_tokens_per_second > 0
        # Two moments, gradients and weights in fp32 at least.
        assert row.peak_training_bytes > 8 * row.parameters
    assert softmax.parameters == comparison.models[1].parameters
    # By hand: 2 layers, each token keeps a key and a value of width 32 in bf16.
    kv = 2 * 2 * 32 * 2
    assert comparison.models[0].kv_bytes_per_token == comparison.models[1].kv_bytes_per_token == kv
    assert softmax.weights_and_kv_bytes_4k == 2 * softmax.parameters + 4096 * kv
    assert softmax.weights_and_kv_bytes_64k == 2 * softmax.parameters + 65536 * kv
    # 62 % of the twin's parameters: width and depth both shrink by the cube root, keys and values go with their product.
    shrink = 0.62 ** (1 / 3)
    assert smaller.parameters == round(0.62 * softmax.parameters)
    for length, found in ((4096, smaller.weights_and_kv_bytes_4k), (65536, smaller.weights_and_kv_bytes_64k)):
        expected = 2 * 0.62 * softmax.parameters + length * 2 * (2 * shrink) * (32 * shrink) * 2
        assert found == pytest.approx(expected, rel=1e-4)
    assert smaller.train_step_seconds is smaller.prefill_tokens_per_second is smaller.peak_training_bytes is None
    assert "62%" in smaller.label
    assert "formula" in smaller.label


def figure(run, task, name, **at):
    """A figure of a run's evaluation, where it covers all of the data but `at`."""
    rows = run.evaluations[task].measurements
    (row,) = [row for row in rows if row.name == name and row.at == at and not row.detail]
    return row.value


VALUES = {
    ("validation loss", "bits/byte"): lambda run: figure(run, "perplexity", "bits per byte"),
    ("validation loss", "nats/token"): lambda run: figure(run, "perplexity", "nll"),
    ("needle accuracy (seen cities)", "share"): lambda run: figure(run, "needle", "accuracy", cities="seen"),
    ("needle accuracy (unseen cities)", "share"): lambda run: figure(run, "needle", "accuracy", cities="unseen"),
    ("nll of the answer (seen cities)", "nats"): lambda run: figure(run, "needle", "nll of the answer", cities="seen"),
    ("nll of the answer (unseen cities)", "nats"): lambda run: figure(
        run, "needle", "nll of the answer", cities="unseen"
    ),
} | {
    (f"{form} attention on the answer", "share"): lambda run, form=form: figure(
        run, "allocation", f"{form} attention on the answer"
    )
    for form in ("signed", "absolute", "positive")
}


def test_statistics_are_those_of_the_runs(comparison):
    assert {(row.metric, row.unit) for row in comparison.metrics} == set(VALUES)
    for row in comparison.metrics:
        found = {
            model: [VALUES[row.metric, row.unit](run) for run in comparison.runs if run.model == model]
            for model in ("diff", "softmax")
        }
        assert row.better == ("lower" if row.unit != "share" else "higher")
        for model, numbers in found.items():
            assert row.models[model].mean == pytest.approx(sum(numbers) / 2)
            assert row.models[model].standard_error == pytest.approx(statistics.stdev(numbers) / math.sqrt(2))
            assert row.models[model].seeds == 2
        differences = [a - b for a, b in zip(found["diff"], found["softmax"], strict=True)]
        difference = row.differences["diff"]
        assert difference.mean == pytest.approx(sum(differences) / 2)
        if differences[0] == differences[1]:
            assert (difference.interval_method, difference.low, difference.high) == ("none", None, None)
            continue
        assert difference.interval_method == "student-t over seeds"
        # Student's t with one degree of freedom, 97.5 %: 12.7062 (any table).
        half = 12.7062 * statistics.stdev(differences) / math.sqrt(2)
        assert difference.high - difference.mean == pytest.approx(half, rel=1e-4, abs=1e-12)
    losses = [row for row in comparison.metrics if row.unit != "share"]
    assert all(row.differences["diff"].low is not None for row in losses)


def test_one_seed_gives_an_interval_over_items_for_losses_and_none_for_retrieval(comparison):
    rows = compare_metrics([run for run in comparison.runs if run.seed == 0], ["diff", "softmax"])
    for row in rows:
        assert row.models["diff"].standard_error is None
        difference = row.differences["diff"]
        if row.task == "perplexity":
            assert difference.interval_method == "studentised over items"
            assert difference.low <= difference.mean <= difference.high
        if row.task == "needle":
            assert difference.interval_method == "none"
            assert difference.low is difference.high is None
    loss = next(row for row in rows if row.unit == "nats/token")
    diff, softmax = (next(r for r in comparison.runs if (r.model, r.seed) == (m, 0)) for m in ("diff", "softmax"))
    expected = figure(diff, "perplexity", "nll") - figure(softmax, "perplexity", "nll")
    assert loss.differences["diff"].mean == pytest.approx(expected)


def test_a_metric_that_a_run_lacks_has_no_row(comparison):
    runs = [
        dataclasses.replace(
            run, evaluations={name: run.evaluations[name] for name in ("perplexity", "needle")[: 2 - i]}
        )
        for i, run in enumerate(comparison.runs[:2])
    ] + comparison.runs[2:]
    assert {row.unit for row in compare_metrics(runs, ["diff", "softmax"])} == {"bits/byte", "nats/token"}


@pytest.fixture
def no_costs(monkeypatch, comparison):
    """Costs take time, and are not what is looked at."""
    monkeypatch.setattr(
        "difftransformer_lab.studies.comparison.measure_costs", lambda *args, **options: comparison.costs
    )


@pytest.fixture
def no_jobs(monkeypatch):
    """Fail if a job would be run."""

    def refuse(jobs, **options):
        assert [job.label for job in jobs if not job.done] == []

    monkeypatch.setattr("difftransformer_lab.studies.comparison.run_jobs", refuse)


def measured(run):
    """A run without the time and the number of threads of its evaluations."""
    return run.run, {name: (result.measurements, result.items) for name, result in run.evaluations.items()}


def times(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}


def test_a_second_run_reuses_everything(study, study_document, comparison, no_costs, no_jobs):
    folder, path = study
    before = times(folder)
    assert main(["compare", str(path), "--out", str(folder)]) == 0
    assert times(folder) == before
    again = read_result(folder / "results.json", Comparison)
    assert again.runs == comparison.runs
    assert again.metrics == comparison.metrics


def test_other_jobs_and_an_own_name_reuse_everything_too(copied, study_document, no_costs, no_jobs):
    folder, _ = copied
    study_document["compare"]["jobs"] = 1
    study_document["name"] = "another"
    result = compare(recipe_from(study_document, source="toy"), folder)
    assert result.name == "another"


def test_only_what_is_missing_or_damaged_is_done_again(
    copied, study_document, comparison, monkeypatch, no_costs, capsys
):
    """An evaluation that is gone, or not as it was written, is made again from the checkpoint, equal to the first."""
    folder, path = copied
    changed = folder / "runs" / "diff-seed1" / "evals" / "step-000004" / "allocation.json"
    content = changed.read_text()
    place = content.index('"value": 0.') + len('"value": 0.')
    changed.write_text(content[:place] + str((int(content[place]) + 1) % 10) + content[place + 1 :])
    (folder / "runs" / "diff-seed0" / "evals" / "step-000004" / "needle.json").unlink()
    (folder / "runs" / "softmax-seed1" / "evals" / "step-000004" / "perplexity.json").write_text('{"kind": "task')
    before = times(folder)
    waiting = []

    def in_this_process(jobs, **options):
        waiting.extend(job.folder.name for job in jobs if not job.done)
        run_here(jobs)

    monkeypatch.setattr("difftransformer_lab.studies.comparison.run_jobs", in_this_process)
    assert main(["compare", str(path), "--out", str(folder)]) == 0
    assert sorted(waiting) == ["diff-seed0", "diff-seed1", "softmax-seed1"]
    assert f"{changed}: not a results file, or changed since it was written" in capsys.readouterr().out
    again = {"needle.json", "perplexity.json", "allocation.json"}
    assert {p: t for p, t in times(folder).items() if p.name not in again} == {
        p: t for p, t in before.items() if p.name not in again
    }
    assert [measured(run) for run in read_result(folder / "results.json", Comparison).runs] == [
        measured(run) for run in comparison.runs
    ]


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("training", {"steps": 5}, "training.steps was 4 and is now 5"),
        (
            "training",
            {"optimizer": {"learning_rate": 0.1}},
            "training.optimizer.learning_rate was 0.002 and is now 0.1",
        ),
        ("model", {"num_hidden_layers": 1}, "model.num_hidden_layers was 2 and is now 1"),
        ("data", {"vocab_size": 390}, "data.vocab_size was 400 and is now 390"),
    ],
)
def test_another_recipe_in_the_same_folder_is_refused(copied, study_document, no_jobs, capsys, part, change, words):
    folder, path = copied
    study_document[part] |= change
    path.write_text(yaml.safe_dump(study_document))
    before = times(folder)
    assert main(["compare", str(path), "--out", str(folder)]) == 2
    message = capsys.readouterr().err.strip()
    assert words in message
    assert "\n" not in message
    assert times(folder) == before


def test_a_folder_without_a_checkpoint_takes_the_corrected_recipe(tmp_path, toy_recipe):
    """A first attempt that failed before it saved anything does not stand in the way of the second."""
    start_run(tmp_path, toy_recipe)
    start_run(tmp_path, toy_recipe.with_seed(5))
    assert "seed: 5" in (tmp_path / "config.yaml").read_text()


def test_a_run_that_fails_says_why_and_the_others_are_stopped(copied, study_document, capsys):
    folder, path = copied
    broken = checkpoints(folder / "runs" / "softmax-seed0")[-1]
    (broken / "model.safetensors").write_bytes(b"cut")
    shutil.rmtree(folder / "runs" / "softmax-seed0" / "evals")
    assert main(["compare", str(path), "--out", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Transformer, seed 0: " in error
    assert f"{broken / 'model.safetensors'}: damaged" in error
    assert "step-000002, which is kept" in error
    assert "log.txt" in error


@pytest.mark.parametrize(
    ("part", "change", "error", "words"),
    [
        ("needle", {"lengths": [30]}, DataError, "longer than the context"),
        ("allocation", {"length": 20}, DataError, "longer than the context"),
        ("perplexity", {"window": 10**7}, DataError, "tokens, and 10000001 are needed"),
        ("compare", {"models": ["diff", "dif"]}, ConfigError, "attention_type='dif'"),
        ("training", {"batch_tokens": 2**17, "context_stages": [[0, 2**17]]}, DataError, "split has"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_training(
    tmp_path, study_document, monkeypatch, part, change, error, words
):
    monkeypatch.setattr(
        "difftransformer_lab.studies.comparison.run_jobs", lambda *args, **options: pytest.fail("trained")
    )
    tasks = {spec["task"]: spec["options"] for spec in study_document["evaluation"]}
    (tasks | study_document)[part].update(change)
    with pytest.raises(error, match=words):
        compare(recipe_from(study_document, source="toy"), tmp_path)


def test_results_say_how_they_were_asked_for(study, comparison):
    document = json.loads((study[0] / "results.json").read_text())
    assert document["kind"] == "comparison"
    assert comparison.command.split()[0] == "difftransformer"
    assert comparison.environment.threads >= 1


def test_a_run_that_the_system_kills_says_so(tmp_path, monkeypatch):
    (tmp_path / "log.txt").write_text("a warning\n")
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]

    def start(job):
        job.process = subprocess.Popen(killed, stdin=subprocess.PIPE)

    monkeypatch.setattr(Job, "start", start)
    job = Job(label="DIFF, seed 0", folder=tmp_path, shards=[], steps=5, threads=1, step=3)
    with pytest.raises(
        DiffTransformerError,
        match="DIFF, seed 0: its process was ended by SIGKILL at step 3; if memory ran out, give fewer --jobs",
    ):
        run_jobs([job], at_once=1, progress=lambda jobs: None)


def test_start_run_names_a_nested_difference(copied, study_document):
    folder, _ = copied
    other = copy.deepcopy(study_document)
    other["training"]["retrieval"]["share"] = 0.25
    with pytest.raises(CheckpointError, match=r"training.retrieval.share was 0.5 and is now 0.25"):
        start_run(
            folder / "runs" / "diff-seed0",
            recipe_from(other, source="toy").with_model("diff").with_seed(0),
        )


def test_the_report_is_drawn_again_without_torch(study, tmp_path):
    """In a process where torch and transformers cannot even be imported."""
    code = without("torch", "transformers") + (
        "from difftransformer_lab.cli.main import main\nraise SystemExit(main(sys.argv[1:]))\n"
    )
    words = ["report", str(study[0]), "--out", str(tmp_path / "page")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "DIFF Transformer" in done.stdout
    assert "DIFF Transformer" in (tmp_path / "page" / "index.html").read_text()


def test_any_task_can_be_in_a_study(copied, study_document, no_costs, monkeypatch):
    """The recipe asks for another task of the trained runs: it is asked, shown on the page and compared."""
    folder, _ = copied
    options = {"text": "validation", "window": 64, "windows": 4}
    study_document["evaluation"].append({"task": "recall", "label": "pairs", "options": options})

    monkeypatch.setattr("difftransformer_lab.studies.comparison.run_jobs", run_here)
    result = compare(recipe_from(study_document, source="toy"), folder)
    rows = [row for row in result.metrics if row.task == "pairs"]
    assert [row.metric for row in rows] == ["nll of AR-hits", "nll of others", "validation loss"]
    write_report(result, folder)
    assert (folder / "figures" / "pairs.svg").is_file()
    assert "Associative recall" in (folder / "index.html").read_text()

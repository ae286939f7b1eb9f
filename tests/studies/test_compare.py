"""The comparison, end to end on a toy: what it writes, what it reuses, what it refuses."""

import math
import shutil
import statistics
import subprocess
import sys

import pytest
import yaml

from difftransformer.errors import ConfigError, DataError, DiffTransformerError
from difftransformer.model import DiffTransformerForCausalLM
from difftransformer.train import checkpoints, read_metrics
from difftransformer_lab import plots
from difftransformer_lab.analysis import analyse, read_records
from difftransformer_lab.analysis.compare import row_of
from difftransformer_lab.analysis.page import study_page, write_page
from difftransformer_lab.cli.main import main
from difftransformer_lab.results import TaskResult, read_result
from difftransformer_lab.studies import compare, recipe_from, start_run
from difftransformer_lab.studies.jobs import Job, run_jobs
from difftransformer_lab.studies.run import main as run_main
from tests.support.cases import threads

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


def run_here(jobs, *, on_done, **options):
    """Run jobs in this process, which takes less than to load torch in processes of their own."""
    with threads(1):
        for job in jobs:
            if not job.done:
                assert run_main([str(job.folder), "1", "cpu"]) == 0
                job.done = True
                on_done(job)


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
            run_here([job for job in jobs if job.folder.name.endswith("-seed1")], **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("difftransformer_lab.studies.study.run_jobs", half_here)
            patch.setattr(plots, "_svg", lambda figure: "<svg></svg>")  # other tests draw
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
    return read_records(study[0] / "results.json")


def test_what_it_writes(study, comparison):
    folder, _ = study
    assert "<html" in (folder / "index.html").read_text().lower()
    index = comparison.index
    assert [(arm.name, seed) for arm, _, seed, _ in comparison.every_run()] == [
        ("diff", 0), ("diff", 1), ("softmax", 0), ("softmax", 1)
    ]  # fmt: skip
    assert [size.attention_type for size in index.sizes] == ["diff", "softmax"]
    assert [baseline.name for baseline in index.baselines] == ["byte bigram"]
    assert index.command.startswith("difftransformer")
    for arm, point, seed, run in comparison.every_run():
        place = folder / comparison.files[arm.name, point, seed]
        steps, validations = read_metrics(place.parent / "metrics.jsonl")
        curves = {name: curve.values for name, curve in run.curves.items()}
        assert curves["train_loss_nats"] == pytest.approx([line.loss_nats for line in steps], rel=1e-5)
        assert run.curves["train_loss_nats"].steps == list(range(1, STEPS + 1))
        assert curves["validation_loss_nats"] == pytest.approx(
            [line.validation_loss_nats for line in validations], rel=1e-5
        )
        assert run.train_tokens == STEPS * 256
        assert run.recipe["training"]["steps"] == STEPS
        assert len(curves.get("lambda 1", [])) == (STEPS if arm.name == "diff" else 0)
        assert list(run.evaluations) == ["perplexity", "needle", "allocation"]
        assert run.environment.threads >= 1
        for name, result in run.evaluations.items():
            assert read_result(place.parent / "evals" / "step-000004" / f"{name}.json", TaskResult) == result


def test_sizes_are_those_of_the_models(study, comparison):
    folder, _ = study
    for size, cost in zip(comparison.index.sizes, comparison.index.costs, strict=False):
        newest = checkpoints(folder / "runs" / f"{size.arm}-seed0")[-1]
        model = DiffTransformerForCausalLM.from_pretrained(newest)
        assert size.parameters == cost.parameters == sum(p.numel() for p in model.parameters())
    one, two = (size.parameters for size in comparison.index.sizes)
    assert abs(one - two) <= 2 * 6 * 8  # 6 head_dim a layer


def test_costs_are_measured_for_both_and_computed_for_the_smaller(comparison):
    diff, softmax, smaller = comparison.index.costs
    for row in (diff, softmax):
        assert 0 < row.train_step_seconds < 60
        assert row.prefill_tokens_per_second > 0
        assert row.decode_tokens_per_second > 0
        # Two moments, gradients and weights in fp32 at least.
        assert row.peak_training_bytes > 8 * row.parameters
    # By hand: 2 layers, each token keeps a key and a value of width 32 in bf16.
    kv = 2 * 2 * 32 * 2
    assert [size.kv_bytes_per_token for size in comparison.index.sizes] == [kv, kv]
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


VALUES = {
    "validation loss": ("perplexity", "bits per byte", {}), "validation loss per token": ("perplexity", "nll", {}),
    "needle accuracy (seen cities)": ("needle", "accuracy", {"cities": "seen"}),
    "needle accuracy (unseen cities)": ("needle", "accuracy", {"cities": "unseen"}),
    "nll of the answer (seen cities)": ("needle", "nll of the answer", {"cities": "seen"}),
    "nll of the answer (unseen cities)": ("needle", "nll of the answer", {"cities": "unseen"}),
    "lookup (seen cities, needles 2, asked 1)": ("needle", "lookup", {"cities": "seen", "needles": 2, "asked": 1}),
    "lookup (unseen cities, needles 2, asked 1)": ("needle", "lookup", {"cities": "unseen", "needles": 2, "asked": 1}),
    "signed attention on the answer": ("allocation", "signed attention on the answer", {}),
    "absolute attention on the answer": ("allocation", "absolute attention on the answer", {}),
    "positive attention on the answer": ("allocation", "positive attention on the answer", {}),
}  # fmt: skip


def test_statistics_are_those_of_the_runs(comparison):
    rows = analyse(comparison).rows
    assert {row.figure.label for row in rows} == set(VALUES)
    for label, (task, name, at) in VALUES.items():
        found = {}
        for arm in ("diff", "softmax"):
            every = [run.evaluations[task].measurements for run in comparison.at(arm, ()).values()]
            found[arm] = [
                row.value for rows in every for row in rows if (row.name, row.at, row.detail) == (name, at, False)
            ]
            mine = row_of(rows, label, arm, ())
            assert mine.statistic.mean == pytest.approx(sum(found[arm]) / 2)
            assert mine.statistic.standard_error == pytest.approx(statistics.stdev(found[arm]) / math.sqrt(2))
        diff = row_of(rows, label, "diff", ())
        assert diff.figure.better == ("higher" if diff.figure.unit in ("share", "beyond 1/N") else "lower")
        differences = [a - b for a, b in zip(*found.values(), strict=True)]
        assert diff.difference.mean == pytest.approx(sum(differences) / 2)
        if differences[0] == differences[1]:
            assert (diff.difference.low, diff.difference.high) == (None, None)
        elif diff.figure.unit != "share":
            # Student's t with one degree of freedom, 97.5 %: 12.7062 (any table).
            half = 12.7062 * statistics.stdev(differences) / math.sqrt(2)
            assert diff.difference.high - diff.difference.mean == pytest.approx(half, rel=1e-4, abs=1e-12)


@pytest.fixture
def no_costs(monkeypatch, comparison):
    """Costs take time, and are not what is looked at."""
    monkeypatch.setattr(
        "difftransformer_lab.studies.comparison.measure_costs", lambda *args, **options: comparison.index.costs
    )


@pytest.fixture
def no_jobs(monkeypatch):
    """Fail if a job would be run."""

    def refuse(jobs, **options):
        assert [job.label for job in jobs if not job.done] == []

    monkeypatch.setattr("difftransformer_lab.studies.study.run_jobs", refuse)


def measured(evidence):
    """Runs without the time and the number of threads of their evaluations."""
    return [
        {name: (result.measurements, result.items) for name, result in run.evaluations.items()}
        for *_, run in evidence.every_run()
    ]


def times(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}


def test_a_second_run_reuses_everything(study, copied, study_document, comparison, no_costs, no_jobs):
    """With other jobs and an own name too."""
    folder, _ = study
    before = times(folder)
    compare(recipe_from(study_document, source="toy"), folder)
    assert times(folder) == before
    again = read_records(folder / "results.json")
    assert again.runs == comparison.runs
    assert again.index.figures == comparison.index.figures
    study_document["compare"]["jobs"] = 1
    study_document["name"] = "another"
    assert compare(recipe_from(study_document, source="toy"), copied[0]).name == "another"


@pytest.mark.usefixtures("undrawn")
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
        run_here(jobs, **options)

    monkeypatch.setattr("difftransformer_lab.studies.study.run_jobs", in_this_process)
    assert main(["compare", str(path), "--out", str(folder)]) == 0
    assert sorted(waiting) == ["diff-seed0", "diff-seed1", "softmax-seed1"]
    assert f"{changed}: not a results file, or changed since it was written" in capsys.readouterr().out
    again = {"needle.json", "perplexity.json", "allocation.json", "record.json"}
    old, new = ({p: t for p, t in one.items() if p.name not in again} for one in (before, times(folder)))
    assert new == old
    assert measured(read_records(folder / "results.json")) == measured(comparison)


@pytest.mark.parametrize(("part", "change", "words"), [
    ("training", {"steps": 5}, "training.steps was 4 and is now 5"),
    ("training", {"optimizer": {"learning_rate": 0.1}}, "training.optimizer.learning_rate was 0.002 and is now 0.1", ),
    ("model", {"num_hidden_layers": 1}, "model.num_hidden_layers was 2 and is now 1"),
    ("data", {"vocab_size": 390}, "data.vocab_size was 400 and is now 390"),
])  # fmt: skip
def test_another_recipe_in_the_same_folder_is_refused(copied, study_document, no_jobs, fails, part, change, words):
    folder, path = copied
    study_document[part] |= change
    path.write_text(yaml.safe_dump(study_document))
    before = times(folder)
    assert words in fails("compare", path, "--out", folder)
    assert times(folder) == before


def test_a_folder_without_a_checkpoint_takes_the_corrected_recipe(tmp_path, toy_recipe):
    """A first attempt that failed before it saved anything does not stand in the way of the second."""
    start_run(tmp_path, toy_recipe)
    start_run(tmp_path, toy_recipe.with_seed(5))
    assert "seed: 5" in (tmp_path / "config.yaml").read_text()


def test_a_run_that_fails_says_why_and_the_others_are_stopped(copied, study_document, fails):
    folder, path = copied
    broken = checkpoints(folder / "runs" / "softmax-seed0")[-1]
    (broken / "model.safetensors").write_bytes(b"cut")
    shutil.rmtree(folder / "runs" / "softmax-seed0" / "evals")
    error = fails("compare", path, "--out", folder)
    assert "Transformer, seed 0: " in error
    assert f"{broken / 'model.safetensors'}: damaged" in error
    assert "step-000002, which is kept" in error
    assert "log.txt" in error


@pytest.mark.parametrize(("part", "change", "error", "words"), [
    ("needle", {"lengths": [30]}, DataError, "longer than the context"),
    ("allocation", {"length": 20}, DataError, "longer than the context"),
    ("perplexity", {"window": 10**7}, DataError, "tokens, and 10000001 are needed"),
    ("compare", {"models": ["diff", "dif"]}, ConfigError, "attention_type='dif'"),
    ("training", {"batch_tokens": 2**17, "context_stages": [[0, 2**17]]}, DataError, "split has"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_before_training(
    tmp_path, study_document, monkeypatch, part, change, error, words
):
    monkeypatch.setattr("difftransformer_lab.studies.study.run_jobs", lambda *args, **options: pytest.fail("trained"))
    tasks = {spec["task"]: spec["options"] for spec in study_document["evaluation"]}
    (tasks | study_document)[part].update(change)
    with pytest.raises(error, match=words):
        compare(recipe_from(study_document, source="toy"), tmp_path)


def test_a_run_that_the_system_kills_says_so(tmp_path, monkeypatch):
    (tmp_path / "log.txt").write_text("a warning\n")
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]

    def start(job):
        job.process = subprocess.Popen(killed, stdin=subprocess.PIPE)

    monkeypatch.setattr(Job, "start", start)
    job = Job(label="DIFF, seed 0", folder=tmp_path, shards=[], steps=5, flops=1.0, threads=1, step=3)
    words = "DIFF, seed 0: its process was ended by SIGKILL at step 3; if memory ran out, give fewer --jobs"
    with pytest.raises(DiffTransformerError, match=words):
        run_jobs([job], at_once=1)


@pytest.mark.slow
@pytest.mark.usefixtures("wide_alone")
def test_any_task_can_be_in_a_study(copied, study_document, no_costs, monkeypatch):
    """The recipe asks for another task of the trained runs: it is asked, shown on the page and compared."""
    folder, _ = copied
    options = {"text": "validation", "window": 64, "windows": 4}
    study_document["evaluation"].append({"task": "recall", "label": "pairs", "options": options})

    monkeypatch.setattr("difftransformer_lab.studies.study.run_jobs", run_here)
    index = compare(recipe_from(study_document, source="toy"), folder)
    labels = [figure.label for figure in index.figures if figure.task == "pairs"]
    assert labels == ["nll of AR-hits", "nll of others", "validation loss (pairs)"]
    write_page(study_page(analyse(read_records(folder / "results.json"))), folder)
    assert (folder / "figures" / "pairs.svg").is_file()
    assert "Associative recall" in (folder / "index.html").read_text()

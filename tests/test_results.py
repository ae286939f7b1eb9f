"""The typed JSON: what was written is read back, and nothing that is not understood is."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from difftransformer.errors import ResultsError
from difftransformer.files import write_text_atomically
from difftransformer_lab.results import (
    SCHEMA_VERSION,
    VERSIONS,
    Bench,
    BenchRow,
    ItemScore,
    Measurement,
    TaskResult,
    Timing,
    headlines,
    read_result,
    summary_rows,
    title_of,
    write_result,
)
from tests.support.environment import ENVIRONMENT
from tests.support.task_results import task_result

WHAT = {"part": "attention", "work": "forward", "dtype": "fp32", "implementation": "diff cpu"}
TIMING = Timing(median_seconds=0.1, low_seconds=0.09, high_seconds=0.2, rounds=9)
BENCH = Bench(
    command="difftransformer bench",
    created="2026-01-02T03:04:05+00:00",
    environment=ENVIRONMENT,
    foreign_cpu_share=0.25,
    rows=[BenchRow(**WHAT, shape={"length_tokens": 512, "heads": 8, "head_dim": 64}, timing=TIMING)],
)


def measurement(name: str, value: float, **changes: Any) -> Measurement:
    parts = {"unit": "share", "standard_error": 0.1, "n": 10, "better": "higher", "at": {}} | changes
    return Measurement(name=name, value=value, **parts)


MEASUREMENTS = [
    measurement("accuracy", 0.5, at={"cities": "seen"}, low=0.2, high=0.8),
    measurement("accuracy", 0.25, at={"cities": "seen", "needles": 4}),
    measurement("accuracy", 0.125, at={"cities": "seen", "depth": 0.5}, detail=True),
    measurement("nll", 2.5, unit="nats/token", better="lower"), measurement("share of hits", 0.7, better=None),
]  # fmt: skip
SCORES = [ItemScore(name="accuracy", item="document 0", score=1.0)]
TASK = task_result("needle", "m", MEASUREMENTS, scores=SCORES, data="validation", digits=2)


def test_headlines_cover_most_of_the_data_and_have_a_better_direction() -> None:
    assert [(row.name, row.value) for row in headlines(TASK)] == [("accuracy", 0.5), ("nll", 2.5)]
    assert [title_of(row, TASK) for row in headlines(TASK)] == ["needle accuracy (seen cities)", "validation loss"]


def test_a_summary_has_every_figure_but_details() -> None:
    assert summary_rows(TASK) == [
        ("needle accuracy (seen cities)", "0.5000 (5 of 10)"), ("needle accuracy (seen cities, needles 4)", "0.2500"),
        ("validation loss, nats/token", "2.5000"), ("share of hits", "0.7000"),
    ]  # fmt: skip
    assert [value for _, value in summary_rows(TASK, errors=True)] == [
        "0.5000 ± 0.1000 (5 of 10)", "0.2500 ± 0.1000", "2.5000 ± 0.1000", "0.7000 ± 0.1000",
    ]  # fmt: skip


@pytest.fixture
def damage(tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], Any]], Path]:
    """Write a good bench file, let a function edit its JSON, and return its path. Without a checksum every edit is read."""

    def edit_file(edit: Callable[[dict[str, Any]], Any]) -> Path:
        path = write_result(BENCH, tmp_path / "bench.json")
        document = json.loads(path.read_text())
        del document["sha256"]
        edit(document)
        path.write_text(json.dumps(document))
        return path

    return edit_file


@pytest.mark.parametrize("result", [BENCH, TASK])
def test_a_result_is_read_back_as_it_was_written(result: Bench | TaskResult, tmp_path: Path) -> None:
    path = write_result(result, tmp_path / "deep" / "result.json")
    assert read_result(path, type(result)) == result
    kind = "bench" if result is BENCH else "task"
    assert json.loads(path.read_text())["version"] == VERSIONS.get(kind, SCHEMA_VERSION)
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


def test_a_whole_number_is_read_as_a_float(damage: Callable[..., Path]) -> None:
    path = damage(lambda document: document["result"]["rows"][0]["timing"].update(median_seconds=1))
    seconds = read_result(path, Bench).rows[0].timing.median_seconds
    assert (seconds, type(seconds)) == (1.0, float)


@pytest.mark.parametrize(("edit", "words"), [
    (lambda d: d.update(version=9), ["version 9", f"reads version {VERSIONS['bench']}"]),
    (lambda d: d.update(kind="comparison"), ["'comparison'", "expected 'bench'"]),
    (lambda d: d.pop("version"), ["not a results file"]),
    (lambda d: d["result"].pop("rows"), ["rows", "missing"]),
    (lambda d: d["result"]["rows"][0].pop("dtype"), ["rows[0]", "dtype", "missing"]),
    (lambda d: d["result"].update(colour="red"), ["colour", "unknown"]),
    (lambda d: d["result"]["rows"][0]["timing"].update(rounds="9"), ["rows[0].timing.rounds", "expected int", "'9'"], ),
    (
        lambda d: d["result"]["rows"][0]["timing"].update(rounds=True),
        ["rows[0].timing.rounds", "expected int", "True"],
    ),
    (lambda d: d["result"].update(rows={}), ["rows", "expected a list"]),
    (lambda d: d["result"].update(environment=[]), ["environment", "Environment"]),
    (lambda d: d["result"]["environment"].update(device=None), ["environment.device", "expected str"]),
])  # fmt: skip
def test_a_file_that_is_not_understood_is_refused_by_name(
    edit: Callable[[dict[str, Any]], Any], words: list[str], damage: Callable[..., Path]
) -> None:
    path = damage(edit)
    with pytest.raises(ResultsError) as caught:
        read_result(path, Bench)
    message = str(caught.value)
    assert "\n" not in message
    for word in [str(path), *words]:
        assert word in message


DAMAGED = (b"", b"{", b"[1, 2]", b'"bench"', b'{"kind": "bench", "version": 1, "resul', b"\xff\xfe\x00\x01")


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_and_a_folder_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(ResultsError, match="not a results file"):
            read_result(place, Bench)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"nothing\.json: no such results file"):
        read_result(tmp_path / "nothing.json", Bench)


def test_a_number_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    broken = dataclasses.replace(TASK, measurements=[measurement("accuracy", float("nan"))])
    path = write_result(TASK, tmp_path / "result.json")
    with pytest.raises(ValueError, match="JSON"):
        write_result(broken, path)
    assert read_result(path, TaskResult) == TASK


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_text_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text_atomically(path, "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("page.html", "old")]

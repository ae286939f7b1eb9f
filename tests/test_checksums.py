"""Every byte that changes in a file of results, answers or metrics is found and named; files without checksums still open."""

import dataclasses
import json
import zlib

import pytest

from difftransformer.checksums import line_of
from difftransformer.errors import CheckpointError, DamagedResult, ResultsError
from difftransformer.train import StepMetrics, ValidationMetrics, read_metrics
from difftransformer.train.metrics import MetricsLog
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.results import TaskResult, read_result, write_result
from tests.evals.test_engine import Adding, numbers
from tests.support.task_results import task_result

MASKS = (0x01, 0x20)
RESULT = task_result("perplexity", "é", [])


def damages(content):
    """The content with one byte changed, and the number of the line that it was in, for every byte and some changes."""
    for place in range(len(content)):
        for mask in MASKS:
            changed = bytes([content[place] ^ mask])
            yield content[:place] + changed + content[place + 1 :], content.count(b"\n", 0, place) + 1


@pytest.fixture
def metrics(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", step=0)
    for step in (1, 2):
        log.write(
            StepMetrics(
                step=step, loss_nats=2.5, gradient_norm=1e-05, learning_rate=0.1, tokens=64, seconds=0.5,
                tokens_per_second=128.0, lambdas=[0.2],
            )
        )  # fmt: skip
    log.write(ValidationMetrics(step=2, validation_loss_nats=3.25))
    log.close()
    return tmp_path / "metrics.jsonl"


def test_every_byte_of_a_results_file(tmp_path):
    path = write_result(RESULT, tmp_path / "r.json")
    content = path.read_bytes()
    for damaged, _ in damages(content):
        path.write_bytes(damaged)
        with pytest.raises(ResultsError) as caught:
            read_result(path, TaskResult)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
    path.write_bytes(content)
    assert read_result(path, TaskResult) == RESULT


def test_every_byte_of_the_answers(tmp_path):
    path, task = tmp_path / "a.jsonl", numbers(1, 20, 300)
    run_task(Adding(), task, journal=path, identity="m")
    content = path.read_bytes()
    for damaged, line in damages(content):
        path.write_bytes(damaged)
        # A changed line end joins two lines, or leaves the last one without its end.
        with pytest.raises(CheckpointError, match=rf"a\.jsonl: line {line} is damaged"):
            run_task(Adding(), task, journal=path, identity="m")
        assert path.read_bytes() == damaged


def test_every_byte_of_the_metrics(metrics):
    content = metrics.read_bytes()
    for damaged, line in damages(content):
        metrics.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"metrics\.jsonl: line {line} is damaged"):
            read_metrics(metrics)
    for length in range(content.rindex(b"\n", 0, -1) + 1, len(content)):  # a kill while the last line is written
        metrics.write_bytes(content[:length])
        assert [len(rows) for rows in read_metrics(metrics)] == [2, 0]


def test_the_checksum_is_a_field_that_other_readers_see(metrics):
    """pandas and jq read the lines; the checksum is zlib's crc32 of the bytes before the field."""
    for line in metrics.read_text().splitlines():
        body, _, _ = line.partition(', "crc32": ')
        assert json.loads(line)["crc32"] == f"{zlib.crc32(body.encode()):08x}"
        assert json.loads(body + "}").items() <= json.loads(line).items()
    assert line_of({"text": "é\n"}).startswith('{"text": "é\\n", "crc32": "'.encode())


def test_files_without_checksums_open(metrics, tmp_path):
    path = write_result(RESULT, tmp_path / "r.json")
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps(document, indent=1) + "\n")
    assert read_result(path, TaskResult) == RESULT
    before = read_metrics(metrics)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    old = "".join(json.dumps({key: row[key] for key in row if key != "crc32"}) + "\n" for row in rows)
    metrics.write_text(old)
    assert read_metrics(metrics) == before
    MetricsLog(metrics, step=2).close()  # the run continues, and its lines get checksums
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == rows


def test_the_commands_name_a_damaged_file_in_one_line(tmp_path, capsys):
    path = write_result(dataclasses.replace(RESULT, seed=7), tmp_path / "results.json")
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 6'))
    assert main(["report", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: not a results file, or changed since it was written" in line
    with pytest.raises(DamagedResult):
        read_result(path, TaskResult)

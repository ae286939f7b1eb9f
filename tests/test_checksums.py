"""Every byte that changes in a results file is found and named; files without a checksum still open."""

import dataclasses
import json

import pytest

from difftransformer.errors import DamagedResult, ResultsError
from difftransformer_lab.results import TaskResult, read_result, write_result
from tests.support.task_results import task_result

MASKS = (0x01, 0x20)
RESULT = task_result("perplexity", "é", [])


def test_every_byte_of_a_results_file(tmp_path):
    path = write_result(RESULT, tmp_path / "r.json")
    content = path.read_bytes()
    for place in range(len(content)):
        for mask in MASKS:
            path.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
            with pytest.raises(ResultsError) as caught:
                read_result(path, TaskResult)
            assert str(caught.value).startswith(f"{path}: ")
            assert "\n" not in str(caught.value)
    path.write_bytes(content)
    assert read_result(path, TaskResult) == RESULT


def test_a_file_without_a_checksum_opens(tmp_path):
    path = write_result(RESULT, tmp_path / "r.json")
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps(document, indent=1) + "\n")
    assert read_result(path, TaskResult) == RESULT


def test_the_commands_name_a_damaged_file_in_one_line(tmp_path, fails):
    path = write_result(dataclasses.replace(RESULT, seed=7), tmp_path / "results.json")
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 6'))
    assert f"{path}: not a results file, or changed since it was written" in fails("report", path)
    with pytest.raises(DamagedResult):
        read_result(path, TaskResult)

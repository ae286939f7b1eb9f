"""Files of JSON lines: a last line that is not whole is left out, another damaged line is named."""

import pytest

from difftransformer.jsonl import DamagedLine, RowWriter, read_rows

ROWS = [{"text": "é\n", "number": 1e-05}, {"text": "\ud800"}, {"list": [1, None]}]


@pytest.fixture
def path(tmp_path):
    writer = RowWriter(tmp_path / "rows.jsonl", keep_bytes=0, sync_seconds=0.0)
    for row in ROWS:
        writer.write(row)
    writer.close()
    return tmp_path / "rows.jsonl"


def rows(path):
    return [row for row, _ in read_rows(path)]


def test_what_is_written_is_read(path):
    assert rows(path) == ROWS
    ends = [end for _, end in read_rows(path)]
    assert ends[-1] == path.stat().st_size
    writer = RowWriter(path, keep_bytes=ends[0])
    writer.write({"step": 3})
    writer.close()
    assert rows(path) == [ROWS[0], {"step": 3}]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_that_is_not_whole(path, end):
    whole = rows(path)
    with path.open("a") as file:
        file.write('{"step": 9, "loss_na' + end)
    with pytest.warns(UserWarning, match=r"rows\.jsonl: line 4 is not whole and is left out"):
        assert rows(path) == whole


@pytest.mark.parametrize("line", ["{", "[1]", "\x00"])
def test_a_damaged_line_before_the_last_is_named(path, line):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
    with pytest.raises(DamagedLine, match="line 2 is damaged"):
        rows(path)
    path.write_text("not rows\n")
    with pytest.raises(DamagedLine, match="line 1 is damaged"):
        rows(path)

"""Texts that would hang, recurse or surprise are refused in one line, and the others are what json and yaml read."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from difftransformer.errors import ConfigError
from difftransformer.reading import MOST_NESTING, is_plain_name, parse_json, parse_yaml, read_json

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text("abc \u00e9-:#'\"\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", min_size=1), inner, max_size=3),
    max_leaves=9,
)
LAUGHS = "- &a [x, x]\n" + "".join(
    f"- &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@given(plain)
def test_plain_documents(document):
    assert parse_yaml(yaml.safe_dump(document)) == document
    assert parse_json(json.dumps(document)) == document
    assert parse_json(json.dumps(document).encode()) == document


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "not valid YAML in line 1"),
        ("[" * 3000, f"deeper than {MOST_NESTING} levels"),
        ("- " * (MOST_NESTING + 1) + "x", f"deeper than {MOST_NESTING} levels"),
        ("&a [*a]", "an alias that holds itself"),
        (LAUGHS, "aliases that stand for more than 1,000,000 values"),
        ("a: " + "9" * 20, "an integer of 67 bits"),
        ("a: " + "9" * 5000, "5000 digits"),
        ("a: 0x" + "f" * 20, "an integer of 80 bits"),
        ("a: 2024-13-45", "month must be in 1..12"),
        ("a: 2024-01-02", "is a date"),
        ("1: a", "the key 1 is no text"),
        ('"\\ud800"', "half a surrogate pair"),
        ('a: "b\\0"', "NUL"),
        ("a: " + "x" * 2_000_000, "2,000,003 characters"),
        ("!!python/object:x {}", "could not determine a constructor"),
    ],
    ids=lambda value: value[:20],
)
def test_hostile_yaml(text, reason):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_yaml(text)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_alias_may_be_used_often():
    assert parse_yaml("a: &x [1, 2]\nb: *x\nc: [*x, *x]") == {"a": [1, 2], "b": [1, 2], "c": [[1, 2], [1, 2]]}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "{", b"\xff"], ids=lambda text: str(text[:9])
)
def test_hostile_json(text, tmp_path):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"x\.json cannot be read as JSON \(.+\); copy it$"):
        read_json(path, error=ConfigError, advice="copy it")


def test_what_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "n\0l"):
        with pytest.raises(ConfigError, match="no such file"):
            read_json(path, error=ConfigError, advice="copy it")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a/", "a\0b"])
def test_names_that_lead_elsewhere(name):
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["a", "a b.json", "..a", "model-00001-of-00002.safetensors"])
def test_plain_names(name):
    assert is_plain_name(name)

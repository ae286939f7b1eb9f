"""Faults of a text are one line, and other texts are what json and yaml read."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from difftransformer.errors import ConfigError
from difftransformer.reading import is_plain_name, parse_json, parse_yaml, read_json, with_floats

numbers = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text("abc \u00e9-:#'\"\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", min_size=1), inner, max_size=3),
    max_leaves=9,
)


UNFIT = "a tag (!!...) that does not fit its value"


@given(plain)
def test_plain_documents(document):
    assert parse_yaml(yaml.safe_dump(document)) == document
    assert parse_json(json.dumps(document)) == document
    assert parse_json(json.dumps(document).encode()) == document


@pytest.mark.parametrize(("text", "reason"), [
    ("[", "in line 1"), ("a: 1\n\tb: 2", "in line 2"), ("[" * 3000, "nested too deeply"),
    ("a: " + "9" * 5000, "5000 digits"), ("a: 2024-13-45", "month must be in 1..12"),
    ("a: b\0", "unacceptable character"), ("!!python/object:x {}", "could not determine a constructor"),
    ("a: !!int x", "invalid literal"), *((f"a: !!{tag}", UNFIT) for tag in ("timestamp x", "bool x", "int", "float")),
    ("a: !!str [x]", "expected a scalar"), ("a: !!binary x", "base64"), ("? [a]\n: b", "unhashable key"),
], ids=lambda value: value[:20])  # fmt: skip
def test_faults_of_yaml(text, reason):
    with pytest.raises(ValueError, match=r"^not valid YAML") as caught:
        parse_yaml(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_floats_that_json_lacks():
    """As transformers writes the time step limits of a Mamba 2."""
    both = [{"__float__": "Infinity"}, {"b": {"__float__": "-Infinity"}}]
    document = {"a": both, "__float__": 1, "c": {"__float__": "x"}}
    expected = {"a": [float("inf"), {"b": float("-inf")}], "__float__": 1, "c": {"__float__": "x"}}
    assert with_floats(document) == expected
    assert with_floats({"__float__": "NaN"}) != with_floats({"__float__": "NaN"})


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


def test_plain_names_lead_nowhere_else():
    elsewhere = ("", ".", "..", "a/b", "/a", "../a", "a/", "a\0b")
    assert [name for name in elsewhere if is_plain_name(name)] == []
    assert all(map(is_plain_name, ("a", "a b.json", "..a", "model-00001-of-00002.safetensors")))

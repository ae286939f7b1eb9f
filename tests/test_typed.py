"""Building dataclasses from plain data: what goes out as JSON comes back equal, and nothing else comes in."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difftransformer.errors import ConfigError
from difftransformer.typed import build


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["a", "b"]
    pair: tuple[int, float]
    rows: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int
    share: float
    on: bool
    inner: Inner
    more: list[Inner]
    table: dict[str, float]
    anything: dict[str, Any]
    limit: int | None = None
    maybe: Inner | None = None


integers = st.integers(-(2**63) + 1, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
inners = st.builds(
    Inner,
    kind=st.sampled_from(["a", "b"]),
    pair=st.tuples(integers, finite),
    rows=st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=3),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
outers = st.builds(
    Outer, name=st.text(), count=integers, share=finite, on=st.booleans(), inner=inners,
    more=st.lists(inners, max_size=3), table=st.dictionaries(st.text(max_size=5), finite, max_size=3),
    anything=st.dictionaries(st.text(max_size=5), json_values, max_size=3), limit=st.none() | integers,
    maybe=st.none() | inners,
)  # fmt: skip


def build_outer(value):
    return build(Outer, value, source="file.yaml", error=ConfigError)


@given(outers)
def test_round_trip_through_json(outer):
    assert build_outer(json.loads(json.dumps(dataclasses.asdict(outer)))) == outer


@pytest.mark.parametrize("name", ["\n", "a\nb", "\u2028", "\x00"])
def test_unprintable_keys_are_escaped(name):
    with pytest.raises(ConfigError) as raised:
        build_outer({name: 1})
    assert repr(name) in str(raised.value)
    assert str(raised.value).isprintable()


@given(outers, st.data())
def test_no_field_takes_another_type(outer, data):
    """Whatever plain value is put in place of a field, it is refused or comes back as it was."""
    document = json.loads(json.dumps(dataclasses.asdict(outer)))
    name = data.draw(st.sampled_from(sorted(document)))
    document[name] = data.draw(json_values)
    refused = None
    try:
        built = build_outer(document)
    except ConfigError as error:
        refused = str(error)
    if refused is not None:
        assert refused.startswith(f"file.yaml: {name}")
        assert "\n" not in refused
    else:
        found = json.loads(json.dumps(getattr(built, name), default=dataclasses.asdict))
        assert found == document[name] or name == "maybe"
        assert type(found) is type(document[name]) or name in ("share", "maybe")


@given(outers, st.sampled_from(["name", "count", "share", "on", "inner", "more", "table", "anything"]))
def test_a_required_field_may_not_be_missing(outer, name):
    document = dataclasses.asdict(outer)
    del document[name]
    with pytest.raises(ConfigError, match=rf"^file.yaml: {name}: missing \(Outer needs it\)$"):
        build_outer(document)


INNER = Inner(kind="a", pair=(1, 2.0))
VALID = dataclasses.asdict(
    Outer(name="n", count=1, share=0.5, on=True, inner=INNER, more=[], table={"x": 1.0}, anything={})
)


@pytest.mark.parametrize(("change", "message"), [
    ({"cuont": 1}, "cuont: unknown key; did you mean count? allowed: name, count, share,"),
    ({"zzz": 1}, "zzz: unknown key; allowed: name, count,"),
    ({"count": 2**63}, "count: an integer of 64 bits; give at most 63"),
    ({"share": 10**400}, "share: an integer of 1329 bits; give at most 63"),
    ({"count": 1.0}, "count: expected int, got 1.0"),
    ({"count": True}, "count: expected int, got True"),
    ({"on": 1}, "on: expected bool, got 1"),
    ({"name": None}, "name: expected str, got None"),
    ({"share": "3e-4"}, "share: expected float, got '3e-4' (YAML reads 3e-4 as text: write 3.0e-4 or 0.0003)"),
    ({"share": True}, "share: expected float, got True"),
    ({"share": float("nan")}, "share: expected a finite number, got nan"),
    ({"share": float("inf")}, "share: expected a finite number, got inf"),
    ({"more": {}}, "more: expected a list, got {}"),
    ({"more": "text"}, "more: expected a list, got 'text'"),
    (
        {"more": [{"kind": "a", "pair": [1, 2.0]}, {"kind": "c", "pair": [1, 2.0]}]},
        "more[1].kind: 'c' is not allowed; choose one of a, b",
    ),
    ({"inner": {"kind": "a", "pair": [1]}}, "inner.pair: expected 2 values, got [1]"),
    ({"inner": {"kind": "a", "pair": [1, "x"]}}, "inner.pair[1]: expected float, got 'x'"),
    ({"inner": {"kind": ["a"], "pair": [1, 2.0]}}, "inner.kind: ['a'] is not allowed; choose one of a, b"),
    ({"inner": 5}, "inner: expected a mapping (Inner), got 5"),
    ({"table": [1]}, "table: expected a mapping, got [1]"),
    ({"table": {"x": "y"}}, "table.x: expected float, got 'y'"),
    ({"table": {3: 1.0}}, "table.3: expected a key of type str, got 3"),
    ({"name": ["x"] * 99}, "name: expected str, got ['x', 'x',"),
])  # fmt: skip
def test_messages(change, message):
    with pytest.raises(ConfigError) as error:
        build_outer(VALID | change)
    assert str(error.value).startswith(f"file.yaml: {message}")
    assert len(str(error.value)) < 250


def test_whole_numbers_are_floats_where_floats_are_asked():
    built = build_outer(VALID | {"share": 1, "table": {"x": 2}})
    assert (built.share, built.table) == (1.0, {"x": 2.0})
    assert type(built.share) is type(built.table["x"]) is float


def test_a_dataclass_refuses_what_its_own_check_refuses():
    @dataclass(frozen=True, kw_only=True)
    class Even:
        number: int

        def __post_init__(self):
            if self.number % 2:
                raise ConfigError(f"number={self.number} is odd")

    @dataclass(frozen=True, kw_only=True)
    class Holder:
        even: Even

    with pytest.raises(ConfigError, match=r"^f: even: number=3 is odd$"):
        build(Holder, {"even": {"number": 3}}, source="f", error=ConfigError)

"""Build dataclasses from plain data (JSON files, YAML recipes), with errors that name file, key and value.

Unknown keys, missing keys and wrong types are refused. Fields with a default may be left out.
"""

import dataclasses
import difflib
import functools
import math
import reprlib
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from .errors import DiffTransformerError
from .reading import LARGEST_INT

T = TypeVar("T")

WeightsDtype = Literal["auto", "fp32", "bf16", "fp16"]  # "auto" keeps the type that the weights were saved in

ASIDE: Mapping[str, str] = {"role": "aside"}
"""Metadata of a field of a recipe that changes nothing of what a run computes, such as a folder."""
ADJUSTABLE: Mapping[str, str] = {"role": "adjustable"}
"""Metadata of a field that makes another run, and that a run under way may go on with all the same."""


def plain(value: Any, *, without: Collection[Mapping[str, str]] = ()) -> Any:
    """Return a value as plain data, dataclasses as mappings and tuples as lists, so that YAML and JSON hold the same.

    Args:
        value: Dataclasses, mappings, sequences and plain values.
        without: Metadata of fields that are left out, such as `ASIDE`.
    """
    if dataclasses.is_dataclass(value):
        kept = [field.name for field in dataclasses.fields(value) if field.metadata not in without]
        return {name: plain(getattr(value, name), without=without) for name in kept}
    if isinstance(value, dict):
        return {key: plain(item, without=without) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, without=without) for item in value]
    return value


def build(cls: type[T], value: Any, *, source: str, error: type[DiffTransformerError], key: str = "") -> T:
    """Build a dataclass from a mapping.

    Args:
        cls: Dataclass whose fields are dataclasses, lists, tuples, dicts, literals, optionals and plain types.
        value: Content of the file.
        source: Name of the file, for messages; may be empty.
        error: Class of the error to raise.
        key: Dotted key of `value` in the file, for messages.

    Raises:
        DiffTransformerError: The value does not fit the dataclass. The error is of class `error`.
    """
    return _Builder(source, error).build(cls, value, key)


def unknown_key(name: str, allowed: Collection[str], nested: Sequence[str] = ()) -> str:
    """Return the error message for a key that is not among the allowed ones; `nested` are keys of its parts."""
    near = nested or difflib.get_close_matches(name, allowed, n=1)
    return f"unknown key; {f'did you mean {near[0]}? ' if near else ''}allowed: {', '.join(allowed)}"


@dataclasses.dataclass(frozen=True)
class _Builder:
    source: str
    error: type[DiffTransformerError]

    def fail(self, key: str, text: str) -> DiffTransformerError:
        return self.error(": ".join(part for part in (self.source, key, text) if part))

    def build(self, annotation: Any, value: Any, key: str) -> Any:
        if annotation is Any or _fits(annotation, value):
            return value
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            return self.build_dataclass(annotation, value, key)
        if origin in (typing.Union, types.UnionType):
            if value is None and type(None) in arguments:
                return None
            return self.build(next(argument for argument in arguments if argument is not type(None)), value, key)
        if origin is Literal:
            if value not in arguments:
                allowed = ", ".join(str(argument) for argument in arguments)
                raise self.fail(key, f"{short(value)} is not allowed; choose one of {allowed}")
            return value
        if origin is list:
            (inner,) = arguments
            return [
                item if _fits(inner, item) else self.build(inner, item, f"{key}[{i}]")
                for i, item in enumerate(self.sequence(value, key))
            ]
        if origin is tuple:
            items = self.sequence(value, key)
            if len(items) != len(arguments):
                raise self.fail(key, f"expected {len(arguments)} values, got {short(value)}")
            return tuple(
                self.build(argument, item, f"{key}[{i}]")
                for i, (argument, item) in enumerate(zip(arguments, items, strict=True))
            )
        if origin is dict:
            if not isinstance(value, dict):
                raise self.fail(key, f"expected a mapping, got {short(value)}")
            for name in value:
                if type(name) is not arguments[0]:
                    raise self.fail(
                        _join(key, name), f"expected a key of type {arguments[0].__name__}, got {short(name)}"
                    )
            return {name: self.build(arguments[1], item, _join(key, name)) for name, item in value.items()}
        if type(value) is int and abs(value) > LARGEST_INT:
            raise self.fail(key, f"an integer of {value.bit_length()} bits; give at most 63")
        if annotation is float and type(value) is int:
            return float(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.fail(key, f"expected a finite number, got {value}")
        if type(value) is not annotation:
            hint = ""
            if annotation is float and isinstance(value, str):
                hint = " (YAML reads 3e-4 as text: write 3.0e-4 or 0.0003)"
            raise self.fail(key, f"expected {annotation.__name__}, got {short(value)}{hint}")
        return value

    def build_dataclass(self, cls: type, value: Any, key: str) -> Any:
        if not isinstance(value, dict):
            raise self.fail(key, f"expected a mapping ({cls.__name__}), got {short(value)}")
        hints, required = _fields(cls)
        for name in value:
            if name not in hints:
                raise self.fail(_join(key, name), unknown_key(str(name), hints, list(_nested(cls, str(name)))))
        for name in required:
            if name not in value:
                raise self.fail(_join(key, name), f"missing ({cls.__name__} needs it)")
        built = {
            name: item if _fits(hints[name], item) else self.build(hints[name], item, _join(key, name))
            for name, item in value.items()
        }
        try:
            return cls(**built)
        except DiffTransformerError as problem:  # from the dataclass's own checks
            raise self.fail(key, str(problem)) from None

    def sequence(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise self.fail(key, f"expected a list, got {short(value)}")
        return list(value)


def _fits(annotation: Any, value: Any) -> bool:
    """Whether a value is of a plain type, such as most are, and stays as it is."""
    if type(value) is not annotation:
        return False
    if annotation is int:
        return abs(value) <= LARGEST_INT
    return math.isfinite(value) if annotation is float else annotation is str or annotation is bool


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a dataclass's fields by their names, and the names of those without a default."""
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    missing = dataclasses.MISSING
    required = [one.name for one in fields if one.default is missing and one.default_factory is missing]
    return {one.name: hints[one.name] for one in fields}, required


def _nested(cls: type, name: str) -> Iterator[str]:
    """Yield the dotted keys that end with a name, in the parts of a dataclass."""
    for part, annotation in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            own = (field.name for field in dataclasses.fields(annotation) if field.name == name)
            yield from (f"{part}.{key}" for key in (*own, *_nested(annotation, name)))


def _join(key: str, name: Any) -> str:
    text = str(name) if str(name).isprintable() else repr(name)
    return f"{key}.{text}" if key else text


def short(value: Any) -> str:
    """Return a value as an error message shows it, in at most 60 characters."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 20, 20, 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60

"""Parse JSON and YAML from files that anyone may have written: every fault of the text is one error that names its source.

What comes back can be copied and printed: there is no nesting that exhausts the stack, and there are no aliases that multiply.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from .errors import DiffTransformerError

MOST_CHARACTERS = 1_000_000  # of a YAML document, which takes a second to parse
MOST_NESTING = 100
MOST_VALUES = 1_000_000  # of a YAML document, with each alias counted as what it stands for
MOST_DIGITS = 1000  # of an integer in JSON; a tokenizer's model_max_length has 31
LARGEST_INT = 2**63 - 1
_TOO_DEEP = f"nested deeper than {MOST_NESTING} levels"


def read_json(path: Path, *, error: type[DiffTransformerError], advice: str) -> Any:
    """Read a JSON file.

    Args:
        path: The file, UTF-8.
        error: Class of the error to raise.
        advice: End of the message: what to do.

    Raises:
        DiffTransformerError: The file cannot be read or parsed. The error is of class `error`.
    """
    if not path.is_file():  # a pipe would be waited for
        raise error(f"{path}: no such file; {advice}")
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{path} cannot be read as JSON ({reason}); {advice}") from None


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse a JSON text.

    Args:
        text: The text, or its bytes in UTF-8.
        **options: Options of `json.loads`.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or holds an integer of thousands of digits.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_int=_int, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML document of mappings with names as keys, lists, text, numbers, booleans and nulls.

    Raises:
        ValueError: The text is not YAML, or holds something else: dates, nesting beyond `MOST_NESTING`, an integer beyond
            64 bits, NUL, half a surrogate pair, or aliases that stand for more than `MOST_VALUES` values.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text):,} characters, and a document has at most {MOST_CHARACTERS:,}")
    try:
        document = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"not valid YAML{line}: {getattr(error, 'problem', None) or error}") from None
    except ValueError as error:  # of the conversion of a number or a date
        raise ValueError(f"not valid YAML: {str(error).partition(';')[0]}") from None
    _count(document, {}, 0)
    return document


def is_plain_name(name: str) -> bool:
    """Whether a name in a file names a file beside it, and does not lead out of the folder."""
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name


class _Loader(yaml.SafeLoader):
    """Stops at the first value that is nested too deeply, where PyYAML would go on until the stack is full."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MOST_NESTING:
            raise yaml.composer.ComposerError(problem=_TOO_DEEP, problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


def _count(value: Any, known: dict[int, int], depth: int) -> int:
    """Return the number of values in a document, and refuse what no recipe has. `known` holds lists and mappings by id."""
    if depth > MOST_NESTING:
        raise ValueError(f"{_TOO_DEEP}, or an alias that holds itself")
    if isinstance(value, (dict, list)):
        if id(value) not in known:
            total = 1
            for item in value.values() if isinstance(value, dict) else value:
                total += _count(item, known, depth + 1)
            known[id(value)] = total
        if known[id(value)] > MOST_VALUES:
            raise ValueError(f"aliases that stand for more than {MOST_VALUES:,} values")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise ValueError(f"the key {key!r} is no text; put it between quotes")
                _check_text(key)
        return known[id(value)]
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int):
        if abs(value) > LARGEST_INT:
            raise ValueError(f"an integer of {value.bit_length()} bits; give at most 63")
    elif value is not None and not isinstance(value, float):
        raise ValueError(f"{value!r} is a {type(value).__name__}; put it between quotes")
    return 1


def _check_text(text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{text[:40]!r} holds NUL or half a surrogate pair; leave it out")

"""Read JSON and YAML files: every fault of the text is one error of one line that names its source."""

import json
from pathlib import Path
from typing import Any

import yaml

from .errors import DiffTransformerError

LARGEST_INT = 2**63 - 1


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


def with_floats(value: Any) -> Any:
    """Return a JSON document with the floats that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: with_floats(item) for key, item in value.items()}


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse a JSON text.

    Args:
        text: The text, or its bytes in UTF-8.
        **options: Options of `json.loads`.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or holds an integer of thousands of digits.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML document.

    Raises:
        ValueError: The text is not YAML, or a tag in it does not fit its value.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ValueError(f"not valid YAML{line}: {reason}") from None
    except RecursionError:
        raise ValueError("not valid YAML: nested too deeply") from None
    except ValueError as error:  # of the conversion of a number or a date
        raise ValueError(f"not valid YAML: {str(error).partition(';')[0]}") from None
    except (AttributeError, LookupError, TypeError):  # PyYAML of !!timestamp x, !!bool x
        raise ValueError("not valid YAML: a tag (!!...) that does not fit its value") from None


def is_plain_name(name: str) -> bool:
    """Whether a name in a file names a file beside it, and does not lead out of the folder."""
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name

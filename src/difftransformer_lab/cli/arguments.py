"""The words of a command: how a verb's signature becomes a parser and a page of help, and arguments that several share."""

import dataclasses
import inspect
import math
import os
import re
import shutil
import textwrap
from difflib import get_close_matches
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from difftransformer.errors import ConfigError, DataError
from difftransformer.reading import LARGEST_INT
from difftransformer.typed import short

from ..recipe_files import read_recipe

HELP_COLUMN = 27
SHARED_HELP = "difftransformer eval quick --help"
DEVICES = ("cpu", "cuda")
MOST_THREADS = 64
"""Or as many as there are cores; the runs of other machines can be repeated with their number of threads."""
# The argument `set` of every command with a recipe.
SET: dict[str, Any] = {
    "action": "append",
    "metavar": "KEY=VALUE",
    "help": "Replace a value of the recipe, such as training.steps=100 or model.attention_type=softmax. May be repeated.",
}


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads that torch uses. None keeps the current number.

    Raises:
        ConfigError: The number is below 1, or larger than any machine needs.
    """
    check_positive(threads=threads)
    if threads is not None:
        most = max(MOST_THREADS, os.cpu_count() or 1)
        if threads > most:
            raise ConfigError(f"--threads {threads}: give at most {most}")
        import torch

        torch.set_num_threads(threads)


def check_positive(**flags: int | None) -> None:
    """Check that flags, by name, are at least 1; None passes.

    Raises:
        ConfigError: A flag is below 1.
    """
    for name, value in flags.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give at least 1")


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ConfigError: The device is unknown, or "cuda" on a machine without a CUDA device.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: choose one of {', '.join(DEVICES)}")
    if device == "cuda":
        import torch

        if torch.cuda.is_available():
            return
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")


def check_text(text: str, where: str = "the prompt") -> None:
    """Check that a text says something, in Unicode; `where` says where it is from."""
    if not text.strip():
        raise ConfigError(f"{where} is empty; give a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: not UTF-8; convert it") from None


class Parser(ArgumentParser):
    """Reads a verb's words, with one spelling of flags, and describes them on one screen."""

    def page(self, own: type | None = None) -> str:
        """Return the help. With options of its own, a verb describes those, and only names the flags that it shares."""
        named = {field.name for field in dataclasses.fields(own)} if own else set()
        actions = [action for action in self._actions if action.dest != "help"]
        positional = [action for action in actions if not action.option_strings]
        flags = [action for action in actions if action.option_strings]
        described = [*positional, *(action for action in flags if not named or action.dest in named)]
        shared = [_flag(action) for action in flags if action not in described]
        width = min(100, max(80, shutil.get_terminal_size((100, 24)).columns))
        lines = [
            f"usage: {self.prog} {' '.join(map(_shown, positional))} [options]",
            "",
            *textwrap.wrap(str(self.description), width),
            "",
            *(line for action in described for line in _entry(action, width)),
        ]
        if shared:
            text = f"and the options of every task (see {SHARED_HELP}): {' '.join(shared)}"
            lines += ["", *textwrap.wrap(text, width, break_on_hyphens=False)]
        return "\n".join(lines)


def parser_of(prog: str, description: str, module: ModuleType, own: type | None) -> Parser:
    """Return the parser of a verb: the parameters of `run` in its module, and the fields of `own`.

    A bool that is False by default is a switch. `ARGUMENTS` of the module declare positionals that are optional or repeated.
    """
    parser = Parser(prog=prog, description=description, exit_on_error=False)
    declared: dict[str, dict[str, Any]] = getattr(module, "ARGUMENTS", {})
    if "set" in inspect.signature(module.run).parameters:
        declared = declared | {"--set": SET}
    skipped: set[str | int] = {"verb", "options", *(name.removeprefix("--") for name in declared)}
    parser.add_function_arguments(module.run, as_positional=True, skip=skipped)
    if own is not None:
        parser.add_class_arguments(own)
    for flag, options in declared.items():
        parser.add_argument(flag, **options)
    return parser


def read_words(parser: Parser, words: list[str]) -> dict[str, Any]:
    """Return the values of a verb's words.

    Raises:
        ConfigError: A word is unknown, missing or no such value.
    """
    try:
        values: dict[str, Any] = parser.parse_args(_normal(parser, words)).as_dict()
    except ArgumentError as error:
        raise ConfigError(_sentence(parser, " ".join(str(error).split()))) from None
    for name, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int) and abs(one) > LARGEST_INT:
                raise ConfigError(f"--{name.replace('_', '-')}: an integer of {one.bit_length()} bits; give at most 63")
            if isinstance(one, float) and not math.isfinite(one):
                raise ConfigError(f"--{name.replace('_', '-')} {one}: give a finite number")
    return values


def _normal(parser: Parser, words: list[str]) -> list[str]:
    """Spell flags as the parser does, put a single value of a list into brackets, and give a switch its value.

    Words that belong to no flag come first: argparse counts an optional one as left out if it follows a flag.
    """
    known = {_flag(action): action for action in parser._actions if action.option_strings}
    plain, flags, left = list[str](), list[str](), list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--":
            return [*flags, word, *plain, *left]
        if not flag.startswith("--") or " " in flag:
            plain.append(word)
            continue
        action = known.get(flag.replace("_", "-"))
        takes = ("true", "false") if action is not None and _is_switch(action) else left[:1]
        if not equals and left and left[0] in takes and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        elif not equals and action is not None and _is_switch(action):
            equals, value = "=", "true"
        if action is not None:
            flag = action.option_strings[0]
            if equals and list in _types(getattr(action, "_typehint", None)):
                value = _listed(value)
        flags.append(flag + equals + value)
    return [*plain, *flags]


def _is_switch(action: Any) -> bool:
    return getattr(action, "_typehint", None) is bool and action.default is False


def _listed(value: str) -> str:
    return value if value.startswith("[") or value in ("", "null") else f"[{value}]"


def _types(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows; list and dict without those of their items."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [get_origin(member) if get_origin(member) in (list, dict) else member for member in members]


def _sentence(parser: Parser, text: str) -> str:
    advice = f"; see {parser.prog} --help"
    if wrong := re.match(r'Parser key "([^"]+)": .*(?:Got|Given) value: (.*)$', text):
        action = next((action for action in parser._actions if action.dest == wrong[1]), None)
        if action is not None:
            expected = " or ".join(filter(None, map(_expected, _types(getattr(action, "_typehint", None)))))
            return f"{_flag(action)} {short(wrong[2])}: expected {expected}{advice}"
    if missing := re.match(r"the following arguments are required: (.*)", text):
        names = {action.dest: _shown(action) for action in parser._actions}
        return f"give {', '.join(names.get(name, name) for name in missing[1].split(', '))}{advice}"
    if unknown := re.match(r"unrecognized arguments: (--[^ =]+)(?:[ =]([^ -]\S*))?", text, re.IGNORECASE):
        name = unknown[1].removeprefix("--").replace("-", "_")
        section = next((key for key, fields in _recipe_fields(parser) if name in fields), None)
        if section:
            return f"no option {short(unknown[1])}; use --set {section}.{name}={unknown[2] or 'VALUE'}"
        flags = [_flag(action) for action in parser._actions if action.option_strings]
        near = get_close_matches(unknown[1].replace("_", "-"), flags, n=1)
        return f"no option {short(unknown[1])}{f'; did you mean {near[0]}?' if near else advice}"
    return f"{text}{advice}"


def _recipe_fields(parser: Parser) -> list[tuple[str, Any]]:
    """Return the fields of a recipe's sections, those that the shipped demo names, where a command takes --set."""
    if not any(action.dest == "set" for action in parser._actions):
        return []
    document = read_recipe("demo")
    nested = [(f"training.{key}", value) for key, value in document["training"].items() if isinstance(value, dict)]
    return [*((key, value) for key, value in document.items() if isinstance(value, dict)), *nested]


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): ""}
    if kind in names:
        return names[kind]
    return "a list such as [1,2]" if kind is list else "a mapping such as {name: value}"


def _entry(action: Any, width: int) -> list[str]:
    text = action.help or ""
    says_default = re.search(r"by default|Defaults? ", text)
    has_default = action.default is not False and action.default not in (None, "", []) and not says_default
    if has_default and action.option_strings:
        text = f"{text.rstrip('.')} (default: {str(action.default).replace(' ', '')})"
    head = f"  {_shown(action)}"
    indent = " " * HELP_COLUMN
    if len(head) > HELP_COLUMN - 2:
        return [head, *textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)]
    return textwrap.wrap(text, width, initial_indent=f"{head:<{HELP_COLUMN}}", subsequent_indent=indent) or [head]


def _flag(action: Any) -> str:
    return str(action.option_strings[0].replace("_", "-").rstrip("-") if action.option_strings else action.dest.upper())


def _shown(action: Any) -> str:
    """Return a flag with a word for its value, or the name of a positional."""
    kind: Any = next((one for one in _types(getattr(action, "_typehint", None)) if one is not type(None)), None)
    if not action.option_strings:
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
        name = _flag(action).removesuffix("S" if action.nargs else "")
        return f"[{name}]" if action.nargs == "?" else f"{name}..." if action.nargs else name
    if _is_switch(action):
        return _flag(action)
    if get_origin(kind) is Literal:
        return f"{_flag(action)} {'|'.join(map(str, get_args(kind)))}"
    words = {int: "N", float: "X", bool: "true|false", list: "A,B,...", dict: "{...}"}
    return f"{_flag(action)} {words.get(kind) or action.metavar or action.dest.upper().rpartition('_')[2]}"

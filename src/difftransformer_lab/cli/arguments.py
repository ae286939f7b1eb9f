"""The words of a command: how the signature of a verb becomes a parser and a page of help, and arguments that several share."""

import argparse
import dataclasses
import inspect
import math
import os
import re
import shutil
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
"""Or as many as there are cores; runs of other machines can be repeated with their number of threads."""
# The argument `set` of every command with a recipe.
SET: dict[str, Any] = {
    "action": "append",
    "metavar": "KEY=VALUE",
    "help": "Replace a value of the recipe, such as training.steps=100 or model.attention_type=softmax. May be repeated.",
}


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads that torch uses, unless it is None."""
    check_positive(threads=threads)
    if threads is not None:
        if threads > (most := max(MOST_THREADS, os.cpu_count() or 1)):
            raise ConfigError(f"--threads {threads}: give at most {most}")
        import torch

        torch.set_num_threads(threads)


def check_positive(**flags: int | None) -> None:
    """Check that flags are at least 1 or None."""
    for name, value in flags.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give at least 1")


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: choose one of {', '.join(DEVICES)}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")


def check_text(text: str, where: str = "the prompt") -> None:
    """Check that a text is Unicode and not empty."""
    if not text.strip():
        raise ConfigError(f"{where} is empty; give a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: not UTF-8; convert it") from None


def parser_of(prog: str, description: str, module: ModuleType, own: type | None) -> ArgumentParser:
    """Make the parser of a verb from the parameters of `run` in its module and the fields of `own`.

    `ARGUMENTS` of the module declare positionals that are optional or repeated.
    """
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False, allow_abbrev=False)
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


def help_page(parser: ArgumentParser, own: type | None = None) -> str:
    """Describe a verb. A verb with options of its own describes them, and only names the shared flags."""
    named = {field.name for field in dataclasses.fields(own)} if own else set()
    actions = [action for action in parser._actions if action.dest != "help"]
    positional = [action for action in actions if not action.option_strings]
    flags = [action for action in actions if action.option_strings]
    described = [*positional, *(action for action in flags if not named or action.dest in named)]
    shared = [_flag(action) for action in flags if action not in described]
    width = min(100, max(80, shutil.get_terminal_size((100, 24)).columns))
    page = _Help(parser.prog, max_help_position=HELP_COLUMN, width=width + 2)  # argparse keeps two columns free
    page.add_usage(f"{parser.prog} {' '.join(map(_shown, positional))} [options]", [], [], "usage: ")
    page.add_text(parser.description)
    page.start_section("arguments")
    page.add_arguments(described)
    page.end_section()
    if shared:
        page.add_text(f"and the options of every task (see {SHARED_HELP}): {' '.join(shared)}")
    return page.format_help().rstrip()


class _Help(argparse.HelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        return _shown(action)

    def _expand_help(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_empty = action.default is False or action.default in (None, "", [])
        if is_empty or not action.option_strings or re.search(r"by default|Defaults? ", text):
            return text
        return f"{text.rstrip('.')} (default: {str(action.default).replace(' ', '')})"


def read_words(parser: ArgumentParser, words: list[str]) -> dict[str, Any]:
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


def _normal(parser: ArgumentParser, words: list[str]) -> list[str]:
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
        is_switch = action is not None and _is_switch(action)
        if not equals and left and not left[0].startswith("--") and (not is_switch or left[0] in ("true", "false")):
            equals, value = "=", left.pop(0)
        elif not equals and is_switch:
            equals, value = "=", "true"
        if action is not None:
            flag = action.option_strings[0]
            is_list = any(get_origin(kind) is list for kind in _kinds(action))
            if is_list and value and value != "null" and not value.startswith("["):
                value = f"[{value}]"
        flags.append(flag + equals + value)
    return [*plain, *flags]


def _sentence(parser: ArgumentParser, text: str) -> str:
    """Say in a sentence of our own what jsonargparse found wrong, and what is allowed."""
    advice = f"; see {parser.prog} --help"
    actions = {action.dest: action for action in parser._actions}
    if (wrong := re.match(r'Parser key "([^"]+)": .*(?:Got|Given) value: (.*)$', text)) and wrong[1] in actions:
        expected = " or ".join(filter(None, map(_expected, _kinds(actions[wrong[1]]))))
        return f"{_flag(actions[wrong[1]])} {short(wrong[2])}: expected {expected}{advice}"
    if missing := re.match(r"the following arguments are required: (.*)", text):
        return f"give {', '.join(_shown(actions[name]) for name in missing[1].split(', '))}{advice}"
    if unknown := re.match(r"unrecognized arguments: (--[^ =]+)(?:[ =]([^ -]\S*))?", text, re.IGNORECASE):
        name = unknown[1].removeprefix("--").replace("-", "_")
        if name in actions:
            return f"no option {short(unknown[1])}: {_flag(actions[name])} stands without a flag{advice}"
        if section := next((key for key, fields in _recipe_sections(parser) if name in fields), None):
            return f"no option {short(unknown[1])}; use --set {section}.{name}={unknown[2] or 'VALUE'}"
        flags = [_flag(action) for action in parser._actions if action.option_strings]
        near = get_close_matches(unknown[1].replace("_", "-"), flags, n=1)
        return f"no option {short(unknown[1])}{f'; did you mean {near[0]}?' if near else advice}"
    return f"{text}{advice}"


def _recipe_sections(parser: ArgumentParser) -> list[tuple[str, Any]]:
    """List the sections of the shipped recipe `demo` and their fields, where a command takes --set."""
    if not any(action.dest == "set" for action in parser._actions):
        return []
    document = read_recipe("demo")
    nested = [(f"training.{key}", value) for key, value in document["training"].items() if isinstance(value, dict)]
    return [*((key, value) for key, value in document.items() if isinstance(value, dict)), *nested]


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return f"a list of {', '.join(get_args(item))}" if get_origin(item) is Literal else "a list such as [1,2]"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): ""}
    return names.get(kind, "a mapping such as {name: value}")


def _kinds(action: Any) -> tuple[Any, ...]:
    annotation = getattr(action, "_typehint", None)
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_switch(action: Any) -> bool:
    """Whether an argument is a bool that is False by default."""
    return getattr(action, "_typehint", None) is bool and action.default is False


def _flag(action: Any) -> str:
    return str(action.option_strings[0].replace("_", "-").rstrip("-") if action.option_strings else action.dest.upper())


def _shown(action: Any) -> str:
    """Write a flag with a word for its value, or the name of a positional."""
    kind: Any = next((one for one in _kinds(action) if one is not type(None)), None)
    choices = "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    if not action.option_strings:
        name = _flag(action).removesuffix("S" if action.nargs else "")
        return choices or (f"[{name}]" if action.nargs == "?" else f"{name}..." if action.nargs else name)
    words = {int: "N", float: "X", bool: "true|false", list: "A,B,... or [...]", dict: "{...}"}
    value = choices or words.get(get_origin(kind) or kind) or action.metavar or action.dest.upper().rpartition("_")[2]
    return _flag(action) if _is_switch(action) else f"{_flag(action)} {value}"

"""Which command comes after another: the last line that a command prints where it ended well."""

import importlib
import inspect
import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from difftransformer.errors import ConfigError
from difftransformer.reading import parse_yaml

from .console import show

MORE_SEEDS = 2


def suggest(verb: str, values: Mapping[str, Any]) -> None:
    """Print the command that comes after one that has ended, if one does.

    Args:
        verb: The command that has ended.
        values: Its arguments by name.
    """
    with suppress(ConfigError):  # a recipe that has been removed meanwhile
        if words := _words(verb, values):
            show(f"Next: {shlex.join(['difftransformer', *words])}")


def _words(verb: str, values: Mapping[str, Any]) -> list[str]:
    out: Any = values.get("out")
    recipe: Any = values.get("recipe")
    model: Any = values.get("model") or next(iter(values.get("models") or ()), None)
    changes = [word for change in values.get("set") or () for word in ("--set", change)]
    match verb:
        case "plan":
            return ["train", recipe, *changes]
        case "train" if values["dry_run"]:
            from ..studies import load_recipe

            return [] if load_recipe(recipe, values["set"]).missing() else _again("train", values, dry_run=False)
        case "train":
            from ..studies import load_recipe

            return ["eval", out or f"runs/{load_recipe(recipe, values['set']).name}", *_device(values)]
        case "tokenize":
            return ["train", "demo", *_data(values)]
        case "demo":
            return ["compare", "demo", "--out", "reports/demo-full"]
        case "compare":
            from ..studies import load_recipe

            seeds = values["seeds"] or load_recipe(recipe, values["set"]).compare.seeds
            return _again("compare", values, seeds=seeds + MORE_SEEDS)
        case "study" if values["dry_run"]:
            return _again("study", values, dry_run=False)
        case "study":
            return ["report", values["results"]]
        case "report":
            return ["study", "start", "--dry-run"]
        case "upcycle":
            return ["report", out] if values["train"] else ["eval", "perplexity", model, out]
        case "convert":
            return ["check", "causality", values["target"]]
        case "export":
            return ["check", "causality", out]
        case "check causality":
            return ["eval", "needle", model, *_device(values)]
        case "generate" | "eval":
            return ["maps", model, *_device(values)]
        case "maps":
            return ["eval", "needle", model, *([values["beside"]] if values["beside"] else []), *_device(values)]
        case "info" if recipe is None and str(values.get("model", "")).endswith((".yaml", ".yml")):
            return ["train", values["model"]]
        case "doctor" | "build-kernels":
            return ["demo"]
        case _ if verb.startswith("eval "):
            return ["maps", model, *_device(values)]
    return []


def _again(verb: str, values: Mapping[str, Any], **changed: Any) -> list[str]:
    """Return the words of the command that has ended, with other values of some arguments."""
    words = [verb]
    for name, argument in inspect.signature(importlib.import_module(f".{verb}", __package__).run).parameters.items():
        value, flag = (dict(values) | changed).get(name, argument.default), f"--{name.replace('_', '-')}"
        if argument.default is argument.empty:
            words.append(str(value))
        elif isinstance(value, list):
            words += [word for one in value for word in (flag, str(one))]
        elif value != argument.default:
            words += [flag] if value is True else [flag, str(value)]
    return words


def _device(values: Mapping[str, Any]) -> list[str]:
    return [] if values.get("device", "cpu") == "cpu" else ["--device", values["device"]]


def _data(values: Mapping[str, Any]) -> list[str]:
    """Return the changes of the recipe `demo` with which it reads the shards that `tokenize` has made."""
    from difftransformer.data import DataConfig

    from ..studies import load_recipe

    own = {name: values[name] for name in ("source", "tokenizer", "vocab_size", "validation_share", "split_seed")}
    made, read = DataConfig(**own, folder=values["out"]), load_recipe("demo").data
    different = {name: value for name, value in vars(made).items() if value != getattr(read, name)}
    return [word for name, value in different.items() for word in ("--set", f"data.{name}={_as_yaml(value)}")]


def _as_yaml(value: Any) -> str:
    """Return the shortest text that YAML reads as a value."""
    with suppress(ValueError):
        if parse_yaml(str(value)) == value:
            return str(value)
    return json.dumps(value)

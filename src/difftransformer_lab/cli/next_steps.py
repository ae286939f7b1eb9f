"""Which command comes after another: the last line that a command prints where it ended well."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from difftransformer.errors import ConfigError

from ..recipe_files import read_recipe
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
    match verb:
        case "plan":
            return ["train", recipe]
        case "train" if values["dry_run"]:
            from ..studies import load_recipe

            changes = [word for change in values["set"] or () for word in ("--set", change)]
            return [] if load_recipe(recipe, values["set"]).missing() else ["train", recipe, *changes]
        case "train":
            return ["eval", out or f"runs/{read_recipe(recipe)['name']}"]
        case "tokenize":
            return ["train", "demo", "--set", f"data.source={values['source']}"]
        case "demo":
            return ["compare", "demo", "--out", "reports/demo-full"]
        case "compare":
            seeds = values["seeds"] or read_recipe(recipe).get("compare", {}).get("seeds", 1)
            return ["compare", recipe, "--seeds", str(seeds + MORE_SEEDS), *(["--out", out] if out else [])]
        case "study" if values["dry_run"]:
            return ["study", values["study"], "--preset", values["preset"]]
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
            return ["eval", "needle", model]
        case "generate" | "eval":
            return ["maps", model]
        case "maps":
            return ["eval", "needle", model, *([values["beside"]] if values["beside"] else [])]
        case "info" if recipe is None and str(values.get("model", "")).endswith((".yaml", ".yml")):
            return ["train", values["model"]]
        case "doctor" | "build-kernels":
            return ["demo"]
        case _ if verb.startswith("eval "):
            return ["maps", model]
    return []

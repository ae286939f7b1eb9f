"""What makes two runs the same."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from difftransformer.typed import ASIDE, plain

from .recipe import Recipe

IDENTITY_VERSION = 1


def identity(recipe: Recipe) -> str:
    """Return a SHA-256 of what a run trains and evaluates: recipes with equal ones give the same run on the same data.

    It is computed from the recipe as this release reads it, so a new option keeps the identity of earlier runs.
    """
    document: dict[str, Any] = plain(recipe, without=[ASIDE])
    document["training"]["compile"] = False  # it was part of the identity at first
    document["evaluation"] = [[spec.name, spec.task, asdict(spec.built())] for spec in recipe.evaluation]
    text = json.dumps([IDENTITY_VERSION, document], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()

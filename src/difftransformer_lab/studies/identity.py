"""What makes two runs the same, and what makes them take as long."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from difftransformer.typed import ASIDE, plain

from .recipe import Recipe

IDENTITY_VERSION = 1


def identity(recipe: Recipe) -> str:
    """Return a SHA-256 of what a run trains and evaluates: recipes with equal ones give the same run on the same data.

    It is computed from the recipe as this release reads it, so that an option that is new keeps the runs before it.
    """
    return _sha256(_document(recipe))


def kind(recipe: Recipe) -> str:
    """Return a SHA-256 of what a run's time depends on: all that `identity` covers but the seed and the learning rate."""
    document = _document(recipe)
    document["training"]["seed"], document["training"]["optimizer"]["learning_rate"] = 0, 1.0
    return _sha256(document)


def _document(recipe: Recipe) -> dict[str, Any]:
    document: dict[str, Any] = plain(recipe, without=[ASIDE])
    document["training"]["compile"] = False  # of which it was a part at first
    document["evaluation"] = [[spec.name, spec.task, asdict(spec.built())] for spec in recipe.evaluation]
    return document


def _sha256(document: dict[str, Any]) -> str:
    text = json.dumps([IDENTITY_VERSION, document], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()

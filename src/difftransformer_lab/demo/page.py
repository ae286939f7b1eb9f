"""The page of the demo: learning curves, one example with the map of each model on it, and what this shows."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..printable import write_page_text
from .live import Run
from .recall import ARMS, LAZY, TASK, VALUES, Row
from .result import Summary

WIDTH, HEIGHT = 640, 240  # of the curves
CELL = 6  # of a map
FAINTEST = 0.01  # smaller weights are not drawn


def write_page(runs: Sequence[Run], stored: dict[str, Summary], steps: int, folder: Path, maps: str) -> Path:
    """Write index.html to `folder`, and return its path. `maps` is the address of the page with the shipped models' maps."""
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string((files(__package__) / "page.html").read_text(encoding="utf-8"))
    first: Row = runs[0].row
    html = template.render(
        models=[_model(run, steps) for run in runs],
        tokens=[
            {"text": name(token), "kind": kind(token), "found": i in first.found}
            for i, token in enumerate(first.tokens)
        ],
        key=name(first.tokens[-1]),
        answer=name(first.answer),
        stored=stored,
        steps=steps,
        lazy=LAZY,
        noise=TASK.noise_share,
        size={"width": WIDTH, "height": HEIGHT, "map": CELL * len(first.tokens), "cell": CELL},
        maps=maps,
    )
    path = folder / "index.html"
    write_page_text(path, html)
    return path


def kind(token: int) -> str:
    """Return "key", "value" or "noise"."""
    return "key" if token < VALUES.start else "value" if token < VALUES.stop else "noise"


def name(token: int) -> str:
    """Name a token: keys are letters, values are digits, noise is a dot."""
    return {"key": chr(ord("A") + token), "value": str(token - VALUES.start), "noise": "·"}[kind(token)]


def _model(run: Run, steps: int) -> dict[str, Any]:
    points = {0: 0.0} | run.curve
    row: Row = run.row
    cells = [
        {"x": CELL * k, "y": CELL * q, "weight": abs(float(weight)), "sign": "plus" if weight > 0 else "minus"}
        for q, weights in enumerate(row.weights)
        for k, weight in enumerate(weights)
        if abs(weight) >= FAINTEST
    ]
    return {
        "arm": run.arm,
        "label": ARMS[run.arm].label,
        "accuracy": run.accuracy,
        "line": " ".join(f"{WIDTH * step / steps:.1f},{HEIGHT * (1 - share):.1f}" for step, share in points.items()),
        "given": name(row.given),
        "head": row.head + 1,
        "share": row.share,
        "cells": cells,
        "found": row.found,
    }

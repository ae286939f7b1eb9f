"""The page of runs that are going on: drawn from their metrics files again and again, and loaded anew by the browser itself."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from ..plots.style import COLOURS, MORE_COLOURS, Drawing
from .page import Lead, Page, write_page
from .tables import Group, Table, names, significant
from .words import counted

REFRESH_SECONDS = 5
MOST_RUNS = 12
_MOST_POINTS = 200
_WIDE, _NARROW, _HEIGHT, _LEFT, _BELOW = 720, 340, 260, 48, 34


_NOTHING: tuple[Mapping[str, tuple[Path, int]], int, int] = ({}, 0, 0)


class LivePage:
    """`folder/index.html` while runs go on. What the command writes there at its end takes its place."""

    def __init__(self, folder: Path, title: str) -> None:
        self.folder, self.title = folder, title
        self._drawn, self._last = -float(REFRESH_SECONDS), _NOTHING

    def update(self, runs: Mapping[str, tuple[Path, int]], ended: int, of: int) -> None:
        """Draw the page from the metrics files of runs, if it is old.

        Args:
            runs: Metrics file and number of steps of each run, by its name, those that are going on first.
        """
        self._last = (runs, ended, of)
        if ended == of or time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._draw(runs, ended, of, "going on")  # others may follow when all of these have ended

    def stop(self, is_well: bool) -> None:
        """Load the page no more, and say so unless the command ended well; `update` goes on when the runs do."""
        if self._last is not _NOTHING:
            self._draw(*self._last, "ended" if is_well else "stopped")

    def _draw(
        self,
        runs: Mapping[str, tuple[Path, int]],
        ended: int,
        of: int,
        state: Literal["going on", "ended", "stopped"],
    ) -> None:
        rows: list[list[str]] = []
        lines: dict[str, list[tuple[float, float]]] = {}
        for name, (path, steps) in list(runs.items())[:MOST_RUNS]:
            metrics = _read(path)
            losses = [(row["step"], row["loss_nats"]) for row in metrics if row.get("loss_nats") is not None]
            held_out = [row["validation_loss_nats"] for row in metrics if "validation_loss_nats" in row]
            if losses:
                lines[name] = losses
                validation = significant(held_out[-1]) if held_out else ""
                rows.append([name, f"{losses[-1][0]:,}", f"{steps:,}", significant(losses[-1][1]), validation])
        losses_groups = map(Group, ("training loss (nats/token)", "held-out loss (nats/token)"))
        groups = (*names("run"), Group("step", ("done", "of"), "of"), *losses_groups)
        table = Table("losses_so_far", "Losses so far", groups, rows) if rows else None
        answer = f"{ended} of {counted(of, 'run')} ended."
        if state == "going on":
            answer += f" This page loads itself anew every {REFRESH_SECONDS} seconds."
        elif state == "stopped":
            answer += " Stopped: the same command continues. Load this page again when it does."
        drawing = None
        if lines:
            caption = "Training loss of each run. The first steps may lie above the drawn range."
            svg, narrow = (_svg(lines, width) for width in (_WIDE, _NARROW))
            drawing = Drawing("losses_so_far", "Losses so far", caption, svg, narrow, None)
        lead = Lead(answer=answer, table=table, drawing=drawing)
        title = f"{self.title}, {'trained' if state == 'ended' else 'while it trains'}"
        page = Page(title=title, about="", lead=lead, sections=[])
        write_page(page, self.folder, refresh_seconds=REFRESH_SECONDS if state == "going on" else None)
        self._drawn = time.monotonic()


def _read(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics file; its last line may be on its way."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _svg(lines: Mapping[str, list[tuple[float, float]]], width: int) -> str:
    """Draw a loss curve for each run; by hand, since matplotlib would take time from the training."""
    last = max(step for points in lines.values() for step, _ in points)
    settled = [loss for points in lines.values() for step, loss in points if step >= 0.1 * last]
    low, high = min(settled), max(settled)
    room = (high - low) or 1.0
    parts = []
    for loss in (low + room * place / 4 for place in range(5)):
        y = _y(loss, low, room)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{width}" style="stroke: #e3e3e3; fill: none"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{loss:.2f}", "end"))
    parts.append(_text((_LEFT + width) / 2, _HEIGHT - 4, f"step (the last one is {last:,})", "middle"))
    for index, (name, points) in enumerate(lines.items()):
        every = max(1, len(points) // _MOST_POINTS)
        places = [
            f"{_LEFT + (width - _LEFT) * step / last:.1f} {_y(min(loss, high), low, room):.1f}"
            for step, loss in (*points[::every], points[-1])
        ]
        colour = (COLOURS + MORE_COLOURS)[index % len(COLOURS + MORE_COLOURS)].lower()
        parts.append(f'<path d="M{"L".join(places)}" style="stroke: {colour}; fill: none; stroke-width: 1.6"/>')
        parts.append(f'<path d="M{width - 12} {12 + 16 * index}h10v10h-10z" style="fill: {colour}"/>')
        parts.append(_text(width - 18, 21 + 16 * index, name, "end"))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}">{"".join(parts)}</svg>'


def _y(loss: float, low: float, room: float) -> float:
    return 8 + (_HEIGHT - _BELOW - 8) * (1 - (loss - low) / room)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    style = f"font: 12px 'DejaVu Sans', sans-serif; text-anchor: {anchor}; fill: #1a1a1a"
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{escape(words)}</text>'

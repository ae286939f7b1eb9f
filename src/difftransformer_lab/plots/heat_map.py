"""Heat maps of a matrix, with its first row on top."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes


def matrix(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return rows of different lengths as a matrix, with NaN behind the shorter ones."""
    cells = np.full((len(rows), max(map(len, rows))), np.nan)
    for index, row in enumerate(rows):
        cells[index, : len(row)] = row
    return cells


def heat_map(ax: Axes, cells: np.ndarray, colours: Any, low: float, high: float, **options: Any) -> Any:
    """Draw a matrix, without its NaN cells, and return the image for a colour bar."""
    edges = [np.arange(count + 1) - 0.5 for count in reversed(cells.shape)]
    drawn = np.ma.masked_invalid(cells)
    image = ax.pcolormesh(*edges, drawn, cmap=colours, vmin=low, vmax=high, **options)
    ax.set_ylim(len(cells) - 0.5, -0.5)
    ax.grid(False)
    return image

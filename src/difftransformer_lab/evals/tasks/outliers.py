"""The largest and the median of attention logits and hidden states.

These are the activation outliers of arXiv:2410.05258 section 3.7, Table 5. Logits are |q . k| / sqrt(d) of every query and
every key that it may attend to, in all heads and layers; for differential attention the logits of both maps together. Hidden
states are the output of each layer, after both residual additions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from difftransformer.errors import DataError

from ...plots import handles, legend_above, line_style, note, panels, select
from ...results import Measurement, TaskResult
from ..engine import Scores
from ..probes import BINS, Magnitudes, ProbeTask
from ..prompts.texts import TaskContext, token_stream, window_start
from ..registry import TaskKind, at_least, register
from ..scores import details, single

PARTS = 20
"""The rows are split into this number of requests, so that an interrupted run loses little and resumes cheaply."""

DEFAULT_WINDOW = 2048
_PAPER_RANKS = (1, 2, 3, 10, 100)
MEASURED = {"logits": "attention logits", "hidden": "hidden states"}

_CHOICES = [
    "Pairs of a query and a later key are left out; the paper does not say whether it counts them.",
    "The text is the one named in the options; the paper does not name its text. Rows are cut from it without overlap, at "
    "random places, and may begin in the middle of a document.",
    "The largest values are exact. The median is that of the values rounded to bf16: exact for the hidden states of a bf16 "
    "model, otherwise within a relative error of 2^-8.",
    "Logits are computed in fp32 from the model's queries and keys, whatever its dtype.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Outliers in any model.

    Attributes:
        text: The text to read: python-stdlib, a text file, a folder of text files, or hf:NAME[:CONFIG][:SPLIT].
        tokens: Tokens in total, rounded down to whole rows; the paper has 400,000.
        window: Tokens of a row; the model's context by default, at most 2048.
        largest: Number of largest values to report.
        seed: Seed of the places of the rows.
        add_bos_token: Whether each window begins with the token that begins texts, in place of its first one; by default if
            the tokenizer itself begins a text so.
    """

    text: str = "python-stdlib"
    tokens: int = 400_000
    window: int | None = None
    largest: int = 100
    seed: int = 0
    add_bos_token: bool | None = None

    def __post_init__(self) -> None:
        at_least(self, 2, "window")
        at_least(self, 1, "tokens", "largest")
        at_least(self, 0, "seed")


class OutliersTask(ProbeTask):
    """Rows of text, and the largest values inside the model as it reads them."""

    def __init__(self, options: Options, context: TaskContext) -> None:
        self.options, self.data_name = options, options.text
        begin, begun = window_start(context.tokenizer, options.add_bos_token)
        self.choices = [f"Documents are separated by {context.tokenizer.end_of_text_token!r}.", begun, *_CHOICES]
        window = options.window or min(context.context_tokens, DEFAULT_WINDOW)
        wanted = max(1, options.tokens // window)
        stream = token_stream(context, options.text)
        there = len(stream) // window
        if there < wanted:
            raise DataError(
                f"{options.text}: {len(stream)} tokens, and {wanted * window} are needed for {wanted} rows of {window}; "
                "name a longer text or ask for fewer --tokens"
            )
        chosen = np.sort(np.random.default_rng(options.seed).permutation(there)[:wanted])
        own = [stream[place * window : (place + 1) * window].tolist() for place in chosen]
        rows = [(*begin, *row[len(begin) :]) for row in own]
        parts = [rows[part::PARTS] for part in range(min(PARTS, wanted))]
        self.requests = [Magnitudes(tuple(part), options.largest) for part in parts]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Return the largest values by rank and the median: first the rows of the paper's table, then the rest of the curve."""
        first: list[Measurement] = []
        others: list[Measurement] = []
        unit = "absolute value"
        for key, name in MEASURED.items():
            count, largest, median = merge([answer[key] for answer in answers], self.options.largest)
            for rank in ranks(len(largest)):
                row = single(name, unit, largest[rank - 1], count, {"rank": rank}, "lower")
                (first if rank in _PAPER_RANKS else others).append(row)
            first.append(single(name, unit, median, count, {"rank": "median"}))
        return Scores(measurements=first + details(others), items=[])


def ranks(largest: int) -> list[int]:
    """Return the ranks of the curve: 1 to 10, then by tens to 100, by hundreds to 1000 and so on, and the last."""
    rounded = {digit * 10**power for power in range(len(str(largest))) for digit in range(1, 10)}
    return sorted({rank for rank in rounded if rank < largest} | {largest})


def merge(summaries: Sequence[dict[str, Any]], largest: int) -> tuple[int, list[float], float]:
    """Merge several collections of values: their number, the largest ones in descending order, and the median.

    Args:
        summaries: `probes.magnitudes.Magnitude.summary` of each collection.
        largest: Number of largest values to return; at most what each collection kept.
    """
    counts = np.zeros(BINS, np.int64)
    for summary in summaries:
        counts[summary["bins"]] += summary["counts"]
    total, below = int(counts.sum()), counts.cumsum()
    middle = np.searchsorted(below, [(total - 1) // 2, total // 2], side="right")
    values = (middle.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    top = sorted((value for summary in summaries for value in summary["largest"]), reverse=True)
    return total, top[:largest], float(values.mean())


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the values over their rank, a curve for each model, with the median as a thin line; logits and hidden states."""
    figure, (axes,) = panels(4.0, 1, 2)
    for ax, kind in zip(axes, MEASURED.values(), strict=True):
        medians = [select(result, kind, rank="median")[0].value for result in results]
        for index, (result, median) in enumerate(zip(results, medians, strict=True)):
            top = sorted((row.at["rank"], row.value) for row in select(result, kind) if row.at["rank"] != "median")
            style = line_style(index)
            ax.plot(*zip(*top, strict=True), **style, markersize=4)
            ax.axhline(median, color=style["color"], linewidth=0.9, linestyle=style["linestyle"])
            offset, side = ((-3, 3), "bottom") if median == max(medians) else ((-3, -3), "top")
            look = {"ha": "right", "va": side, "fontsize": 8, "color": style["color"]}
            note(ax, f"median {median:.3g}", (1.0, median), at_right_edge=True, xytext=offset, **look)
        ax.set(xscale="log", yscale="log", xlabel="rank, from the largest")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())
        ax.set_title(kind, loc="left")
    figure.axes[0].set_ylabel("absolute value")
    legend_above(figure, handles(results))
    counts = ", ".join(f"{select(result, MEASURED['logits'], rank='median')[0].n:.3g}" for result in results)
    caption = (
        f"The largest absolute values in order, and the median of all as a line, over {results[0].options['tokens']:,} "
        f"tokens of {results[0].data.name} ({counts} logits)."
    )
    return "Activation outliers", caption, figure


register(TaskKind(name="outliers", doc=__doc__, options=Options, make=OutliersTask, draw=draw))

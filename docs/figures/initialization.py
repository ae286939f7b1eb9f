"""Draw the figure of docs/initialization.md: `python docs/figures/initialization.py` writes it beside this script.

It shows docs/results/start-rms.json, which the script measures first with --measure: some minutes on two cores.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from difftransformer.files import write_text_atomically
from difftransformer.model import DiffTransformerConfig
from difftransformer.model.start_sizes import TOKENS, VOCABULARY, start_sizes
from difftransformer_lab.plots import COLOURS, INK, MARKERS, REFERENCE_COLOUR, STYLE
from difftransformer_lab.results import read_document

FOLDER = Path(__file__).parent
RESULT = FOLDER.parent / "results" / "start-rms.json"
FIGURE = FOLDER / "start-rms.svg"
HEADS = {64: 4, 128: 4, 256: 4, 320: 10, 512: 8, 768: 12, 1024: 16, 1536: 16, 2048: 16, 3072: 24}  # by width
STARTS = {"fan_in": "initialization: fan_in", "normal": "initialization: normal, 0.02"}
ARMS: dict[str, dict[str, Any]] = {
    "DIFF": {"attention_type": "diff"},
    "DIFF without norm": {"attention_type": "diff", "head_norm": "none"},
    "V2": {"attention_type": "diff_v2"},
    "Transformer": {"attention_type": "softmax"},
}
LOOKS = {
    "DIFF": (COLOURS[0], MARKERS[0]),
    "DIFF without norm": (COLOURS[4], MARKERS[4]),
    "V2": (COLOURS[2], MARKERS[2]),
    "Transformer": (REFERENCE_COLOUR, MARKERS[1]),
}
SEEDS = (0, 1, 2)
BAND = (0.2, 2.0)


def config_of(width: int, arm: str, start: str) -> DiffTransformerConfig:
    """Return a model of one layer."""
    shape = {"hidden_size": width, "num_attention_heads": HEADS[width], "num_hidden_layers": 1}
    return DiffTransformerConfig(vocab_size=VOCABULARY, initialization=start, **shape, **ARMS[arm])


def measure() -> None:
    """Measure every model with every seed, and write the result."""
    rows = []
    for width, heads in HEADS.items():
        for start in STARTS:
            for arm in ARMS:
                found = [start_sizes(config_of(width, arm, start), seed=seed) for seed in SEEDS]
                sizes = {
                    f"{branch.name.lower()}_{what}": [float(f"{getattr(one[place], field):.5g}") for one in found]
                    for place, branch in enumerate(found[0])
                    for what, field in (("joins", "stream"), ("rms", "output"))
                }
                rows.append({"width": width, "heads": heads, "start": start, "arm": arm, **sizes})
                print(rows[-1], flush=True)
    result = {
        "command": "python docs/figures/initialization.py --measure",
        "tokens": TOKENS,
        "vocabulary": VOCABULARY,
        "layers": 1,
        "seeds": SEEDS,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
    }
    document = {"kind": "start sizes", "version": 1, "result": result}
    write_text_atomically(RESULT, json.dumps(document, indent=1) + "\n")


def ratio(row: dict[str, Any], branch: str = "attention") -> float:
    """Return a branch over the stream that it joins, as the mean over seeds."""
    pairs = zip(row[f"{branch}_rms"], row[f"{branch}_joins"], strict=True)
    return sum(output / stream for output, stream in pairs) / len(row[f"{branch}_rms"])


def draw() -> Figure:
    """Return attention over the embeddings that it joins, by width: a panel for each start, a line for each arm."""
    _, _, result = read_document(RESULT)
    # As wide as a phone's screen shows with letters that can be read, so the panels are one above the other.
    figure = Figure(figsize=(4.6, 6.0), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for ax, (start, title) in zip(panels, STARTS.items(), strict=True):
        ax.axhspan(*BAND, color="#d9ead9", zorder=0)
        ax.axhline(1, color=INK, linewidth=0.6)
        for arm, (colour, marker) in LOOKS.items():
            rows = [row for row in result["rows"] if (row["start"], row["arm"]) == (start, arm)]
            ax.plot(
                [row["width"] for row in rows], [ratio(row) for row in rows], color=colour, marker=marker, markersize=5
            )
        ax.set_title(title, loc="left")
        ax.set_ylabel("attention / stream")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ticks = [64, 128, 256, 512, 1024, 2048]
    panels[1].set_xticks([*ticks, 3072], [*map(str, ticks), "3072"])
    panels[1].xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    panels[1].set_xlabel("width")
    panels[0].annotate(
        "0.2 to 2", (64, BAND[1]), xytext=(0, -11), textcoords="offset points", fontsize=9.5, color="#3c6e3c"
    )
    handles = [Line2D([], [], color=colour, marker=marker, label=arm) for arm, (colour, marker) in LOOKS.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def main() -> None:
    """Measure if that is wanted, and write the figure as SVG."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the sizes before, and write them")
    if parser.parse_args().measure:
        measure()
    with matplotlib.rc_context(STYLE):
        draw().savefig(FIGURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()

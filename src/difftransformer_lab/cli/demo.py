"""difftransformer demo."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import check_positive
from .console import console, log, show, show_needle_next, show_next

if TYPE_CHECKING:
    from ..demo.live import Run

OUT = "reports/demo"
PAIR = ("demo", "demo-twin")
ANSWER_TOKENS = 3
STEPS = 300
BARS = " ▁▂▃▄▅▆▇█"
LINE_EVERY = 50
"""Steps between two lines of a log, where there is no terminal to draw on."""


def run(out: str = OUT, steps: int = STEPS, seed: int = 0, seeds: int = 1, jobs: int = 3) -> int:
    """Train three small models side by side: one learns to recall among noise, one a little later, one does not.

    It takes about 30 seconds on two cores. Meanwhile the two language models that come with the package answer questions.

    Args:
        out: Folder for the page, its attention maps and, with several seeds, results.json.
        steps: Training steps of each model.
        seed: The first seed.
        seeds: Seeds of each model; 20 take about 8 minutes on two cores.
        jobs: Models that train at the same time.
    """
    check_positive(steps=steps, seeds=seeds, jobs=jobs)
    from ..demo.live import Runs

    folder = Path(out)
    with Runs(("diff", "twin-norm", "twin"), range(seed, seed + seeds), steps, jobs) as runs:
        pair = _ask()
        log(f"\ntraining three models on noisy recall, {steps} steps each")
        with _Screen(steps) as screen:
            finished = runs.wait(screen.show)
    from ..demo import result
    from ..demo.page import write_page

    found, stored = result.summaries(result.curves_of(finished)), result.summaries(result.stored())
    show(f"\nRight answers after {steps} steps: {result.sentence(found)}.")
    show(f"After {STEPS} steps of {stored['diff'].seeds} seeds: {result.sentence(stored)}.")
    show(
        f"In {STEPS} steps DIFF learns it, the Transformer does not. A Transformer with DIFF's norm does: "
        "here the norm is enough."
    )
    if seeds > 1:
        show(f"Results: {result.write(finished, folder)}")
    page = write_page(finished, stored, steps, folder, _write_maps(pair, folder).name)
    show(f"\nReport: {page}: open it in a browser")
    show_needle_next("demo", "demo-twin")
    show_next("maps", "demo", "--beside", "demo-twin")
    return 0


def _ask() -> list[tuple[Any, Any]]:
    """Print what the shipped models answer to three questions, and return each with its tokenizer."""
    log("opening the two language models that come with the package")
    from rich.table import Table

    from difftransformer.hub import open_model, open_tokenizer, source_folder
    from difftransformer.model.transformers_errors import quietly
    from difftransformer.ops import use_backend

    pair: list[tuple[Any, Any]] = []
    with quietly(), use_backend("reference"):  # kernels would have to be compiled
        for name in PAIR:
            with source_folder(name) as source:
                pair.append((open_model(source), open_tokenizer(source)))
        table = Table("the text says", "asked", "right", "DIFF", "Transformer", box=None, pad_edge=False)
        for numbers, asked in QUESTIONS:
            text = ", ".join(f"{city} {number}" for city, number in numbers.items())
            table.add_row(text, asked, numbers[asked], *(_answer(*one, prompt(numbers, asked)) for one in pair))
    console.print(table)
    show(
        "With one number DIFF copies it. Asked for the second of two, it gives the first: it copies and does not look up."
    )
    return pair


QUESTIONS = (
    ({"Lisbon": "42"}, "Lisbon"),
    ({"Lisbon": "42", "Oslo": "63"}, "Lisbon"),
    ({"Lisbon": "42", "Oslo": "63"}, "Oslo"),
)


def prompt(numbers: dict[str, str], asked: str) -> str:
    """Write a text that gives cities a number, then asks for one of them."""
    between = "Here we go. There and back again.\n"
    given = between.join(f"The special magic {city} number is: {number}\n" for city, number in numbers.items())
    return (
        f"The grass is green. The sky is blue. The sun is yellow.\n{given}"
        f"The grass is green. The sky is blue.\nThe special magic {asked} number is: "
    )


def _answer(network: Any, tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = network.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).split("\n")[0].strip()


def _write_maps(pair: list[tuple[Any, Any]], folder: Path) -> Path:
    from difftransformer.ops import use_backend

    from ..explorer import maps

    with use_backend("reference"):
        numbers, asked = QUESTIONS[1]
        text = prompt(numbers, asked)
        return maps(*pair[0], prompt=text, beside=pair[1], answer=numbers[asked], names=PAIR).save(folder / "maps.html")


class _Screen:
    """A curve for each model that grows in the terminal; without a terminal, a line from time to time."""

    def __init__(self, steps: int) -> None:
        from rich.live import Live

        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None
        self._steps, self._said = steps, (-1, 0)

    def __enter__(self) -> "_Screen":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, runs: "Sequence[Run]") -> None:
        """Draw the runs of the seed that is furthest behind."""
        seed = next((run.seed for run in runs if run.row is None), runs[-1].seed)
        runs = [run for run in runs if run.seed == seed]
        if self._live:
            self._live.update(self._curves(runs))
            return
        done = min(max(run.curve, default=0) for run in runs)
        if done and done % LINE_EVERY == 0 and self._said != (seed, done):
            self._said = seed, done
            shares = ", ".join(f"{_label(run)} {run.curve[done]:.0%}" for run in runs)
            log(f"seed {seed}, step {done}: {shares}")

    def _curves(self, runs: "Sequence[Run]") -> Any:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for run in runs:
            curve = "".join(BARS[round(share * (len(BARS) - 1))] for share in run.curve.values())
            step = max(run.curve, default=0)
            table.add_row(_label(run), curve.ljust(12), f"{run.accuracy:4.0%}", f"step {step} of {self._steps}")
        return table


def _label(run: "Run") -> str:
    from ..demo.recall import ARMS

    return ARMS[run.arm].label

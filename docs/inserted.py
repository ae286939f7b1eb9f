"""What pages insert from records when the site is built, so that no number is typed twice.

A page writes `{{ effect("start-laptop", "V2 minus Transformer, each at its best") }}`, and Jinja calls the method of that name
below. Studies are named by folder and file, `start-laptop`; contrasts, figures and arms by their names in the study.
"""

import importlib.util
import math
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import ModuleType

from jinja2 import Environment, StrictUndefined

from difftransformer.attention import VARIANTS
from difftransformer.families import FAMILIES, REFUSED
from difftransformer.model import DiffTransformerConfig, count, matching_width, preset
from difftransformer.typed import unknown_key
from difftransformer_lab.analysis import Finding, StudyAnalysis, analyse, figures, read_records, read_studies, tables
from difftransformer_lab.analysis.compare import Compared, row_of
from difftransformer_lab.analysis.contrasts import DECIDED, FEWEST_SEEDS, TASK, gains, pooled_runs, worth
from difftransformer_lab.analysis.frame import Point
from difftransformer_lab.plots import WIDE_ALONE, Drawing
from difftransformer_lab.results import Bench, PairedDifference, figure_of, read_document, read_result
from difftransformer_lab.statistics import paired_difference
from difftransformer_lab.table import Group, Table, date_words, fixed, names

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
SHORTEST_NOTE = 60  # characters
INSERTION = re.compile(r"\{\{\s*\w+\(")
SMALL = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}  # recipes/variants.yaml
TYPES = ("softmax", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex")

PARTS = (  # each part, the arm that has it, and the arm that does not
    ("DIFF", "diff", "twin"),
    ("its two maps, against a wider one, with the norm", "diff", "wide-norm"),
    ("its two maps, against single ones, with the norm", "diff", "twin-norm"),
    ("its norm, where both have two maps", "diff", "no-norm"),
    ("its maps without norm", "no-norm", "twin"),
    ("its wide heads and norm", "wide-norm", "twin"),
    ("its norm", "twin-norm", "twin"),
    ("DIFF V2", "v2", "twin"),
    ("its subtraction", "v2", "v2-added"),
    ("gate", "gate", "twin"),
    ("XSA", "xsa", "twin"),
)


class Inserted:
    """The records of all studies, and what pages ask of them.

    Args:
        folder: Folder of the pages, into whose `figures` the figures of studies are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        self._environment.globals |= {name: getattr(self, name) for name in dir(type(self)) if name[0] != "_"}
        self._compared: dict[str, StudyAnalysis] = {}

    def fill(self, page: str) -> str:
        """Return a page with what it inserts; how to read a table or a figure is said at the first of its kind.

        Raises:
            ValueError: The page states a verdict that is not that of the finding.
        """
        if not INSERTION.search(page):
            return page
        kept: list[str] = []
        notes: set[str] = set()
        for paragraph in self._environment.from_string(page).render().split("\n\n"):
            words = paragraph.strip()
            if words in notes:
                continue
            kept.append(paragraph)
            if len(words) >= SHORTEST_NOTE and not words.startswith("|"):
                notes.add(words)
        return "\n\n".join(kept)

    @cached_property
    def _studies(self) -> dict[str, StudyAnalysis]:
        return {one.records.slug: one for one in read_studies(RESULTS / "studies")}

    def _study(self, name: str) -> StudyAnalysis:
        if name in self._studies:
            return self._studies[name]
        if name not in self._compared and not (RESULTS / f"{name}.json").exists():
            raise ValueError(f"results: {name!r}: {unknown_key(name, self._studies)}")
        if name not in self._compared:
            self._compared[name] = analyse(read_records(RESULTS / f"{name}.json"))
        return self._compared[name]

    def _finding(self, study: str, contrast: str) -> Finding:
        found = {one.contrast.name: one for one in self._study(study).findings}
        if contrast not in found:
            raise ValueError(f"{study}: {contrast!r}: {unknown_key(contrast, found)}")
        return found[contrast]

    def _row(self, study: str, figure: str, arm: str, *setting: str) -> Compared:
        row = row_of(self._study(study).rows, figure, arm, setting)
        if row is None:
            known = [(one.figure.label, one.arm.name, *one.point) for one in self._study(study).rows]
            raise ValueError(f"{study} has no {(figure, arm, *setting)}; choose one of {', '.join(map(str, known))}")
        return row

    # Single numbers and words

    def effect(self, study: str, contrast: str) -> str:
        """Return the effect of a contrast with its interval."""
        return tables.effect_text(self._finding(study, contrast)) or "not run yet"

    def verdict(self, study: str, contrast: str, word: str) -> str:
        """Return the verdict that a page states, which must be the state of the finding."""
        state = self._finding(study, contrast).state
        if word != state:
            raise ValueError(f"{study}: {contrast!r} is {state!r}, and the page says {word!r}; correct the page")
        return word

    def seeds(self, study: str, contrast: str) -> str:
        """Return how many of the seeds lie on the side of the effect."""
        found = self._finding(study, contrast)
        return f"{found.same_direction} of {found.seeds}"

    def in_tokens(self, study: str, contrast: str, *, at_equal_time: bool = False) -> str:
        """Return a difference of losses as a change of the tokens for the same loss."""
        worth = self._study(study).worths[contrast]
        return _bracketed(tables.tokens_cells(worth.time if at_equal_time else worth.tokens))

    def mean(self, study: str, figure: str, arm: str, *setting: str) -> str:
        """Return the mean of a figure over the seeds of an arm."""
        row = self._row(study, figure, arm, *setting)
        return fixed(row.statistic.mean, tables.decimals(self._study(study).rows, row.figure))

    def difference(self, study: str, figure: str, arm: str, *setting: str) -> str:
        """Return an arm's difference to the reference, which is explored and not decided."""
        row = self._row(study, figure, arm, *setting)
        assert row.difference is not None
        places = tables.decimals(self._study(study).rows, row.figure)
        return _bracketed(
            [fixed(one, places, "+") for one in (row.difference.mean, row.difference.low, row.difference.high)]
        )

    def need(self, study: str, axis: str, arm: str, how: str = "fit") -> str:
        """Return the share of an axis that an arm needs at its largest setting."""
        scaling = self._study(study).scaling
        assert scaling is not None
        amount = getattr([one for one in scaling.needs if (one.axis.name, one.arm.name) == (axis, arm)][-1], how)
        return _bracketed([tables.share_text(one) for one in (amount.share, amount.low, amount.high)])

    def runs(self, study: str) -> int:
        return len(self._study(study).records.index.members)

    def planned(self, study: str) -> int:
        return self._study(study).records.index.planned

    def tuning(self, study: str) -> int:
        """Return how many runs chose learning rates."""
        return sum(one.is_tuning for one in self._study(study).records.index.members)

    # Words that a study's own files hold

    def about(self, study: str) -> str:
        return self._study(study).records.index.about

    def corrected(self, study: str) -> str:
        """Return what stands of a study, and why, as its file says."""
        correction = self._study(study).records.index.correction
        assert correction is not None
        return f"**{correction.stands}** {correction.why}"

    def record(self, study: str) -> str:
        """Return where a study's records and its plan are, which runs it shares, and what it discloses."""
        one = self._study(study)
        index, path = one.records.index, one.records.path.relative_to(DOCS)
        lines = [f"- Command: `{index.command}`"]
        lines += [f"- Records: [{path}](../{path}), {len(index.members)} of {index.planned} runs"]
        if index.plan:
            plan, why_not = index.plan, one.why_not_registered
            state = (
                f"not registered: {why_not}"
                if why_not
                else "registered: its commit is older than every run that it uses"
            )
            lines.append(f"- Plan: `{plan.file}`, SHA-256 `{plan.sha256}`, commit `{plan.commit[:12]}`, {state}")
        commits = [run.environment.commit for *_, run in one.records.every_run()]
        if dirty := sum(commit.endswith("-dirty") for commit in commits):
            lines.append(f"- Disclosed: {dirty} of {len(commits)} reported runs ran with changes that no commit has")
        lines += [f"- Runs that {slug} has too: {count}" for slug, count in one.shared.items()]
        lines += [f"- Disclosed, {date_words(change.when)}: {change.what}" for change in index.changes]
        return "\n".join(lines)

    # Tables and figures

    def findings(self, study: str) -> str:
        """Return the contrasts of a plan."""
        table = tables.findings_table(self._study(study))
        titles = [group.title for group in table.groups]
        said_first = ("contrast", "effect", "in tokens", "in tokens at equal time", "state", "seeds")
        first = [titles.index(title) for title in said_first if title in titles]
        others = [place for place, title in enumerate(titles) if title not in ("question", "figure", "meaning")]
        kept = [*first, *(place for place in others if place not in first)]
        rows = [[row[place] for place in kept] for row in table.folded()]
        groups = tuple(Group(table.groups[place].title, numeric=table.groups[place].numeric) for place in kept)
        return Table("findings", "", groups, rows, table.notes).markdown()

    def measures(self, study: str, *labels: str, setting: tuple[str, ...] = ()) -> str:
        """Return figures of every arm and their differences to the reference: means over settings, or at one setting."""
        one = self._study(study)
        found = [row for row in one.rows if row.point == setting and (row.figure.label in labels or not labels)]
        rows = [[tables.with_unit(row.figure.label, row.figure), row.arm.label, *_cells(one, row)] for row in found]
        groups = (
            *names("measure", "model"),
            Group("mean", ("mean", "standard error"), "mean"),
            Group(f"minus {one.records.reference.label}", ("mean", "low", "high", "excludes zero"), "marked"),
        )
        note = tables.OVER_ITEMS if one.records.has_one_seed else tables.OVER_SEEDS
        return Table("measures", "", groups, rows, [note]).markdown()

    def rates(self, study: str) -> str:
        """Return the learning rates that were tried."""
        table = tables.rates_table(self._study(study).records)
        return table.markdown() if table else ""

    def best_rates(self, study: str) -> str:
        """Return the learning rate with the best mean of each arm, at each width."""
        one = self._study(study)
        index, rows = one.records.index, []
        widths, rates = (axis.values for axis in index.axes)
        for arm in index.arms:
            best = []
            for width in widths:
                means = {
                    rate: row.statistic.mean
                    for rate in rates
                    if (row := row_of(one.rows, index.figures[0].label, arm.name, (width, rate)))
                }
                best.append(min(means, key=means.__getitem__) if means else "")
            rows.append([arm.label, *best])
        note = f"Tried: {', '.join(rates)}."
        return Table(
            "best", "", (*names("model"), *(Group(f"width {width}") for width in widths)), rows, [note]
        ).markdown()

    def needs(self, study: str) -> str:
        """Return how much of size and tokens arms need for the reference's loss."""
        scaling = self._study(study).scaling
        assert scaling is not None
        return tables.needs_table(scaling).markdown()

    def upcycling(self, study: str) -> str:
        one = self._study(study)
        return tables.upcycling_table(one.records, one.rows).markdown()

    def figure(self, study: str) -> str:
        """Draw the figure of a study: its plan's contrasts, power laws, learning rates, or every arm."""
        one = self._study(study)
        token = WIDE_ALONE.set(True)
        drawing = figures.draw_contrasts(one.findings) if one.findings else None
        if not one.findings:
            scaling = figures.draw_scaling(one.records, one.scaling) if one.scaling else None
            drawing = (
                scaling or figures.draw_transfer(one.records, one.rows) or figures.draw_arms(one.records, one.rows)
            )
        WIDE_ALONE.reset(token)
        return self._shown(drawing, f"study-{study}", one.records.index.question, "../figures")

    def _shown(self, drawing: Drawing | None, name: str, words: str, folder: str) -> str:
        if drawing is None:
            return "No contrast has all of its seeds yet."
        path = self.folder / "figures" / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawing.svg, encoding="utf-8")
        return f"![{words}]({folder}/{path.name})\n\n*{drawing.caption}*"

    def parts_figure(self) -> str:
        """Draw what each arm of `parts` is worth in tokens against the Transformer."""
        one = self._study("parts-laptop")
        reference = one.records.index.reference
        drawn = [
            finding
            for finding in one.findings
            if finding.contrast.scale == "doublings"
            and any(term.weight < 0 and term.arms == [reference] for term in finding.contrast.terms)
        ]
        token = WIDE_ALONE.set(True)
        drawing = figures.draw_contrasts(drawn)
        WIDE_ALONE.reset(token)
        return self._shown(drawing, "parts", "Each arm minus the Transformer, in tokens for the same loss", "figures")

    def parts_table(self) -> str:
        """Return what each part does in each task: the factor of the tokens for the same loss, and of the steps to learn."""
        steps = "steps until 90 % of the answers"
        tasks = (
            ("parts-laptop", "held-out loss", ("full",)),
            ("lookup-laptop", steps, ()),
            ("recall-laptop", steps, ("0.6",)),
        )
        labels = {arm.name: arm.label for arm in self._study("parts-laptop").records.index.arms}
        rows = [
            [part, f"{labels[arm]} / {labels[other]}", *(self._factor(*task, arm, other) for task in tasks)]
            for part, arm, other in PARTS
        ]
        titles = ("tokens for the same loss", "steps until it looks up", "steps until it recalls, 60 % noise")
        note = (
            "Factors with 95 % intervals; below 1 the part helps. Bold: decided by the plan; open: tested by it, and not "
            "decided; explored: in no plan. A run that does not learn counts with the last step, which draws factors to 1."
        )
        return Table("parts", "", (*names("part", "models"), *map(Group, titles)), rows, [note]).markdown()

    def _factor(self, study: str, figure: str, point: Point, arm: str, other: str) -> str:
        """Return how many times as much an arm needs as another; empty where they were not trained."""
        one = self._study(study)
        pair = {(arm, point), (other, point)}
        for finding in one.findings:
            if finding.contrast.figure == figure and finding.groups.keys() == pair:
                if finding.difference is None:
                    return "not run yet"
                base = 2 if finding.contrast.scale == "doublings" else math.e
                text = _factor_text(finding.difference, base, finding.groups[arm, point])
                return f"**{text}**" if finding.state in DECIDED else f"{text}, {finding.state}"
        told = next(known for known in one.records.index.figures if known.label == figure)
        first, second = (one.records.numbers(told, name, point) for name in (arm, other))
        seeds = sorted(first.keys() & second.keys())
        if len(seeds) < FEWEST_SEEDS:
            return ""
        if told.task == TASK:
            gained = gains(pooled_runs([one.records]), one.records.ended(one.records.index.reference, point), told)
            known = worth({seed: first[seed].value - second[seed].value for seed in seeds}, gained)
            return f"{_factor_text(known.tokens, 2, 1)}, explored" if known else ""
        logs = [[math.log(found[seed].value) for seed in seeds] for found in (first, second)]
        return f"{_factor_text(paired_difference(*logs), math.e, 1)}, explored"

    def one_rate(self) -> str:
        """Return the losses of DIFF and its twin at one learning rate, 0.002, from each start."""
        records, rows = self._study("start-laptop").records, []
        for start in ("fan-in", "normal"):
            found = [records.numbers(records.index.figures[0], arm, (f"{start}-0.002",)) for arm in ("diff", "twin")]
            seeds = sorted(found[0].keys() & found[1].keys())
            diff, twin = ([one[seed].value for seed in seeds] for one in found)
            gap = paired_difference(diff, twin)
            below = sum(a < b for a, b in zip(diff, twin, strict=True))
            interval = [fixed(one, 3, "+") for one in (gap.mean, gap.low, gap.high)]
            rows.append([start, f"{fmean(diff):.3f}", f"{fmean(twin):.3f}", *interval, f"{below} of {len(seeds)}"])
        groups = (
            *names("start"), Group("DIFF"), Group("Transformer"), Group("difference", ("mean", "low", "high"), "interval"),
            Group("seeds with a lower loss of DIFF"),
        )  # fmt: skip
        note = "Held-out loss, nats/token, at the learning rate 0.002, which was not tuned. Brackets: 95 % Student t intervals."
        return Table("one-rate", "", groups, rows, [note]).markdown()

    def retrieving(self) -> str:
        """Return what each arm of `controls` retrieves at its learning rate, and its loss."""
        records = self._study("controls-laptop").records
        rates = {rate.arm: rate for rate in records.index.rates}
        places = {"retrieval, seen cities": 2, "retrieval, unseen cities": 2, "held-out loss": 3}
        told = [figure for figure in records.index.figures if figure.label in places]
        rows = []
        for arm in records.index.arms:
            if runs := records.ended(arm.name, ()).values():
                means = [f"{fmean(figure_of(run, one) for run in runs):.{places[one.label]}f}" for one in told]
                edge = " (edge)" if rates[arm.name].is_at_edge else ""
                rows.append([arm.label, str(len(runs)), f"{rates[arm.name].learning_rate:g}{edge}", *means])
        titles = ("seeds", "learning rate", *(f"{one.label}, {one.unit}" for one in told))
        note = "Means over seeds. (edge): the rate lies at the edge of those tried."
        return Table("controls", "", (*names("model"), *map(Group, titles)), rows, [note]).markdown()

    def demo_attention(self) -> str:
        """Return where the last token of a needle prompt attends in `make demo`, and the learned lambda."""
        records, rows = self._study("demo").records, []
        for arm in records.index.arms:
            runs, shares = records.at(arm.name, ()).values(), []
            for segments in (("answer",), ("before", "after")):
                found = [
                    row.value
                    for run in runs
                    for row in run.evaluations["allocation"].measurements
                    if row.at.get("form") == "signed" and row.at.get("depth") == 0.5 and row.at["segment"] in segments
                ]
                shares.append(f"{100 * sum(found) / len(runs):.0f} %")
            learned = [
                [one.values[-1] for name, one in run.curves.items() if name.startswith("lambda ")] for run in runs
            ]
            lambdas = "; ".join(", ".join(f"{one:+.2f}" for one in layers) for layers in learned if layers)
            rows.append([arm.label, *shares, lambdas])
        groups = (
            *names("model"), Group("attention on the answer"), Group("on the text around it"),
            *names("lambda at the end, by layer; a seed each"),
        )  # fmt: skip
        note = "Signed weight of the last prompt token, answer at mid depth."
        return Table("attention", "", groups, rows, [note]).markdown()

    def coverage(self) -> str:
        """Return how often intervals held the true value in simulations."""
        _, _, plain = read_document(RESULTS / "intervals.json")
        sizes, methods = sorted({row["n"] for row in plain["rows"]}), ("chosen", "percentile")
        found = {
            (row["data"], row["n"], method): row["coverage"].get(method) for row in plain["rows"] for method in methods
        }
        rows = [
            [data, *(fixed(found.get((data, n, method)), 3) for method in methods for n in sizes)]
            for data in dict.fromkeys(row["data"] for row in plain["rows"])
        ]
        titles = [f"{n} items" for n in sizes] + [f"percentile bootstrap, {n} items" for n in sizes]
        note = f"`{plain['command']}`, {plain['replicates']:,} simulations."
        return Table("intervals", "", (*names("data"), *map(Group, titles)), rows, [note]).markdown()

    def start_sizes(self) -> str:
        """Return attention over the embeddings that it joins at step 0, by width, start and attention type."""
        _, _, result = read_document(RESULTS / "start-rms.json")
        starts = list(dict.fromkeys((row["start"], row["arm"]) for row in result["rows"]))
        ratios = {
            (row["width"], row["start"], row["arm"]): fmean(
                out / stream for out, stream in zip(row["attention_rms"], row["attention_joins"], strict=True)
            )
            for row in result["rows"]
        }
        widths = dict.fromkeys(row["width"] for row in result["rows"])
        rows = [[str(width), *(f"{ratios[width, *start]:.3g}" for start in starts)] for width in widths]
        groups = (Group("width"), *(Group(f"`{start}`: {arm}") for start, arm in starts))
        mlps: dict[str, list[float]] = {}
        for row in result["rows"]:
            sizes = zip(row["mlp_rms"], row["mlp_joins"], strict=True)
            mlps.setdefault(row["start"], []).append(fmean(out / stream for out, stream in sizes))
        spans = " and ".join(f"{min(found):.2g} to {max(found):.2g} with `{start}`" for start, found in mlps.items())
        note = (
            f"`{result['command']}`: RMS of the first layer's attention over that of the embeddings, {result['tokens']} random "
            f"tokens, mean of {len(result['seeds'])} seeds. The MLP's output over the stream that it joins: {spans}."
        )
        return Table("start", "", groups, rows, [note]).markdown()

    def benchmark(self, name: str) -> str:
        """Return tables of benchmarks, by name or by their file in `results`."""
        return self._benchmarks.page_table(name)

    @cached_property
    def _benchmarks(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location("tables", DOCS.parent / "benchmarks" / "tables.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def families(self) -> str:
        """Return which families of pretrained models can become differential, and why others cannot."""
        rows = [[f"`{name}`", beyond] for name, beyond in FAMILIES.items()]
        rows += [[f"`{name}`", f"refused: {why}"] for name, why in REFUSED.items()]
        titles = ("`model_type` in config.json", "what the model has beyond Llama's layout")
        return Table("families", "", names(*titles), rows).markdown()

    def costs(self) -> str:
        """Return size, operations and cache of each attention type over the twin's, at the paper's 830M."""
        config = DiffTransformerConfig(**preset("830m").fields)
        twin, rows = count(config.twin("softmax"), context_tokens=2048), []
        for kind in VARIANTS:
            one = count(config.twin(kind), context_tokens=2048)
            shares = one.parameters / twin.parameters, one.train_flops_per_token / twin.train_flops_per_token
            rows.append([
                f"`{kind}`", f"{one.parameters:,}", *(f"{share:.3f}" for share in shares), f"{one.kv_bytes_per_token:,}"
            ])  # fmt: skip
        titles = ("parameters", "ratio", "training FLOPs of a token", "cached bytes of a token, bf16")
        note = "Ratios to the Transformer. FLOPs of matrix products, at 2,048 tokens."
        return Table("costs", "", (*names("`attention_type`"), *map(Group, titles)), rows, [note]).markdown()

    def equal_parameters(self) -> str:
        """Return the width of the MLP that gives each attention type as many parameters as the twin has."""
        rows = []
        for kind in VARIANTS:
            cells = []
            for fields in (SMALL, preset("830m").fields):
                config = DiffTransformerConfig(attention_type=kind, **fields)
                wanted, before = count(config.twin()).parameters, count(config).parameters
                width = matching_width(config, wanted)
                config.intermediate_size = width
                after = count(config).parameters
                cells += [f"{before:,} ({100 * (before / wanted - 1):+.2f} %)", f"{width:,}", f"{after:,}"]
            rows.append([f"`{kind}`", *cells])
        found = ("parameters", "MLP width that matches", "then")
        titles = [f"{size}: {what}" for size in ("128 wide", "830M") for what in found]
        return Table("sizes", "", (*names("`attention_type`"), *map(Group, titles)), rows).markdown()

    def times_of_types(self) -> str:
        """Return the time of each attention type over the twin's: the range over sizes, in fp32 and bf16."""
        timed, rows = read_result(RESULTS / "variants.json", Bench), []
        works = ("training step", "prefill", "decoding")
        seconds = {
            (row.work, row.implementation, row.dtype, str(row.shape)): row.timing.median_seconds
            for row in timed.rows
            if row.timing
        }
        for kind in TYPES:
            cells = [f"`{kind}`"]
            for work in works:
                there = [key for key in seconds if key[:2] == (work, kind)]
                ratios = [seconds[key] / seconds[work, "softmax", *key[2:]] for key in there]
                cells.append("1" if kind == "softmax" else f"{min(ratios):.2f} to {max(ratios):.2f}")
            rows.append(cells)
        note = f"Over softmax attention at equal parameters. `{timed.command}`, {timed.environment.processor}."
        return Table("times", "", names("`attention_type`", *works), rows, [note]).markdown()


def _cells(study: StudyAnalysis, row: Compared) -> list[str]:
    """Return mean, error, difference, interval and mark of a row."""
    places, change = tables.decimals(study.rows, row.figure), row.difference
    if row.reached == 0:
        return [tables.NOT_REACHED, *[""] * 5]
    cells = [fixed(row.statistic.mean, places), fixed(row.statistic.standard_error, places)]
    cells += [fixed(one, places, "+") for one in (change.mean, change.low, change.high)] if change else [""] * 3
    return [*cells, tables.MARK if tables.is_marked(row) else ""]


def _factor_text(difference: PairedDifference, base: float, sign: float) -> str:
    """Return a difference of logarithms to a base, of which `sign` is -1 to turn it round, as a factor."""
    mean, *ends = (
        base ** (sign * one) for one in (difference.mean, difference.low, difference.high) if one is not None
    )
    return f"{mean:.2f} [{min(ends):.2f}, {max(ends):.2f}]" if ends else f"{mean:.2f}"


def _bracketed(cells: Sequence[str]) -> str:
    mean, low, high = cells
    return f"{mean} [{low}, {high}]" if low else mean

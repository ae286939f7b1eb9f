"""Write what the documentation says about runs: `python docs/evidence.py`.

It reads the results in docs/results, the records of studies among them, and others' replications in docs/replications.yaml. It
writes README.md and pages in docs between their markers, a page for each study, docs/results/studies/NAME/README.md, and
docs/figures/study-*.svg. With --check it writes nothing and names the files that differ, with exit status 1.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import measured
import yaml

from difftransformer_lab.plots.style import WIDE_ALONE
from difftransformer_lab.report import Evidence, Studied, judge, read_claims, read_studies
from difftransformer_lab.report.answers import (
    changes_words,
    edge_words,
    interval_words,
    progress_words,
    shared_words,
)
from difftransformer_lab.report.lead import verdicts_table
from difftransformer_lab.report.questions import contrasts_table, plan_words, question_verdicts
from difftransformer_lab.report.study_figures import draw_arms, draw_contrasts, draw_scaling, draw_transfer
from difftransformer_lab.report.study_page import brief_answer, claims_table, found_words, studies_table
from difftransformer_lab.report.study_tables import needs_table, rates_table
from difftransformer_lab.report.tables import Group, Table
from difftransformer_lab.results import figure_of
from difftransformer_lab.statistics import paired_difference

DOCS = Path(__file__).parent
STUDIES = DOCS / "results" / "studies"
OLD_START = "-normal-start"
"""Sizes of studies whose runs began with N(0, 0.02²) or N(0, 0.05²). README, which is read first, tells the others alone."""

ONE_RATE = (
    "Held-out loss, nats/token, at the learning rate 0.002, which was not tuned. Brackets: 95 % Student t intervals by seed. "
    "The plan tests the difference of the two rows, and neither row by itself."
)


def generated() -> Iterator[tuple[Path, str]]:
    """Yield each file that holds generated text, and its whole content."""
    found = read_studies(STUDIES)
    WIDE_ALONE.set(True)  # pages show no other
    drawings = {one.evidence.slug: figure(one) for one in found}
    told = [one for one in found if not one.evidence.slug.endswith(OLD_START)]
    pages = measured.blocks(found)
    pages[DOCS.parent / "README.md"]["studies"] = readme_table(told).markdown(addresses(told, "docs/"))
    pages[DOCS / "initialization.md"] = pages.get(DOCS / "initialization.md", {}) | {"start-loss": start_loss(found)}
    pages[DOCS / "retrieval.md"]["controls"] = retrieving_arms(found)
    pages[DOCS / "findings.md"] = {
        "claims": claims_table(judge(read_claims(), found)).markdown(addresses(found)),
        "studies": studies_table(found).markdown(addresses(found)),
        "replications": replications().markdown(),
    }
    for name, sizes in itertools.groupby(found, key=lambda one: one.evidence.index.name):
        sections = [section(one, drawings[one.evidence.slug] is not None) for one in sizes]
        yield STUDIES / name / "README.md", "\n".join([f"# Study {name}\n", *sections])
    yield from (between(path, parts) for path, parts in pages.items())
    for one in found:
        if drawings[one.evidence.slug] is not None:
            yield figure_file(one), drawings[one.evidence.slug]


def addresses(studies: list[Studied], docs: str = "") -> dict[str, str]:
    """Return the address of each study's section, from a page that reaches this folder by `docs`."""
    return {
        one.evidence.slug: f"{docs}results/studies/{one.evidence.index.name}/README.md#{one.evidence.path.stem}"
        for one in studies
    }


def readme_table(found: list[Studied]) -> Table:
    """Return the studies with their leading answers, a line of a few words each."""
    rows = [[one.evidence.slug, brief_answer(one)] for one in found]
    return Table("studies", "Studies", (Group("study", numeric=False), Group("answer", numeric=False)), rows)


def section(one: Studied, has_figure: bool) -> str:
    """Return what the page of a study says of one of its sizes."""
    evidence, index = one.evidence, one.evidence.index
    stage = "confirms a plan" if index.plan else "explores: nothing in it is confirmed"
    correction = index.correction
    lines = [
        f"## {evidence.path.stem}",
        *([f"**Correction. {correction.stands}** {correction.why}"] if correction else []),
        f"**{index.question}** {index.about}",
        f"`{index.command}` ([records]({evidence.path.name}), {progress_words(evidence)}). This study {stage}.",
    ]
    lines.append(
        "\n".join(
            f"- {said.subject}{' ' if said.subject.endswith('?') else ': '}{said.text}" for said in found_words(one)
        )
    )
    if has_figure:
        lines.append(f"![{index.question}](../../../figures/{figure_file(one).name})")
    lines += confirming(one) if index.plan else exploring(one)
    first, *more = changes_words(one)
    lines.append(f"Disclosed: {first}" if not more else "\n- ".join(["Disclosed:\n", first, *more]))
    lines += [words for words in (shared_words(one),) if words]
    return "\n\n".join(lines) + "\n"


def confirming(one: Studied) -> list[str]:
    """Return what a section shows of a study with a plan: the plan, its contrasts, and the learning rates."""
    rates = rates_table(one.evidence)
    return [
        contrasts_table(one).markdown().rstrip(),
        " ".join([*plan_words(one), one.evidence.index.plan.plan.about]).rstrip(),
        *([rates.markdown().rstrip()] if rates else []),
    ]


def exploring(one: Studied) -> list[str]:
    """Return what a section shows of a study without a plan: every arm, with intervals."""
    evidence = one.evidence
    lines = [verdicts_table(evidence, one.rows, evidence.index.figures).markdown().rstrip()]
    if one.scaling:
        lines.append(needs_table(one.scaling).markdown().rstrip())
    return [line for line in (*lines, interval_words(evidence), edge_words(evidence)) if line]


def start_loss(found: list[Studied]) -> str:
    """Return what the study of the start found: an answer to each question, and the losses at one learning rate."""
    one = next((one for one in found if one.evidence.slug == "start-laptop"), None)
    if one is None:
        return "The study has not run yet.\n"
    said = "\n".join(f"- {verdict.subject} {verdict.text}" for verdict in question_verdicts(one))
    return f"{said}\n\n{one_rate_table(one.evidence).markdown()}"


def one_rate_table(evidence: Evidence) -> Table:
    """Return the losses of DIFF and its twin at one learning rate, 0.002, from each start."""
    loss, rows = evidence.index.figures[0], []
    for start in ("fan-in", "normal"):
        runs = [evidence.ended(arm, (f"{start}-0.002",)) for arm in ("diff", "twin")]
        seeds = sorted(runs[0].keys() & runs[1].keys())
        if len(seeds) < 2:
            continue
        diff, twin = ([figure_of(by_seed[seed], loss) for seed in seeds] for by_seed in runs)
        gap = paired_difference(diff, twin)
        below = sum(a < b for a, b in zip(diff, twin, strict=True))
        interval = f"{gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
        rows.append([start, f"{fmean(diff):.3f}", f"{fmean(twin):.3f}", interval, f"{below} of {len(seeds)}"])
    columns = ("DIFF", "Transformer", "difference", "seeds with a lower loss of DIFF")
    return Table(
        "one-rate", "", (Group("start", numeric=False), *(Group(column) for column in columns)), rows, [ONE_RATE]
    )


def retrieving_arms(found: list[Studied]) -> str:
    """Return what each arm of `controls` retrieves at its learning rate, and its loss; means over seeds."""
    one = next((one for one in found if one.evidence.slug == "controls-laptop"), None)
    if one is None:
        return "The study has not run yet.\n"
    evidence, rates = one.evidence, {rate.arm: rate for rate in one.evidence.index.rates}
    labels = {"retrieval, seen cities": 2, "retrieval, unseen cities": 2, "held-out loss": 3}
    figures = [(figure, labels[figure.label]) for figure in evidence.index.figures if figure.label in labels]
    rows = []
    for arm in evidence.index.arms:
        if runs := list(evidence.ended(arm.name, ()).values()):
            means = [f"{fmean(figure_of(run, figure) for run in runs):.{places}f}" for figure, places in figures]
            edge = " (edge)" if rates[arm.name].is_at_edge else ""
            rows.append([arm.label, str(len(runs)), f"{rates[arm.name].learning_rate:g}{edge}", *means])
    columns = ["seeds", "learning rate", *(f"{figure.label}, {figure.unit}" for figure, _ in figures)]
    groups = (Group("model", numeric=False), *(Group(column) for column in columns))
    note = "Means over seeds. (edge): the rate lies at the edge of those tried."
    return Table("controls", "", groups, rows, [note]).markdown()


def figure(one: Studied) -> str | None:
    """Return a study's figure as SVG; None if it has no pair of runs."""
    if one.evidence.index.plan:
        drawing = draw_contrasts(one)
    else:
        scaling = draw_scaling(one.evidence, one.scaling) if one.scaling else None
        drawing = scaling or draw_transfer(one.evidence, one.rows) or draw_arms(one.evidence, one.rows)
    return drawing.svg if drawing else None


def figure_file(one: Studied) -> Path:
    """Return the file of a study's figure."""
    return DOCS / "figures" / f"study-{one.evidence.slug}.svg"


def replications() -> Table:
    """Return the table of others' replications."""
    columns = ("who", "scale", "outcome", "soundness")
    plain = yaml.safe_load((DOCS / "replications.yaml").read_text("utf-8"))
    rows = [[one[column] for column in columns] for one in plain]
    return Table("replications", "Replications", tuple(Group(column, numeric=False) for column in columns), rows)


def between(path: Path, parts: dict[str, str]) -> tuple[Path, str]:
    """Return a file and its text with new text between each pair of markers."""
    text = path.read_text("utf-8")
    for name, new in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, new=new: f"{match[1]}\n{new}\n{match[2]}", text)
        if count != 1:
            raise SystemExit(f"{path}: {count} pairs of markers <!-- {name} --> and <!-- /{name} -->; keep one")
    return path, text


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and name the files that differ")
    check = parser.parse_args().check
    differing = [(path, text) for path, text in generated() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in differing:
        print(f"{path.relative_to(DOCS.parent)}: {'differs; run python docs/evidence.py' if check else 'written'}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())

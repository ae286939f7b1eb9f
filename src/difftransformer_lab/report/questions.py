"""What a confirming study answers: a sentence for each question, and the table of its contrasts."""

from dataclasses import fields, is_dataclass
from typing import Any

from ..results import PairedDifference, StudyPlan, reached_at
from ..statistics import MOST_EXACT_SEEDS
from .answers import direction_words, shortest, two_digits
from .contrasts import FEWEST_SEEDS, SIGN_FLIP_SEEDS, Finding, Registration
from .page import Said, recipe_text
from .reading import Evidence
from .studied import Studied
from .tables import Group, State, Table, decimals_for, fixed, names, p_text
from .tokens import tokens_cells, worth_words
from .words import date_words


def question_verdicts(study: Studied) -> list[Said]:
    """Return each question with what its primary contrast says, and how many of the others were decided."""
    assert study.registration is not None
    said = []
    for question, findings in study.questions:
        text = finding_words(findings[0], study.registration) + "."
        if findings[1:]:
            decided = sum(bool(one.meaning) for one in findings[1:])
            text += f" Further contrasts decided: {decided} of {len(findings) - 1}."
        said.append(Said(question.question, text))
    return said


def plain_answer(study: Studied) -> str:
    """Return what was decided of each question of the plan, or is so far; in a sentence each."""
    answers = []
    for question, findings in study.questions:
        first = findings[0]
        if not first.values and len(study.questions) > 1:
            continue
        said = first.meaning or verdict_text(first)
        told = "" if first.difference is None else f" ({first.contrast.name}: {effect_text(first)})"
        asked = f"{question.question} " if len(study.questions) > 1 else ""
        answers.append(f"{asked}{said[:1].upper()}{said[1:]}{told}.")
    return " ".join(answers) or "No question has a run yet."


def verdicts_table(study: Studied) -> Table:
    """Return every contrast of the plan with its effect and what was decided."""
    rows = []
    for question, findings in study.questions:
        for place, one in enumerate(findings):
            effect = "" if one.difference is None else effect_text(one)
            cells = [question.question if place == 0 else "", one.contrast.name, effect]
            worth = [worth_words(study.worths.get(one.contrast.name))] if study.worths else []
            rows.append([*cells, *worth, verdict_text(one)])
    groups = (
        *names("question", "contrast"),
        Group("effect [95 % interval]"),
        *([Group(TOKENS)] if study.worths else []),
        Group("verdict", fold="verdict", numeric=False),
    )
    states = {verdict_text(one): _state(one) for one in study.findings}
    return Table("verdicts", "Questions of the plan", groups, rows, states=states)


def _state(finding: Finding) -> State:
    if finding.state not in ("above", "below"):
        return "open"
    return "good" if (finding.state == "above") == (finding.figure.better == "higher") else "bad"


def finding_words(finding: Finding, registration: Registration) -> str:
    """Return a contrast in a sentence: the effect, its seeds, and whether it is decided and by which rule."""
    if finding.difference is None:
        return f"{finding.contrast.name}: {progress_text(finding)}"
    effect = f"{effect_text(finding)}, {direction_text(finding)}"
    return f"{finding.contrast.name}: {effect}: {verdict_text(finding)} ({registration.words}; {rule_text(finding)})"


def effect_text(finding: Finding) -> str:
    mean, low, high = _numbers(finding)
    return f"{mean}{f' {finding.unit}' if finding.unit else ''}{f' [{low}, {high}]' if low else ''}"


def direction_text(finding: Finding) -> str:
    return direction_words(_difference(finding).mean, finding.same_direction, len(finding.values))


def progress_text(finding: Finding) -> str:
    """Return how many of the planned seeds are there, while some are missing."""
    if not finding.values:
        return "not run yet"
    return f"so far {len(finding.values)} of {finding.contrast.seeds} seeds, and no verdict before all are there"


def verdict_text(finding: Finding) -> str:
    contrast, difference = finding.contrast, finding.difference
    if difference is None:
        return progress_text(finding)
    match finding.state:
        case "not tested":
            return "not tested, since a contrast before it is not decided"
        case "too few seeds":
            return f"too few seeds to decide, at least {FEWEST_SEEDS} are needed"
        case "open":
            if difference.low is None or difference.high is None:
                return "not decided, since there is no interval"
            if difference.low <= 0 <= difference.high:
                return "cannot be told apart from zero"
            if difference.p_holm is not None:
                return "not decided after Holm's correction"
            return f"not decided, since the interval does not lie beyond \u00b1{contrast.margin:g}"
        case "within":
            return f"{finding.meaning}, within \u00b1{contrast.smallest:g}"
    return f"{finding.meaning}, beyond \u00b1{contrast.margin:g}" if contrast.margin else finding.meaning


def rule_text(finding: Finding) -> str:
    """Return the test that decides, with its p-value where it was made."""
    difference = _difference(finding)
    words = "Student's t test"
    if finding.contrast.test == "welch":
        words = "Welch's test"
    elif finding.contrast.seeds >= SIGN_FLIP_SEEDS and finding.contrast.scale != "doublings":
        words = "exact sign-flip test" if finding.contrast.seeds <= MOST_EXACT_SEEDS else "sign-flip test"
    if difference.p_value is None or finding.state in ("not tested", "too few seeds"):
        return words
    words += f", p {p_text(difference.p_value)}"
    if difference.p_holm is None:
        return words
    return f"{words}, {p_text(difference.p_holm)} by Holm's rule over {difference.comparisons}"


def brief_answer(study: Studied) -> str:
    """Return a study's leading answer in at most `MOST_WORDS` words."""
    assert study.registration is not None
    first = study.questions[0][1][0]
    words = study.registration.words
    if first.difference is None:
        return shortest([f"{first.contrast.name}: {progress_text(first)}.", f"{progress_text(first)}."])
    name, effect, says = first.contrast.name, effect_text(first), first.meaning or verdict_text(first)
    seeds = f"{first.same_direction} of {len(first.values)} seeds"
    longest = f"{name}: {effect}, {direction_text(first)}: {says}"
    shorter = f"{effect}, {seeds}: {says}", f"{name}: {effect}, {seeds}", f"{effect}, {seeds}"
    return shortest([f"{text} ({words})." for text in (longest, f"{name}: {shorter[0]}", *shorter)])


def contrasts_table(study: Studied) -> Table:
    """Return every contrast of the plan with its test and verdict, in the plan's order."""
    rows, is_censored = [], any(one.figure.reaches is not None for one in study.findings)
    for question, findings in study.questions:
        for place, finding in enumerate(findings):
            contrast, difference = finding.contrast, finding.difference
            cells = [question.question if place == 0 else "", contrast.name, contrast.figure, finding.unit]
            cells += [str(len(finding.values)), str(contrast.seeds)]
            if difference is None:
                cells += [""] * 8
            else:
                cells += [*_numbers(finding), str(finding.same_direction), rule_text(finding)]
                cells += _beside_cells(finding)
            cells += [censored_words(study.evidence, finding)] if is_censored else []
            if study.worths:
                found = study.worths.get(contrast.name)
                cells += [
                    cell
                    for one in ((found.tokens, found.time) if found else (None, None))
                    for cell in tokens_cells(one)
                ]
            rows.append([*cells, verdict_text(finding)])
    groups = (
        *names("question", "contrast"),
        Group("figure", ("label", "unit"), "remark", numeric=False),
        Group("seeds", ("there", "planned"), "of"),
        Group("effect", ("mean", "low", "high"), "interval"),
        Group("seeds in that direction"),
        *names("test"),
        Group("Student's t beside", ("p", "low", "high"), "interval", numeric=False),
        *names(*([NEVER] if is_censored else [])),
        *(Group(title, ("mean", "low", "high"), "interval") for title in ([TOKENS, TIME] if study.worths else [])),
        *names("verdict"),
    )
    return Table("contrasts", "Contrasts of the plan", groups, rows, [RULES, *tokens_notes(study)])


NEVER = "runs that never got there"


def censored_words(evidence: Evidence, finding: Finding) -> str:
    """Return of each arm of a contrast how many runs never reached the level of its figure; they count with their last step."""
    figure, said = finding.figure, []
    for arm, point in finding.groups if figure.reaches is not None else ():
        by_seed = evidence.ended(arm, point)
        curves = [by_seed[seed].curves[figure.curve] for seed in finding.contrast.every_seed if seed in by_seed]
        never = sum(reached_at(curve, figure) is None for curve in curves)
        said.append(
            f"{evidence.arm(arm).label}{f' ({evidence.words(point)})' if point else ''}: {never} of {len(curves)}"
        )
    return "; ".join(said)


TOKENS, TIME = "tokens for the same loss", "the same at equal time"


def tokens_notes(study: Studied) -> list[str]:
    """Return what token-equivalents are; nothing where there are none."""
    spans = [fixed(end, 2) for end in sorted({one.gain for one in study.worths.values()})]
    if not spans:
        return []
    gain = " to ".join(dict.fromkeys((spans[0], spans[-1])))
    return [
        f"Tokens for the same loss: the difference over what {study.evidence.reference.label} gains with each doubling of its "
        f"own tokens, {gain} in the same unit, with Fieller's interval. At equal time: with the measured times of a "
        "step; empty where these are of machines of different kinds."
    ]


RULES = (
    "Contrasts of a question are tested in this order, each at 0.05, up to the first that is not decided; questions do not "
    "wait for each other. Contrasts under Holm's rule are tested together at 0.05. Brackets: the 95 % interval of the "
    "test. With 10 seeds or more the exact sign-flip test decides, with fewer Student's t, and with fewer than "
    f"{FEWEST_SEEDS} nothing does. After a contrast that lies within its smallest effect, the next one is a test of its own "
    "at 0.05."
)


def plan_words(study: Studied) -> list[str]:
    """Return where the plan is, and whether it was registered before the runs."""
    plan, registration = study.evidence.index.plan, study.registration
    assert plan is not None
    assert registration is not None
    commit = f"commit {plan.commit[:12]} of {date_words(plan.committed)}" if plan.commit else "not committed"
    words = f"Plan: {plan.file}, SHA-256 {plan.sha256}, {commit}."
    if registration.is_registered:
        return [words, "Registered: every run that the contrasts use began after this commit."]
    return [words, f"Planned, not registered: {registration.why_not}"]


def plan_text(plan: StudyPlan) -> str:
    return recipe_text(_set_fields(plan))


def _set_fields(value: Any) -> Any:
    if isinstance(value, list):
        return [_set_fields(one) for one in value]
    if not is_dataclass(value):
        return value
    stated = {one.name: getattr(value, one.name) for one in fields(value) if getattr(value, one.name) != one.default}
    return {name: _set_fields(one) for name, one in stated.items() if one != {}}


def _beside_cells(finding: Finding) -> list[str]:
    if finding.beside is None:
        return ["", "", ""]
    places = _decimals(finding)
    low, high = (fixed(one, places, "+") for one in (finding.beside.low, finding.beside.high))
    p = "" if finding.state in ("not tested", "too few seeds") else f"p {p_text(finding.beside.p_value)}"
    return [p or "interval", low, high] if low else ["", "", ""]


def _difference(finding: Finding) -> PairedDifference:
    assert finding.difference is not None
    return finding.difference


def _numbers(finding: Finding) -> tuple[str, str, str]:
    difference, places = _difference(finding), _decimals(finding)
    mean, low, high = (fixed(one, places, "+") for one in (difference.mean, difference.low, difference.high))
    return mean, low, high


def _decimals(finding: Finding) -> int:
    difference = _difference(finding)
    if difference.low is None or difference.high is None or difference.high == difference.low:
        return decimals_for([difference.mean])
    return two_digits((difference.high - difference.low) / 2)

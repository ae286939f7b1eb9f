"""The plan of a confirming study: what it will test, on which seeds and by which rule, written before its runs.

A plan answers questions. Each question has a sequence of contrasts, the primary one first. A contrast is tested
at 0.05 if all contrasts before it in its question were decided: to lie above, below, or within. Questions do not wait for each
other. Contrasts that a plan names under `holm` are tested together at 0.05, and wait for none either. `analysis/contrasts.py`
holds the rules, and what they say about errors.
"""

from dataclasses import dataclass, field
from typing import Literal

OWN_BEST = "own best"
"""In place of an axis's value: for each arm the value where its figure was best while learning rates were chosen."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of a contrast: the mean of some arms in one setting, times a weight.

    Attributes:
        arms: Names of the arms to average.
        at: Value of each axis that the setting does not take from the first value; `OWN_BEST` stands for the value at which
            each arm did best on the tuning seeds.
    """

    arms: list[str]
    weight: float
    at: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A weighted sum of figures, which is compared with zero, or with a margin.

    Attributes:
        name: The contrast in words, such as "DIFF minus Transformer".
        figure: Label of the study's figure.
        terms: What is summed.
        first_seed: First of its seeds.
        seeds: Number of its seeds.
        test: "paired" sums the terms of each seed; "welch" takes each term's seeds as independent, where pairing by seed gains
            nothing.
        scale: "log" compares natural logarithms; "log odds" compares shares by log((k + 1/2) / (n - k + 1/2)) for k right
            answers of n; "doublings" divides a difference of two arms' losses by what the reference's own loss falls with each
            doubling of its tokens, and tests it by Student's t and Fieller's interval.
        margin: The contrast is decided to lie above (below) only if its interval lies above +margin (below -margin).
        smallest: Smallest effect that matters, in the unit of the contrast. An interval inside of +-smallest decides that there
            is none as large. None leaves that outcome out.
        above: What it means if the contrast is decided to lie above, in a sentence.
        below: What it means if it is decided to lie below.
        within: What it means if the interval lies inside of +-smallest.
    """

    name: str
    figure: str
    terms: list[Term]
    first_seed: int = 2000
    seeds: int
    test: Literal["paired", "welch"] = "paired"
    scale: Literal["plain", "log", "log odds", "doublings"] = "plain"
    margin: float = 0.0
    smallest: float | None = None
    above: str
    below: str
    within: str = ""

    @property
    def every_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True, kw_only=True)
class Question:
    question: str
    contrasts: list[Contrast]


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """What a study will test.

    Attributes:
        about: Why the plan is as it is, for a reader.
        holm: Names of contrasts that are tested together, by S. Holm's rule (1979), whatever their questions.
    """

    study: str
    preset: str
    about: str = ""
    holm: list[str] = field(default_factory=list)
    questions: list[Question]

    @property
    def contrasts(self) -> list[Contrast]:
        return [contrast for question in self.questions for contrast in question.contrasts]


@dataclass(frozen=True, kw_only=True)
class RegisteredPlan:
    """A plan as a study's index holds it.

    Attributes:
        file: Its file, as in the repository.
        sha256: SHA-256 of the file.
        commit: The commit that gave the file this content; empty if it is in none.
        committed: Time of that commit, ISO 8601 in UTC; empty if it is in none.
    """

    plan: StudyPlan
    file: str
    sha256: str
    commit: str
    committed: str


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What still stands of a confounded study, in at most 25 words for tables, and why, in sentences."""

    stands: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a study discloses of its design, its runs or its reading: when, and what. `when` is a date or a commit."""

    when: str
    what: str

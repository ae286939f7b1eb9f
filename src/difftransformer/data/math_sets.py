"""Mathematical problems with their answers: public sets by name, or a user's JSONL.

The eight sets of arXiv:2410.05258 appendix C. Five have a public name of their own on the Hugging Face hub; CARP, TABMWP and
CollegeMath are published as files elsewhere and are read from JSONL.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from .hub import CONVERTED
from .records import PublicSet, chosen, jsonl_rows, public_rows, text_field

LOCAL_SETS = ("carp", "tabmwp", "college_math")
_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question and the answer that is right. `set_name` is the set it counts in."""

    set_name: str
    name: str
    question: str
    answer: str


def read_problems(source: str, items: int | None = None, seed: int = 0) -> list[Problem]:
    """Problems of a public set or of a JSONL file with `question`, `answer` and, optionally, `set` on each line.

    An answer may be a worked one: what counts is what follows its last `####`, or else stands in its last \\boxed{}.

    Args:
        source: One of `PROBLEM_SETS`, or a path that ends in .jsonl.
        items: How many of each set, drawn by the seed; all where None.
        seed: Of the draw.

    Raises:
        ConfigError: the source is neither.
        DataError: it cannot be read, is empty, or lacks a field.
    """
    if source.endswith(".jsonl"):
        found = [
            _file_problem(Path(source), number, row) for number, row in jsonl_rows(Path(source), ("question", "answer"))
        ]
    elif source in PROBLEM_SETS:
        public, problem = PROBLEM_SETS[source]
        found = [
            made
            for place, row in public_rows(source, public)
            if (made := problem(source, place, row, f"{source}: row {place} of {public.hub_name}")) is not None
        ]
        if not found:
            raise DataError(f"{source}: {public.hub_name} holds no problems; name a .jsonl file")
    else:
        local = " (it has no public name: give its file)" if source in LOCAL_SETS else ""
        raise ConfigError(f"set {source!r}{local}: choose from {', '.join(PROBLEM_SETS)}, or name a .jsonl file")
    by_set: dict[str, list[Problem]] = {}
    for one in found:
        by_set.setdefault(one.set_name, []).append(one)
    return [group[index] for group in by_set.values() for index in chosen(len(group), items, seed)]


def _file_problem(path: Path, number: int, row: dict[str, Any]) -> Problem:
    name = text_field(row, "set", f"{path}: line {number}") if "set" in row else path.stem
    return Problem(
        set_name=name, name=str(number), question=str(row["question"]).strip(), answer=str(row["answer"]).strip()
    )


def _fields(question: tuple[str, ...], answer: str) -> Callable[[str, str, dict[str, Any], str], Problem | None]:
    def problem(source: str, place: str, row: dict[str, Any], where: str) -> Problem:
        text = " ".join(text_field(row, field, where).strip() for field in question)
        return Problem(set_name=source, name=place, question=text, answer=text_field(row, answer, where).strip())

    return problem


def _asdiv(source: str, place: str, row: dict[str, Any], where: str) -> Problem | None:
    """Problems with several answers at once, such as "3 (cats); 4 (dogs)", are left out."""
    answer = text_field(row, "answer", where)
    return None if ";" in answer else _fields(("body", "question"), "answer")(source, place, row, where)


PROBLEM_SETS: dict[str, tuple[PublicSet, Callable[[str, str, dict[str, Any], str], Problem | None]]] = {
    "gsm8k": (PublicSet(hub_name="openai/gsm8k", split="test", configs=("main",)), _fields(("question",), "answer")),
    "math": (
        PublicSet(hub_name="EleutherAI/hendrycks_math", split="test", configs=_MATH_SUBJECTS),
        _fields(("problem",), "solution"),
    ),
    "svamp": (PublicSet(hub_name="ChilleD/SVAMP", split="test"), _fields(("Body", "Question"), "Answer")),
    "asdiv": (
        PublicSet(hub_name="EleutherAI/asdiv", split="validation", configs=("asdiv",), revision=CONVERTED),
        _asdiv,
    ),
    "mawps": (PublicSet(hub_name="MU-NLPC/Calc-mawps", split="test"), _fields(("question",), "result")),
}

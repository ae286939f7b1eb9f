"""Mathematical problems with answers, from public sets or a user's JSONL file.

These are the eight sets of arXiv:2410.05258 appendix C. Five of them have a name on the Hugging Face hub. CARP, TABMWP and
CollegeMath are published as files elsewhere and are read from JSONL.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftransformer.errors import ConfigError, DataError

from .public import CONVERTED, PublicSet, chosen, jsonl_rows, public_rows, text_field

LOCAL_SETS = ("carp", "tabmwp", "college_math")
_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra", "precalculus",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MathProblem:
    """A question and its correct answer. Results are reported by `set_name`."""

    set_name: str
    name: str
    question: str
    answer: str


_Reader = Callable[[str, str, dict[str, Any], str], MathProblem | None]


def read_math_problems(source: str, items: int | None = None, seed: int = 0) -> list[MathProblem]:
    """Read problems of a public set or of a JSONL file with `question`, `answer` and optionally `set` on each line.

    An answer may include the solution. The part after its last `####`, or else inside its last \\boxed{}, counts.

    Args:
        source: One of `MATH_SETS`, or a path that ends in .jsonl.
        items: Number of problems to draw from each set; None for all.
        seed: Seed of the draw.

    Raises:
        ConfigError: The source is neither.
        DataError: The source cannot be read, is empty, or lacks a field.
    """
    if source.endswith(".jsonl"):
        problems = [
            _file_problem(Path(source), number, row) for number, row in jsonl_rows(Path(source), ("question", "answer"))
        ]
    elif source in MATH_SETS:
        public, read = MATH_SETS[source]
        problems = [
            problem
            for place, row in public_rows(source, public)
            if (problem := read(source, place, row, f"{source}: row {place} of {public.hub_name}")) is not None
        ]
        if not problems:
            raise DataError(f"{source}: {public.hub_name} holds no problems; name a .jsonl file")
    else:
        local = " (it has no public name: give its file)" if source in LOCAL_SETS else ""
        raise ConfigError(f"set {source!r}{local}: choose from {', '.join(MATH_SETS)}, or name a .jsonl file")
    by_set: dict[str, list[MathProblem]] = {}
    for problem in problems:
        by_set.setdefault(problem.set_name, []).append(problem)
    return [group[index] for group in by_set.values() for index in chosen(len(group), items, seed)]


def _file_problem(path: Path, number: int, row: dict[str, Any]) -> MathProblem:
    name = text_field(row, "set", f"{path}: line {number}") if "set" in row else path.stem
    return MathProblem(
        set_name=name, name=str(number), question=str(row["question"]).strip(), answer=str(row["answer"]).strip()
    )


def _fields(question: tuple[str, ...], answer: str) -> _Reader:
    def problem(source: str, place: str, row: dict[str, Any], where: str) -> MathProblem:
        text = " ".join(text_field(row, field, where).strip() for field in question)
        return MathProblem(set_name=source, name=place, question=text, answer=text_field(row, answer, where).strip())

    return problem


def _asdiv(source: str, place: str, row: dict[str, Any], where: str) -> MathProblem | None:
    """Leave out problems with several answers, such as "3 (cats); 4 (dogs)"."""
    answer = text_field(row, "answer", where)
    return None if ";" in answer else _fields(("body", "question"), "answer")(source, place, row, where)


MATH_SETS: dict[str, tuple[PublicSet, _Reader]] = {
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

"""Documents with reference summaries or with questions and reference answers, from public sets or a user's JSONL file.

The public sets are those of arXiv:2410.05258 section 3.5: news for summaries, LongBench (arXiv:2308.14508) for questions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from difftransformer.errors import ConfigError, DataError

from .public import CONVERTED, PublicSet, chosen, jsonl_rows, public_rows, text_field

Kind = Literal["summary", "qa"]


@dataclass(frozen=True, kw_only=True)
class GroundedItem:
    """A document, a question about it (None asks for a summary), and a reference that a person wrote."""

    name: str
    document: str
    reference: str
    question: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Grounded:
    public: PublicSet
    kind: Kind
    document: str
    reference: str


def read_grounded(name: str, items: int | None = None, seed: int = 0) -> list[GroundedItem]:
    """Read items of a public set.

    Args:
        name: One of `GROUNDED_SETS`.
        items: Number of items to draw; None for all.
        seed: Seed of the draw.

    Raises:
        ConfigError: There is no such set.
        DataError: The set cannot be loaded, or has other columns.
    """
    if name not in GROUNDED_SETS:
        raise ConfigError(f"set {name!r}: choose from {', '.join(GROUNDED_SETS)}, or name your own file with --file")
    source = GROUNDED_SETS[name]
    rows = list(public_rows(name, source.public))
    if not rows:
        raise DataError(f"{name}: {source.public.hub_name} holds no items; name your own file with --file")
    return [_public_item(name, source, *rows[index]) for index in chosen(len(rows), items, seed)]


def read_grounded_file(file: str, kind: Kind, items: int | None = None, seed: int = 0) -> list[GroundedItem]:
    """Read items of a JSONL file with `document`, `reference` and, for questions, `question` on each line.

    Raises:
        DataError: The file is missing, empty or of another form.
    """
    fields = ("document", "reference", "question") if kind == "qa" else ("document", "reference")
    rows = list(jsonl_rows(Path(file), fields))
    return [
        GroundedItem(name=str(number), **{field: str(row[field]) for field in fields})
        for number, row in (rows[index] for index in chosen(len(rows), items, seed))
    ]


def _public_item(name: str, source: _Grounded, place: str, row: dict[str, Any]) -> GroundedItem:
    where = f"{name}: row {place} of {source.public.hub_name}"
    answers = row.get(source.reference)
    if isinstance(answers, list):  # LongBench gives several answers of equal rank
        row = row | {source.reference: " | ".join(map(str, answers))}
    return GroundedItem(
        name=place,
        document=text_field(row, source.document, where),
        reference=text_field(row, source.reference, where),
        question=text_field(row, "question", where) if source.kind == "qa" else None,
    )


def _news(hub_name: str, document: str, reference: str, config: str | None, revision: str | None = None) -> _Grounded:
    public = PublicSet(hub_name=hub_name, split="test", configs=(config,), revision=revision)
    return _Grounded(public=public, kind="summary", document=document, reference=reference)


def _longbench(config: str, kind: Kind) -> _Grounded:
    # A copy without a script, which lm-eval reads too.
    public = PublicSet(hub_name="Xnhyacinth/LongBench", split="test", configs=(config,))
    return _Grounded(public=public, kind=kind, document="context", reference="answers")


GROUNDED_SETS = {
    "xsum": _news("EdinburghNLP/xsum", "document", "summary", "default", CONVERTED),
    "cnn_dm": _news("abisee/cnn_dailymail", "article", "highlights", "3.0.0"),
    "multinews": _longbench("multi_news", "summary"),
    "qasper": _longbench("qasper", "qa"),
    "hotpotqa": _longbench("hotpotqa", "qa"),
    "2wikimqa": _longbench("2wikimqa", "qa"),
}

"""Labelled examples for classification, from public sets or a user's files.

The public sets are the ones for many-shot in-context learning in arXiv:2410.05258 section 3.4, with the label words of Bertsch
et al. (arXiv:2405.00200). TREC labels questions by the type of the answer (6 coarse and 50 fine types). Banking77 and CLINC150,
without its out-of-scope class, label requests to a bank or an assistant by intent.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from difftransformer.data.records import load_set, read_text, split_hash
from difftransformer.errors import DataError
from difftransformer.reading import parse_json

from .public import CONVERTED, jsonl_rows, text_field

FOLDER_VARIABLE = "DIFFTRANSFORMER_DATA"
_FIELDS = ("text", "label")
TEST_SHARE = 0.2
"""Share of the texts of a single file that are used for testing."""

OUT_OF_SCOPE = "oos"
"""CLINC150's class of requests without one of its 150 intents, which the paper leaves out too."""

TREC_WORDS = {
    "ABBR": "abbreviation", "ENTY": "entity", "DESC": "description", "HUM": "human", "LOC": "location", "NUM": "numeric",
}  # fmt: skip
TREC_FINE_WORDS = {
    "abb": "abbreviation", "exp": "expression", "cremat": "creation", "dismed": "disease", "instru": "instrument",
    "lang": "language", "techmeth": "technique", "termeq": "term", "veh": "vehicle", "def": "definition",
    "desc": "description", "gr": "group", "ind": "individual", "mount": "mountain", "dist": "distance", "ord": "order",
    "perc": "percent", "temp": "temperature", "volsize": "size",
}  # fmt: skip
"""Words for the fine types that are abbreviations."""


@dataclass(frozen=True)
class Example:
    text: str
    label: str


@dataclass(frozen=True, kw_only=True)
class LabelledSet:
    """Training and test examples. Every test label occurs in the training examples.

    Args:
        name: Name of the set, for results.
        train: Examples that serve as demonstrations.
        test: Examples to classify.
    """

    name: str
    train: tuple[Example, ...]
    test: tuple[Example, ...]

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            if not getattr(self, part):
                raise DataError(f"{self.name}: no {part} examples; give at least one")
        unseen = Counter(example.label for example in self.test) - Counter(dict.fromkeys(self.labels, len(self.test)))
        if unseen:
            label, count = unseen.most_common(1)[0]
            raise DataError(
                f"{self.name}: the label {label!r} of {count} test examples never occurs in train; add such examples to "
                "train, or take them out of test"
            )

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(sorted({example.label for example in self.train}))


@dataclass(frozen=True, kw_only=True)
class _Public:
    """Location of a public set: files in a folder with their reader, and a name for the datasets library."""

    train_file: str
    test_file: str
    read: Callable[[Path, str], list[tuple[str, str]]]
    hub_name: str
    hub_column: str
    hub_config: str | None = None
    hub_revision: str | None = None
    words: Callable[[str], str] = lambda label: label.replace("_", " ")


def read_labelled(name: str, folder: str | None = None) -> LabelledSet:
    """Read a public set from a folder, or from the `datasets` library if the folder does not hold it.

    Args:
        name: One of `LABELLED_SETS`.
        folder: Folder with trec/, banking77/ or clinc150/, which hold the files as published.
    """
    public = LABELLED_SETS[name]
    if folder is not None and not Path(folder).is_dir():
        raise DataError(f"{folder}: no such folder; name one that holds {public.train_file}, or none")
    if folder is not None and Path(folder, public.train_file).is_file():
        train = _read_public(Path(folder, public.train_file), public, "train")
        test = _read_public(Path(folder, public.test_file), public, "test")
    else:
        train, test = (_read_hub(name, public, split, folder) for split in ("train", "test"))
    return LabelledSet(name=name, train=train, test=test)


def read_labelled_files(train_file: str, test_file: str | None = None, *, seed: int = 0) -> LabelledSet:
    """Read a user's examples from CSV files with a header or JSONL files, with `text` and `label` in each row.

    Args:
        train_file: Training examples. Without a test file it is split by a hash of (seed, text), which keeps equal texts
            together.
        test_file: Test examples.
        seed: Seed of the split.
    """
    train, name = _read_rows(Path(train_file)), Path(train_file).name
    if test_file is not None:
        name, test = f"{name}, {Path(test_file).name}", _read_rows(Path(test_file))
    else:
        sides: tuple[list[Example], list[Example]] = [], []
        for example in train:
            sides[split_hash(example.text, seed) < TEST_SHARE * 2**64].append(example)
        train, test = sides
    return LabelledSet(name=name, train=tuple(train), test=tuple(test))


def _read_rows(path: Path) -> list[Example]:
    readers = {".csv": _csv_rows, ".jsonl": lambda path: jsonl_rows(path, _FIELDS)}
    if path.suffix not in readers:
        raise DataError(f"{path}: files ending in {path.suffix!r} are not read; give .csv or .jsonl")
    examples = []
    for number, row in readers[path.suffix](path):
        text, label = (text_field(row, field, f"{path}: line {number}").strip() for field in _FIELDS)
        if "\n" in label:
            raise DataError(f"{path}: line {number} ends a label of several lines, {label!r}; write it on one line")
        examples.append(Example(text, label))
    if not examples:
        raise DataError(f"{path}: no examples; give rows with a text and a label")
    return examples


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num} is not CSV ({error}); correct the line") from None


def _examples(rows: Iterable[tuple[str, str]], public: _Public) -> tuple[Example, ...]:
    return tuple(Example(text, public.words(label)) for text, label in rows if label != OUT_OF_SCOPE)


def _read_public(path: Path, public: _Public, split: str) -> tuple[Example, ...]:
    try:
        return _examples(public.read(path, split), public)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); fetch the set again") from None
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise DataError(f"{path}: not the published file ({error}); fetch the set again") from None


def _read_hub(name: str, public: _Public, split: str, folder: str | None) -> tuple[Example, ...]:
    elsewhere = f", or name a folder that holds {public.train_file} (--folder, or {FOLDER_VARIABLE})"
    if folder is not None:
        elsewhere = f", or put {public.train_file} into {folder}"
    rows = load_set(
        name, public.hub_name, config=public.hub_config, split=split, revision=public.hub_revision, otherwise=elsewhere
    )
    try:
        names = map(rows.features[public.hub_column].int2str, rows[public.hub_column])
        return _examples(zip(map(str.strip, rows["text"]), names, strict=True), public)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{name}: {public.hub_name} has another form than expected ({error}){elsewhere}") from None


def _read_trec(path: Path, split: str) -> list[tuple[str, str]]:
    """Read lines of the form "COARSE:fine question" in Latin-1."""
    lines = path.read_bytes().decode("latin-1").split("\n")
    rows = [line.split(" ", 1) for line in lines if line.strip()]
    return [(text.strip(), label) for label, text in rows]


def _read_banking(path: Path, split: str) -> list[tuple[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return [(" ".join(row["text"].split()), row["category"]) for row in csv.DictReader(file)]


def _read_clinc(path: Path, split: str) -> list[tuple[str, str]]:
    """Read a JSON object of splits, in which the out-of-scope examples are separate."""
    return [(text, label) for text, label in parse_json(path.read_bytes())[split]]


def _trec_fine(label: str) -> str:
    coarse, _, fine = label.partition(":")
    return f"{TREC_WORDS[coarse]} {TREC_FINE_WORDS.get(fine, fine)}"


_TREC = _Public(
    train_file="trec/train_5500.label",
    test_file="trec/TREC_10.label",
    read=_read_trec,
    hub_name="CogComp/trec",
    hub_column="coarse_label",
    hub_revision=CONVERTED,
    words=lambda label: TREC_WORDS[label.partition(":")[0]],
)
LABELLED_SETS = {
    "trec": _TREC,
    "trec-fine": replace(_TREC, hub_column="fine_label", words=_trec_fine),
    "banking77": _Public(
        train_file="banking77/train.csv",
        test_file="banking77/test.csv",
        read=_read_banking,
        hub_name="PolyAI/banking77",
        hub_column="label",
        hub_revision=CONVERTED,
    ),
    "clinc150": _Public(
        train_file="clinc150/data_full.json",
        test_file="clinc150/data_full.json",
        read=_read_clinc,
        hub_name="clinc/clinc_oos",
        hub_column="intent",
        hub_config="plus",
    ),
}
"""The public sets. For sets with a script the hub's conversion to Parquet is read."""

"""Prompts of labelled demonstrations in tokens, with the labels as the continuations to choose from.

The form follows Bertsch et al. (arXiv:2405.00200): a demonstration is `Question: TEXT`, a line end, `Type: LABEL`; a line of
two equal signs separates it from the next one, and the prompt ends with `Type:`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from difftransformer.data import Tokenizer
from difftransformer.errors import DataError

from ..registry import at_least, refused
from ..sets.labelled import FOLDER_VARIABLE, Example, LabelledSet, read_labelled, read_labelled_files

SEPARATOR = "\n==\n"
LABEL_END = "\n"
"""Follows every label, so that a label can be told from a longer one that begins with it."""

SetName = Literal["trec", "trec-fine", "banking77", "clinc150"]
_WORDS = {
    "trec": ("Question", "Type"),
    "trec-fine": ("Question", "Type"),
    "banking77": ("query", "intent"),
    "clinc150": ("utterance", "intent"),
}
_OWN_WORDS = ("Text", "Label")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which labelled examples to show, and in which words.

    Attributes:
        data: trec (6 classes), trec-fine (50), banking77 (77) or clinc150 (150); trec if no file is given.
        folder: Folder that contains the set as its authors publish it, such as trec/train_5500.label; DIFFTRANSFORMER_DATA by
            default. What it lacks is loaded by its public name through the datasets library.
        train_file: Your own examples to show instead: .csv or .jsonl with the columns text and label.
        test_file: Your own examples to ask about; a fifth of the train file by default.
        text_word: Word before a text; Question, query, utterance or Text by default.
        label_word: Word before a label; Type, intent or Label by default.
        seed: Seed of the random draws.
    """

    data: SetName | None = None
    folder: str | None = None
    train_file: str | None = None
    test_file: str | None = None
    text_word: str | None = None
    label_word: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data is not None and self.train_file is not None:
            raise refused(self, "data train_file", "give one of the two")
        if self.test_file is not None and self.train_file is None:
            raise refused(self, "test_file", "there is no train_file; give both")
        at_least(self, 0, "seed")
        for field in ("text_word", "label_word"):
            word = getattr(self, field)
            if word is not None and (not word.strip() or "\n" in word):
                raise refused(self, field, "give a word")

    def read(self) -> LabelledSet:
        if self.train_file is not None:
            return read_labelled_files(self.train_file, self.test_file, seed=self.seed)
        return read_labelled(self.data or "trec", self.folder or os.environ.get(FOLDER_VARIABLE) or None)

    def words(self) -> tuple[str, str]:
        text, label = _OWN_WORDS if self.train_file is not None else _WORDS[self.data or "trec"]
        return self.text_word or text, self.label_word or label


class PromptForm:
    """Demonstrations, questions and labels as tokens, which together are the tokens of the whole text.

    Attributes:
        options: Tokens of each label after the prompt, its line end included; none is a prefix of another.
    """

    def __init__(self, tokenizer: Tokenizer, labels: Sequence[str], words: tuple[str, str]) -> None:
        self.tokenizer, self.labels = tokenizer, tuple(labels)
        self.text_word, self.label_word = words
        stub = self._question("a")
        self.options = tuple(tuple(self._behind(stub, f" {label}{LABEL_END}")) for label in labels)
        _check_options(self.labels, self.options)
        self._encoded = cache(self._encode)

    def demonstrations(self, examples: Iterable[Example]) -> tuple[int, ...]:
        """Return the token that begins a text and the tokens of all demonstrations."""
        pieces = (self._encoded(self._shown(example), place == 0) for place, example in enumerate(examples))
        return (self.tokenizer.begin_of_text, *chain.from_iterable(pieces))

    def question(self, text: str, *, first: bool) -> tuple[int, ...]:
        """Return the tokens of a question, after demonstrations or at the beginning."""
        return self._encoded(self._question(text), first)

    def lengths(self, examples: Iterable[Example]) -> Iterator[int]:
        """Yield the number of tokens of the text's beginning, then of each demonstration."""
        stub = self._question("a")
        # Some tokenizers encode the first word of a text differently.
        yield 1 + max(0, len(self._encoded(stub, True)) - len(self._encoded(stub, False)))
        for example in examples:
            yield len(self._encoded(self._shown(example), False))

    def room(self, items: Sequence[Example], context_tokens: int) -> int:
        """Return the number of tokens that question and answer leave for demonstrations."""
        longest = max(len(self._encoded(self._question(item.text), False)) for item in items)
        return context_tokens - longest - max(map(len, self.options))

    def _shown(self, example: Example) -> str:
        return f"{self._question(example.text)} {example.label}{SEPARATOR}"

    def _question(self, text: str) -> str:
        return f"{self.text_word}: {text}\n{self.label_word}:"

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text) if first else self._behind(f"a{SEPARATOR}", text))

    def _behind(self, left: str, text: str) -> list[int]:
        advice = "choose another text_word or label_word, or another tokenizer"
        return self.tokenizer.encode_after(left, text, advice)


def _check_options(labels: Sequence[str], options: Sequence[tuple[int, ...]]) -> None:
    ordered = sorted(zip(options, labels, strict=True))
    # In sorted order a prefix stands right before an option that begins with it.
    for (one, first), (other, second) in pairwise(ordered):
        if one == other:
            raise DataError(f"the labels {first!r} and {second!r} have the same tokens {list(one)}; rename one of them")
        if other[: len(one)] == one:
            raise DataError(
                f"in tokens the label {first!r}, its line end included, is a prefix of the label {second!r} and could not "
                "be told from it; rename one of them"
            )


def balanced(examples: Sequence[Example], rng: np.random.Generator) -> list[list[Example]]:
    """Return rounds of one example per class, with random examples and a random order of the classes in each round.

    A class without further examples is left out of the later rounds.
    """
    by_label: dict[str, list[Example]] = {label: [] for label in sorted({e.label for e in examples})}
    for example in examples:
        by_label[example.label].append(example)
    drawn = [[own[place] for place in rng.permutation(len(own))] for own in by_label.values()]
    rounds = []
    for place in range(max(map(len, drawn))):
        members = [own[place] for own in drawn if place < len(own)]
        rounds.append([members[index] for index in rng.permutation(len(members))])
    return rounds


def draw_items(data: LabelledSet, count: int, seed: int) -> list[Example]:
    """Draw test examples, balanced over the classes as far as possible."""
    if count > len(data.test):
        raise DataError(f"items={count}: {data.name} has {len(data.test)} test examples; ask for at most this number")
    rounds = balanced(data.test, np.random.default_rng([seed, 1]))
    return list(chain.from_iterable(rounds))[:count]


def draw_rounds(data: LabelledSet, seed: int, draw: int = 0) -> list[list[Example]]:
    """Draw rounds of demonstrations, each with one example of each class."""
    return balanced(data.train, np.random.default_rng([seed, 2, draw]))

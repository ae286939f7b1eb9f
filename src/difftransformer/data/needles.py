"""Needle documents for multi-needle retrieval of magic numbers (arXiv:2410.05258, section 3.3; the sentence is LWM's).

A document is corpus text, the filler, with needles on lines of their own. Questions follow, which are the beginnings of the
same sentences:

    <|endoftext|>
    ...corpus text...
    The special magic Lisbon number is: 4071923
    ...corpus text...
    The special magic Lisbon number is:            <- an evaluation prompt ends here; a training row continues

Questions are completions, because a base model has no chat format. Training rows ask for several needles, which teaches
retrieval in far fewer steps than one question per row. City and number are drawn anew for every document, so what training
documents say tells nothing of others. Evaluation can use cities that training never names.

Documents are assembled from token pieces, which are encoded once per city. They equal the tokenizer's encoding of the whole
text around a needle. If a needle has no line end nearby, a corpus token is replaced by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, DataError
from .documents import IGNORED
from .tokenizer import Tokenizer

CITIES_SEEN = (
    "Accra", "Amsterdam", "Ankara", "Athens", "Atlanta", "Baghdad", "Bangkok", "Barcelona", "Beijing", "Belgrade",
    "Berlin", "Bogota", "Boston", "Brisbane", "Brussels", "Budapest", "Cairo", "Calgary", "Caracas", "Chicago",
    "Copenhagen", "Dakar", "Dallas", "Delhi", "Denver", "Detroit", "Dubai", "Dublin", "Edinburgh", "Florence",
    "Geneva", "Hamburg", "Hanoi", "Havana", "Helsinki", "Houston", "Istanbul", "Jakarta", "Karachi", "Lagos",
    "Lima", "Lisbon", "London", "Madrid", "Manila", "Melbourne", "Miami", "Milan", "Montreal", "Moscow", "Mumbai",
    "Munich", "Nairobi", "Oslo", "Paris", "Prague", "Rome", "Santiago", "Seattle", "Seoul", "Sydney", "Tokyo",
    "Toronto", "Vienna",
)  # fmt: skip
CITIES_UNSEEN = (
    "Adelaide", "Auckland", "Bucharest", "Casablanca", "Colombo", "Damascus", "Frankfurt", "Glasgow", "Kampala",
    "Kyoto", "Leipzig", "Lusaka", "Marseille", "Nagoya", "Osaka", "Ottawa", "Porto", "Quito", "Riga", "Shanghai",
    "Stockholm", "Tunis", "Warsaw", "Zurich",
)  # fmt: skip

# Needles move to a line end within this distance. Farther from one, the token at the drawn place becomes a line end.
_NEAR_TOKENS = 16
_NEAR_SHARE = 1 / 64
# With fewer digits nearly every number occurs in ordinary text, so the filler cannot be free of the needles' numbers.
_FEWEST_ABSENT_DIGITS = 3


class Sentence(NamedTuple):
    """Wording of a needle: the texts before and after the city, and whether a space precedes the number."""

    before: str
    after: str
    space: bool

    def stub(self, city: str) -> str:
        """Return the question: the sentence up to the number, on a new line."""
        return f"{self.before} {city}{self.after}"


FULL = Sentence("\nThe special magic", " number is:", True)
# Shorter wordings, in which the city and the number are closer together, down to neighbours.
TERSE = tuple(
    Sentence(before, after, space)
    for before in ("\n", FULL.before)
    for after, space in (("", False), ("", True), (":", True), (FULL.after, True))
)


def answer_tokens(digits: int) -> int:
    """Return the maximum number of tokens of an answer, which is a space, the digits and the line end."""
    return digits + 2


def draw_number(rng: np.random.Generator, digits: int) -> str:
    """Draw a random number, which may begin with zeros."""
    return f"{int(rng.integers(10**digits)):0{digits}d}"


@dataclass(frozen=True, kw_only=True)
class RetrievalMix:
    """Share and composition of needle documents among the training rows.

    Attributes:
        share: Share of needle documents among all rows, 0 to 1.
        min_needles: Minimum number of needles in a document.
        max_needles: Maximum number of needles in a document; fewer if the context is too short.
        asks: Maximum number of questions at the end of a document that is not dense.
        digits: Digits of a number, 1 to 9 (LWM: 7).
        dense: Share of the documents that fill all remaining space with questions.
        terse: Share of the documents whose needle sentences are shortened at random, down to city and number.
    """

    share: float
    min_needles: int = 1
    max_needles: int = 4
    asks: int = 4
    digits: int = 7
    dense: float = 0.0
    terse: float = 0.0

    def __post_init__(self) -> None:
        for name in ("share", "dense", "terse"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"retrieval {name} is {getattr(self, name)}; it must lie between 0 and 1")
        counts = {"min_needles": self.min_needles, "max_needles": self.max_needles, "asks": self.asks}
        check_needles(**counts, digits=self.digits, cities=CITIES_SEEN)


@dataclass(frozen=True, kw_only=True)
class NeedleQuestion:
    """An evaluation document, as one prompt per question.

    Attributes:
        prompts: Token ids, of the same length for all prompts. Each begins with the token that begins a text and ends with the
            colon of the question.
        numbers: Digits of every needle of the context, those asked for first.
        answers: Digits that should follow after a space. The city of a prompt without an answer is in no needle.
        answer_ids: Token ids of each answer, the space included, as they follow the prompt.
        cities: City that each prompt asks for.
        spans: [start, end) of the needle asked for, including its leading line end, in tokens of the prompt.
        query_starts: Start of the question in each prompt.
    """

    prompts: list[list[int]]
    numbers: list[str]
    answers: list[str]
    answer_ids: list[list[int]]
    cities: list[str]
    spans: list[tuple[int, int]]
    query_starts: list[int]


def training_document(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    filler_tokens: Any,
    *,
    context_tokens: int,
    mix: RetrievalMix,
) -> list[int]:
    """Draw a training row: filler with needles at random places, followed by questions with their answers.

    The number of needles is uniform in the range of `mix`, as far as they fit with as many questions. Their cities are
    distinct. The number of questions is uniform from 1, and each asks for a needle drawn independently.

    Args:
        rng: Source of all random draws.
        tokenizer: Tokenizer of `filler_tokens`.
        filler_tokens: Token ids of the corpus, (N,), an array or a `TokenStream`. It is read from a random place and
            continues at the start after the end.
        context_tokens: Context; the row has one more token, for the last target.
        mix: Composition of the document.

    Returns:
        context_tokens + 1 token ids, which end with the last answer.

    Raises:
        DataError: The minimum of needles and one question do not fit even without filler, or there is no corpus text.
    """
    pieces = _pieces(tokenizer)
    wording = TERSE[int(rng.integers(len(TERSE)))] if rng.random() < mix.terse else FULL
    chosen = rng.permutation(len(CITIES_SEEN))[: mix.max_needles].tolist()
    sentences = [
        pieces.stub(CITIES_SEEN[index], wording) + pieces.answer(draw_number(rng, mix.digits), space=wording.space)
        for index in chosen
    ]
    longest = max(map(len, sentences))
    most = min(mix.max_needles, max(mix.min_needles, context_tokens // longest // 2))
    del sentences[int(rng.integers(mix.min_needles, most + 1)) :]
    count = len(sentences)
    room = context_tokens - sum(map(len, sentences))
    if room < longest:
        raise DataError(_too_long(count, context_tokens + 1 - room + longest, context_tokens + 1))
    questions = room // longest
    if rng.random() >= mix.dense:
        questions = int(rng.integers(1, min(mix.asks, questions) + 1))
    tail = [token for index in rng.integers(count, size=questions).tolist() for token in sentences[index]]
    filler_length = room - len(tail)
    filler = pieces.filler(rng, filler_tokens, filler_length)
    places = pieces.places(filler, rng.random(count) * filler_length)
    order = np.argsort(places, kind="stable").tolist()
    row, _ = _insert(tokenizer.begin_of_text, filler, [(int(places[index]), sentences[index]) for index in order])
    return row + tail


def needle_document_tokens(tokenizer: Tokenizer, *, needles: int, asks: int, digits: int, cities: Sequence[str]) -> int:
    """Return the maximum number of tokens of a training row without filler, including the last target."""
    pieces = _pieces(tokenizer)
    lengths = sorted((len(pieces.stub(city)) + answer_tokens(digits) - 1 for city in cities), reverse=True)
    asked = [lengths[index % needles] for index in range(asks)]
    return 1 + sum(lengths[:needles]) + sum(asked)


def evaluation_document(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    filler_tokens: Any,
    *,
    length_tokens: int,
    depth: float,
    needles: int,
    asked: int,
    digits: int,
    cities: Sequence[str] = CITIES_SEEN,
) -> NeedleQuestion:
    """Draw an evaluation document: filler with needles, and one prompt for each needle asked for.

    The first prompt's needle starts at `depth` of the context, exactly so at depths 0 and 1 and otherwise at the nearest line
    end. The other needles are at random places. All prompts have length_tokens minus the space for the answer tokens, so
    prompts of equal `length_tokens` and `digits` need no padding in a batch. The prompts of a document differ in the question
    and in the last few tokens of filler, which compensate for the different lengths of the cities. The numbers are distinct
    and, from 3 digits on, occur nowhere else in the context.

    Args:
        rng, tokenizer, filler_tokens: See `training_document`.
        length_tokens: Context of the model, which holds prompt and answer.
        depth: Depth of the first prompt's needle, 0 (start) to 1 (end).
        needles: Number of needles in the context (N of the paper).
        asked: Number of needles asked for (R of the paper). With 0 the only prompt asks for a city of no needle.
        digits: Digits of a number, 1 to 9.
        cities: Names to draw from.

    Raises:
        ConfigError: A count, `depth` or `digits` is out of range, or there are more needles than numbers.
        DataError: The document does not fit even without filler, or there is no corpus text.
    """
    absent = asked == 0
    check_needles(min_needles=needles, max_needles=needles, asks=asked + absent, digits=digits, cities=cities[absent:])
    if not 0.0 <= depth <= 1.0:
        raise ConfigError(f"depth is {depth}; it must lie between 0 (start) and 1 (end of the context)")
    if asked > needles:
        raise ConfigError(f"asked is {asked} of {needles} needles; ask for at most as many as there are")
    if needles > 10**digits:
        raise ConfigError(f"{needles} needles of {digits} digits: there are {10**digits} numbers; add digits")
    pieces = _pieces(tokenizer)
    names = [cities[index] for index in rng.permutation(len(cities))[: needles + absent].tolist()]
    named = names[needles:] if absent else names[:asked]
    # The length of the filler depends on the numbers, which have different token counts in some tokenizers.
    for _ in range(20):
        numbers = _distinct_numbers(rng, digits, needles)
        sentences = [pieces.stub(city) + pieces.answer(number) for city, number in zip(names, numbers, strict=False)]
        prompt_tokens = length_tokens - answer_tokens(digits)
        room = prompt_tokens - 1 - sum(map(len, sentences))
        lengths = [room - len(pieces.stub(city)) for city in named]
        if min(lengths) < 0:
            raise DataError(_too_long(needles, length_tokens - min(lengths), length_tokens))
        filler = pieces.filler(rng, filler_tokens, max(lengths))
        if digits < _FEWEST_ABSENT_DIGITS:
            break
        text = tokenizer.decode(filler.tolist())
        if not any(number in text for number in numbers):
            break
    else:
        raise DataError(
            f"needle numbers of {digits} digits: 20 draws of {needles} all occur in {max(lengths)} tokens of corpus "
            "text as well; use more digits or a shorter context"
        )
    shortest = min(lengths)
    places = pieces.places(filler[:shortest], rng.random(needles) * shortest)
    places[0] = _place_at_depth(pieces, filler[:shortest], places[1:], sentences, depth)
    # Of needles at the same place the answer is first if depth < 0.5, else last. This makes depths 0 and 1 exact.
    rank = np.array([-1.0 if depth < 0.5 else 2.0, *rng.random(needles - 1)])
    order = np.lexsort((rank, places)).tolist()
    prompts, spans, query_starts = [], [], []
    for index, length in enumerate(lengths):
        placed = [(length if places[i] == shortest else int(places[i]), sentences[i]) for i in order]
        context, inserted = _insert(tokenizer.begin_of_text, filler[:length], placed)
        prompts.append(context + pieces.stub(named[index]))
        spans.append(inserted[order.index(index)])
        query_starts.append(len(context))
    return NeedleQuestion(
        prompts=prompts,
        numbers=numbers,
        answers=numbers[:asked],
        answer_ids=[pieces.answer(number) for number in numbers[:asked]],
        cities=named,
        spans=spans[:asked],
        query_starts=query_starts,
    )


def needle_questions(
    tokenizer: Tokenizer, filler_tokens: Any, *, context_tokens: int, mix: RetrievalMix, documents: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Draw held-out questions as they are asked during training, one for each needle of each document.

    Documents have `max_needles` needles, or as many as fit, at random places. Cities and numbers occur in training.

    Args:
        tokenizer, filler_tokens: See `evaluation_document`.
        context_tokens: Length T of a row.
        mix: Composition of the training documents.
        documents: Number of documents.

    Returns:
        Inputs and targets, (N, T) each. Targets are the answer's tokens and `IGNORED` elsewhere.

    Raises:
        DataError: See `evaluation_document`.
    """
    rng = np.random.default_rng(0)
    needles = min(mix.max_needles, 10**mix.digits)
    sizes = {"asks": 1, "digits": mix.digits, "cities": CITIES_SEEN}
    while needles > 1 and needle_document_tokens(tokenizer, needles=needles, **sizes) > context_tokens:  # type: ignore[arg-type]
        needles -= 1
    inputs, targets = [], []
    for _ in range(documents):
        document = evaluation_document(
            rng,
            tokenizer,
            filler_tokens,
            length_tokens=context_tokens,
            depth=float(rng.random()),
            needles=needles,
            asked=needles,
            digits=mix.digits,
        )
        for prompt, answer in zip(document.prompts, document.answer_ids, strict=True):
            rest = context_tokens - len(prompt) - len(answer)
            inputs.append([*prompt, *answer, *[tokenizer.pad] * rest])
            targets.append([*[IGNORED] * (len(prompt) - 1), *answer, *[IGNORED] * (rest + 1)])
    return np.array(inputs), np.array(targets)


def check_needles(*, min_needles: int, max_needles: int, asks: int, digits: int, cities: Sequence[str]) -> None:
    """Check the counts of a needle document.

    Raises:
        ConfigError: A count is out of range.
    """
    if not 1 <= digits <= 9:
        raise ConfigError(f"digits is {digits}; a magic number has 1 to 9 digits")
    if not 1 <= min_needles <= max_needles <= len(cities):
        raise ConfigError(
            f"needles from {min_needles} to {max_needles}: allowed are 1 <= fewest <= most <= {len(cities)} (the "
            "number of cities)"
        )
    if asks < 1:
        raise ConfigError(f"{asks} questions: a needle document asks at least 1")


class _Pieces:
    """Token pieces, encoded once and joined many times."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        table = tokenizer.token_bytes
        self.starts_line = np.fromiter((token.startswith(b"\n") for token in table), dtype=bool, count=len(table))
        newline = self._continuation("a", "\n")
        if len(newline) != 1:
            raise DataError(f"the tokenizer writes a line end as {len(newline)} tokens {newline}; needles need 1")
        self.newline = newline[0]
        self.stub = cache(self._stub)
        self._left = FULL.stub("Paris")
        # If digits are single tokens after a space, numbers are looked up. Otherwise each number is encoded.
        pieces = [self._continuation(self._left, f" {digit}") for digit in range(10)]
        self._space, self._digits = pieces[0][:-1], [piece[-1] for piece in pieces]
        pairs = "".join(f"{pair:02d}" for pair in range(100))
        self._has_digits = all(
            self._continuation(self._left, f" {number}")
            == [*self._space, *(self._digits[int(digit)] for digit in number)]
            for number in (*"0123456789", pairs)
        )

    def _continuation(self, left: str, text: str) -> list[int]:
        advice = "use the byte tokenizer, a BPE trained here, or another pretrained one"
        return self.tokenizer.encode_after(left, text, advice)

    def _stub(self, city: str, sentence: Sentence = FULL) -> list[int]:
        return self._continuation("a", sentence.stub(city))

    def answer(self, number: str, *, space: bool = True) -> list[int]:
        if self._has_digits:
            return [*(self._space if space else ()), *(self._digits[int(digit)] for digit in number)]
        return self._continuation(self._left, f" {number}" if space else number)

    def filler(self, rng: np.random.Generator, stream: Any, length: int) -> npt.NDArray[np.int64]:
        """Return `length` corpus tokens from a random place. Ends of text and the first token become line ends."""
        total = len(stream)
        if total == 0:
            raise DataError("needle documents need corpus text, but the token stream is empty; tokenise a corpus first")
        start = int(rng.integers(total))
        taken = np.asarray(stream[start : start + length]).astype(np.int64)
        while len(taken) < length:
            taken = np.concatenate([taken, np.asarray(stream[: length - len(taken)]).astype(np.int64)])
        taken[taken == self.tokenizer.end_of_text] = self.newline
        if length and not self.starts_line[taken[0]]:
            taken[0] = self.newline
        return taken

    def line_ends(self, filler: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the places where a line of the filler ends, including the end of the filler."""
        return np.append(np.flatnonzero(self.starts_line[filler]), len(filler))

    def places(self, filler: npt.NDArray[np.int64], targets: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return where to insert lines: at the line end nearest to each target, or at the target, which becomes a line end."""
        ends = self.line_ends(filler)
        right = np.minimum(np.searchsorted(ends, targets), len(ends) - 1)
        left = np.maximum(right - 1, 0)
        nearest = np.where(targets - ends[left] <= ends[right] - targets, ends[left], ends[right])
        far = np.abs(nearest - targets) > _near_tokens(filler)
        if far.any():
            nearest[far] = targets[far].astype(np.int64)
            filler[nearest[far]] = self.newline
        return nearest


_pieces = lru_cache(maxsize=8)(_Pieces)


def _place_at_depth(
    pieces: _Pieces,
    filler: npt.NDArray[np.int64],
    others: npt.NDArray[np.int64],
    sentences: list[list[int]],
    depth: float,
) -> int:
    """Return the place in the filler that puts the first sentence at `depth` of the context with all needles."""
    if depth in (0.0, 1.0):
        return int(depth * len(filler))
    target = depth * (len(filler) + sum(map(len, sentences[1:])))
    order = np.argsort(others, kind="stable")
    before = np.cumsum([0, *(len(sentences[1 + index]) for index in order.tolist())])
    candidates = np.arange(len(filler) + 1)
    # Of needles at the same place the answer is first in the front half of the context and last in the back half.
    count = np.searchsorted(others[order], candidates, side="right" if depth >= 0.5 else "left")
    errors = np.abs(candidates + before[count] - target)
    ends = pieces.line_ends(filler)
    place = int(ends[errors[ends].argmin()])
    if errors[place] > errors.min() + _near_tokens(filler):
        place = int(errors.argmin())
        filler[place] = pieces.newline
    return place


def _near_tokens(filler: npt.NDArray[np.int64]) -> float:
    return max(_NEAR_TOKENS, _NEAR_SHARE * len(filler))


def _insert(
    first: int, filler: npt.NDArray[np.int64], placed: list[tuple[int, list[int]]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return `first` and the filler with sentences at ascending places, and each sentence's [start, end) in the row."""
    text = filler.tolist()
    row, spans, taken = [first], [], 0
    for place, sentence in placed:
        row += text[taken:place]
        spans.append((len(row), len(row) + len(sentence)))
        row += sentence
        taken = place
    return row + text[taken:], spans


def _distinct_numbers(rng: np.random.Generator, digits: int, count: int) -> list[str]:
    numbers: dict[str, None] = {}
    while len(numbers) < count:
        numbers[draw_number(rng, digits)] = None
    return list(numbers)


def _too_long(needles: int, needed: int, available: int) -> str:
    return (
        f"a needle document is longer than the context: {needles} needles and 1 question take {needed} tokens without any "
        f"corpus text, the context has {available}; lower needles or digits (--needles, --digits), or take a longer context"
    )

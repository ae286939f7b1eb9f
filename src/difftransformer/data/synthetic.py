"""Synthetic tasks: sequences of integers, drawn from a seed, in which some positions are scored.

MQAR is the multi-query associative recall of Zoology (arXiv:2312.04927), and the recall tasks are from MAD (arXiv:2403.17844).
Defaults are the published settings. An example is a row of inputs and a row of targets: at each position the token to predict,
which need not be the next input, or `IGNORED`.

Examples are a function of the options and the seed. Held-out examples are drawn first, and never occur in training.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, DataError
from ..typed import build
from .documents import IGNORED
from .shards import (
    MANIFEST_VERSION,
    SPLITS,
    Manifest,
    ShardFile,
    Shards,
    SplitManifest,
    TokenStream,
    id_dtype,
    item_dtype,
    records_of,
)
from .tokenizer import id_tokenizer

PREFIX = "synthetic:"
_ROUNDS = 100

Ints = npt.NDArray[np.int64]
Rows = tuple[Ints, Ints]
Rng = np.random.Generator


class Part(NamedTuple):
    """Examples of one setting: the setting, their number, and a function that draws a given number of them."""

    at: dict[str, Any]
    examples: int
    draw: Callable[[Rng, int], Rows]


class SyntheticTask(Protocol):
    """A task with its options. Token ids lie below `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def parts(self, seed: int, *, training: bool) -> list[Part]:
        """Return the parts of the training set, or of the held-out set."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of one setting.

    Attributes:
        inputs: (N, L) token ids.
        targets: (N, L) token ids to predict, or `IGNORED`.
        at: The setting, such as the number of pairs.
    """

    inputs: Ints
    targets: Ints
    at: dict[str, Any]


def _require(is_met: bool, text: str) -> None:
    if not is_met:
        raise ConfigError(text)


def _distinct(rng: Rng, count: int, choices: int, size: int) -> Ints:
    """Draw rows of `size` different integers below `choices`, (count, size), uniformly over all orders (Floyd's algorithm)."""
    drawn = np.empty((count, size), np.int64)
    for index, last in enumerate(range(choices - size, choices)):
        new = rng.integers(last + 1, size=count)
        is_taken = (drawn[:, :index] == new[:, None]).any(1)
        drawn[:, index] = np.where(is_taken, last, new)
    return rng.permuted(drawn, axis=1)


@dataclass(frozen=True, kw_only=True)
class MQAR:
    """Multi-query associative recall (arXiv:2312.04927): pairs of a key and a value, and then each key once more.

    The value must be predicted where its key occurs again; it does not follow among the inputs. Keys come from the first half
    of the vocabulary, values from the second. The distance between a pair and its query follows a power law.

    Attributes:
        vocab_size: Number of token ids; 0 is the filler.
        train: (length, pairs, examples) of each part of the training set.
        test: The same for the held-out set.
        power: Exponent of the power law plus 1; 1 is uniform.
        passes: How often the pairs are shown.
        filler: What stands between the queries: token 0, or random tokens of the whole vocabulary, keys included.
    """

    vocab_size: int = 8192
    train: list[tuple[int, int, int]] = field(default_factory=lambda: [(64, 4, 100_000)])
    test: list[tuple[int, int, int]] = field(default_factory=lambda: [(64, 4, 3_000)])
    power: float = 0.01
    passes: int = 1
    filler: Literal["zero", "random"] = "zero"

    # Zoology's figure 2, a model for each length, and figure 2 of Based (arXiv:2402.18668), one model for all.
    published: ClassVar[dict[str, dict[str, Any]]] = {
        f"zoology-{length}": {"train": [[length, pairs, 100_000]], "test": [[length, pairs, 3_000]], "filler": "zero"}
        for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64))
    } | {
        "based": {
            "train": [[64, 4, 100_000], *([length, pairs, 20_000] for length, pairs in
                      ((128, 8), (256, 16), (256, 32), (256, 64)))],
            "test": [[length, pairs, 1_000] for length, pairs in
                     ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))],
            "filler": "random",
        }
    }  # fmt: skip

    def __post_init__(self) -> None:
        _require(self.power > 0 and self.passes >= 1, f"power={self.power}, passes={self.passes}: give more than 0")
        _require(bool(self.train and self.test), "train and test: give at least one [length, pairs, examples] each")
        for length, pairs, examples in [*self.train, *self.test]:
            least = 2 * pairs * (self.passes + 1)
            _require(
                pairs >= 1 and examples >= 1 and length % 2 == 0 and length >= least,
                f"[length, pairs, examples]={[length, pairs, examples]}: {pairs} pairs take an even length of at least {least}",
            )
            _require(
                pairs < self.vocab_size // 2,
                f"vocab_size={self.vocab_size}: {pairs} pairs take at least {2 * (pairs + 1)}",
            )

    def parts(self, seed: int, *, training: bool) -> list[Part]:
        """See `SyntheticTask`."""
        return [
            Part({"pairs": pairs, "length": length}, examples, partial(self._draw, length, pairs))
            for length, pairs, examples in (self.train if training else self.test)
        ]

    def _draw(self, length: int, pairs: int, rng: Rng, count: int) -> Rows:
        half = self.vocab_size // 2
        keys = 1 + _distinct(rng, count, half - 1, pairs)
        values = half + _distinct(rng, count, self.vocab_size - half, pairs)
        shown = np.tile(np.stack([keys, values], axis=2).reshape(count, -1), (1, self.passes))
        # The positions with the largest perturbed logarithms are a draw by weight without replacement.
        space = (length - shown.shape[1]) // 2
        weights = (self.power - 1) * np.log(np.arange(1, space + 1))
        gaps = np.argsort(-(weights + rng.gumbel(size=(count, space))), axis=1)[:, :pairs]
        positions = shown.shape[1] + 2 * gaps
        inputs = np.zeros((count, length), np.int64)
        targets = np.full_like(inputs, IGNORED)
        inputs[:, : shown.shape[1]] = shown
        np.put_along_axis(inputs, positions, keys, axis=1)
        np.put_along_axis(targets, positions, values, axis=1)
        if self.filler == "random":
            inputs = np.where(inputs == 0, rng.integers(self.vocab_size, size=inputs.shape), inputs)
        return inputs, targets


@dataclass(frozen=True, kw_only=True)
class Recall:
    """In-context recall of MAD: pairs of a key and a value, in which keys come again with the same value.

    A value is an answer if its key was shown before. The last token is an answer too; its key is drawn from the keys shown. In
    noisy recall, a share of the pairs is replaced by two noise tokens, which are never keys or values.

    With much noise, MAD may draw an example without any pair, and then fails; here one pair is always kept.

    Attributes:
        vocab_size: Number of token ids.
        length: Length of a sequence in tokens.
        examples: Number of training examples.
        test_examples: Number of held-out examples.
        noise_vocab_size: Number of the token ids that are noise.
        noise_share: Share of the pairs that are noise.
        multi_query: Whether every repeated key is a question. Otherwise only the last one is, after a token of its own.
        train_on: Tokens in the training loss: all, as in MAD, or the answers alone. Held-out examples score the answers.
        train_lengths: Lengths of the training examples, in equal shares; `length` alone by default, as in MAD.
    """

    vocab_size: int = 16
    length: int = 128
    examples: int = 12_800
    test_examples: int = 1_280
    noise_vocab_size: int = 0
    noise_share: float = 0.0
    multi_query: bool = True
    train_on: Literal["all", "answers"] = "all"
    train_lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        _require(
            min(self.examples, self.test_examples) >= 1,
            f"examples={self.examples}, test_examples={self.test_examples}: give at least 1",
        )
        _require(
            0 <= self.noise_share < 1 and self.noise_vocab_size >= (self.noise_share > 0),
            f"noise_share={self.noise_share}, noise_vocab_size={self.noise_vocab_size}: give a share of at least 0 and "
            "below 1, and tokens for noise",
        )
        for length in (self.length, *self.train_lengths):
            _require(length % 2 == 0 and length >= 4, f"length={length}: give an even length of at least 4 tokens")
        _require(
            self.examples >= len(self.train_lengths),
            f"examples={self.examples}: give at least one for each of {len(self.train_lengths)} lengths",
        )
        _require(
            self._ordinary >= 2, f"vocab_size={self.vocab_size}: no room for a key and a value beside the other tokens"
        )

    @property
    def _ordinary(self) -> int:
        """Number of keys and values."""
        return self.vocab_size - self.noise_vocab_size - (not self.multi_query)

    def parts(self, seed: int, *, training: bool) -> list[Part]:
        """See `SyntheticTask`."""
        lengths = (training and self.train_lengths) or [self.length]
        examples = (self.examples if training else self.test_examples) // len(lengths)
        return [
            Part({"noise_share": self.noise_share, "length": length}, examples, partial(self._draw, training, length))
            for length in lengths
        ]

    def _draw(self, training: bool, length: int, rng: Rng, count: int) -> Rows:
        key_count, slots = self._ordinary // 2, length // 2 - 1
        keys = rng.integers(key_count, size=(count, slots))
        table = rng.integers(key_count, self._ordinary, size=(count, key_count))  # the value of each key
        is_noise = rng.random((count, slots)) < self.noise_share
        is_noise[np.arange(count), rng.integers(slots, size=count)] = False
        occurs = np.zeros((count, key_count), bool)
        is_known = np.empty((count, slots), bool)
        for slot in range(slots):
            held = np.arange(count), keys[:, slot]
            is_known[:, slot] = occurs[held] & ~is_noise[:, slot]
            occurs[held] |= ~is_noise[:, slot]
        probe = np.where(occurs, rng.random(occurs.shape), -1).argmax(1)[:, None]
        keys, is_known = np.hstack([keys, probe]), np.hstack([is_known, np.ones_like(probe, bool)])
        shown = np.stack([keys, np.take_along_axis(table, keys, 1)], axis=2)
        noise = self._ordinary + rng.integers(max(1, self.noise_vocab_size), size=(count, slots, 2))
        shown[:, :-1] = np.where(is_noise[:, :, None], noise, shown[:, :-1])
        is_asked = np.zeros(shown.shape, bool)
        is_asked[:, :, 1] = is_known if self.multi_query else False
        is_asked[:, -1, 1] = True
        tokens, asked = shown.reshape(count, -1), is_asked.reshape(count, -1)
        if not self.multi_query:  # the last pair follows a token of its own
            tokens = np.insert(tokens, -2, self.vocab_size - 1, axis=1)
            asked = np.insert(asked, -2, False, axis=1)
        return _next_tokens(tokens, asked | (training and self.train_on == "all"))


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(Recall):
    __doc__ = Recall.__doc__
    vocab_size: int = 32
    noise_vocab_size: int = 16
    noise_share: float = 0.2


def _next_tokens(tokens: Ints, is_scored: npt.NDArray[np.bool_]) -> Rows:
    """Shift sequences into inputs and targets. Only scored tokens are targets."""
    return tokens[:, :-1], np.where(is_scored, tokens, IGNORED)[:, 1:]


TASKS: dict[str, type] = {"mqar": MQAR, "recall": Recall, "noisy-recall": NoisyRecall}


def synthetic_task(source: str, options: dict[str, Any]) -> SyntheticTask:
    """Return a task with its options.

    Args:
        source: "synthetic:" and a name of `TASKS`.
        options: Fields of the task. MQAR also takes `protocol`, a name in `MQAR.published`, which sets fields first.

    Raises:
        ConfigError: There is no such task or protocol, or an option does not fit.
    """
    name = source.removeprefix(PREFIX)
    if name not in TASKS:
        raise ConfigError(
            f"source {source!r}: no such task; choose one of {', '.join(PREFIX + task for task in TASKS)}"
        )
    options, published = dict(options), getattr(TASKS[name], "published", {})
    if published and "protocol" in options:
        protocol = options.pop("protocol")
        if protocol not in published:
            raise ConfigError(f"options.protocol: no {protocol!r}; choose one of {', '.join(published)}")
        options = published[protocol] | options
    task: SyntheticTask = build(TASKS[name], options, source="", key="options", error=ConfigError)
    return task


def draw_examples(task: SyntheticTask, seed: int, *, training: bool) -> list[Examples]:
    """Draw the training examples or the held-out examples of a task, one `Examples` for each setting.

    Raises:
        DataError: The options leave too few examples that are not held out.
    """
    held_out: set[bytes] = set()
    if training:
        held_out = {row.tobytes() for one in draw_examples(task, seed, training=False) for row in one.inputs}
    return [
        Examples(*_draw_others(part, np.random.default_rng([seed, training, index]), held_out), part.at)
        for index, part in enumerate(task.parts(seed, training=training))
    ]


def _draw_others(part: Part, rng: Rng, held_out: set[bytes]) -> Rows:
    """Draw the examples of a part, and draw again those that are held out."""
    inputs, targets = part.draw(rng, part.examples)
    for _ in range(_ROUNDS):
        again = np.array([index for index, row in enumerate(inputs) if row.tobytes() in held_out], np.int64)
        if not len(again):
            return inputs, targets
        inputs[again], targets[again] = part.draw(rng, len(again))
    raise DataError(
        f"{len(again)} of {part.examples} training examples are held out however often they are drawn; ask for longer examples "
        "or fewer held-out ones"
    )


def synthetic_shards(source: str, options: dict[str, Any], seed: int) -> Shards:
    """Draw the examples of a task as shards in memory. Held-out examples longer than all of training are left out.

    The tokenizer has two further tokens, for the end of text and padding.

    Raises:
        ConfigError: See `synthetic_task`.
        DataError: See `draw_examples`.
    """
    task = synthetic_task(source, options)
    tokenizer = id_tokenizer(task.vocab_size)
    dtype = id_dtype(tokenizer)
    drawn = {split: draw_examples(task, seed, training=split == "train") for split in SPLITS}
    longest = max(one.inputs.shape[1] for one in drawn["train"])
    drawn["validation"] = [one for one in drawn["validation"] if one.inputs.shape[1] <= longest]
    records: dict[str, TokenStream] = {}
    splits: dict[str, SplitManifest] = {}
    for split, sets in drawn.items():
        parts = [_records(one, item_dtype(dtype, "examples")) for one in sets]
        records[split] = TokenStream(parts)
        files = [
            ShardFile(file=f"{split}-{index:05d}", tokens=len(part), sha256=hashlib.sha256(part.tobytes()).hexdigest())
            for index, part in enumerate(parts)
        ]
        count = sum(len(one.inputs) for one in sets)
        splits[split] = SplitManifest(documents=count, tokens=len(records[split]), bytes=0, shards=files)
    manifest = Manifest(
        version=MANIFEST_VERSION,
        source=source,
        request={"source": source, "options": options, "seed": seed, "longest_tokens": longest},
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype,
        splits=splits,
        content="examples",
    )
    return Shards.of_records(Path(source), manifest, tokenizer, records)


def _records(examples: Examples, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    count, length = examples.inputs.shape
    return records_of(examples.inputs.ravel(), examples.targets.ravel(), length * np.arange(1, count + 1), dtype)

"""A deterministic loader: the batch of a step is a pure function of data, settings, seed and step.

To resume exactly, only the step has to be saved. Several ranks together see the same rows as one process. Plain rows are
windows of the token stream. In each epoch the stream is cut into non-overlapping windows at a random shift, and each window is
read once, in random order. Retrieval rows are needle documents (`needles`), which are drawn from the seed and spread evenly
over the sequence of rows according to their share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError, DataError
from .needles import CITIES_SEEN, RetrievalMix, needle_document_tokens, training_document
from .shards import Shards, Split

MOST_BATCH_TOKENS = 2**31 - 1
# The first word of a seed sequence tells what the random numbers are for.
_FOR_EPOCH, _FOR_RETRIEVAL = 1, 2


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of T + 1 tokens, split into inputs and targets.

    Attributes:
        input_ids: (B, T) int64.
        targets: (B, T) int64. targets[:, t] follows input_ids[:, t], so they are already shifted.
        is_retrieval: (B,) bool. True for rows that are needle documents.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    is_retrieval: torch.Tensor


@dataclass(eq=False)
class Loader:
    """An endless iterator over batches, with random access: `batch(step)`.

    Args:
        shards: Shards to read.
        split: Split to read.
        batch_tokens: Tokens of a step over all ranks, a multiple of every context.
        context_stages: (first step, context in tokens) pairs with ascending steps from 0. Shorter contexts at first make
            training cheaper. A step has batch_tokens / context rows.
        seed: Seed of all random draws.
        rank: Index of this process, 0 to world_size - 1.
        world_size: Number of processes that share the rows of a step, in consecutive blocks. It divides the number of rows
            in every stage.
        retrieval: Composition of the needle documents; None for none.

    Raises:
        ConfigError: The settings contradict each other.
        DataError: The split is shorter than a window, or needle documents are longer than a context.
    """

    shards: Shards
    _: KW_ONLY
    split: Split = "train"
    batch_tokens: int
    context_stages: Sequence[tuple[int, int]]
    seed: int
    rank: int = 0
    world_size: int = 1
    retrieval: RetrievalMix | None = None

    def __post_init__(self) -> None:
        self.context_stages = tuple((int(start), int(context)) for start, context in self.context_stages)
        if self.retrieval is not None and self.retrieval.share == 0:
            self.retrieval = None
        # As a fraction (0.1 is 1/10), so that rows are counted in exact integers.
        self._share = Fraction(self.retrieval.share if self.retrieval else 0).limit_denominator(10**9)
        self.step = 0
        self._stream = self.shards.tokens(self.split)
        self._check()
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def _check(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of world_size {self.world_size}; allowed are 0 to world_size - 1")
        check_context_stages(self.context_stages, self.batch_tokens, parts=self.world_size, divisor="world_size")
        for start, context in self.context_stages:
            if len(self._stream) < context + 1:
                raise DataError(
                    f"{self.shards.folder}: the {self.split} split has {len(self._stream)} tokens, a window takes "
                    f"{context + 1} (context {context} from step {start}); tokenise more text or shorten the context"
                )
            if self.retrieval is None:
                continue
            mix, tokenizer = self.retrieval, self.shards.tokenizer
            needed = needle_document_tokens(
                tokenizer, needles=mix.min_needles, asks=1, digits=mix.digits, cities=CITIES_SEEN
            )
            if needed > context + 1:
                raise DataError(
                    f"needle documents are longer than the context: {mix.min_needles} needles and 1 question "
                    f"of {mix.digits} digits take up to {needed} tokens without any corpus text, a row has "
                    f"{context + 1} (context {context} from step {start}); lower min_needles or digits, or raise the "
                    "context"
                )

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of a step, counted from 0.

        Raises:
            ConfigError: The step is negative.
        """
        stage = self._stage(step)
        start, context = self.context_stages[stage]
        rows = self.batch_tokens // context
        mine = rows // self.world_size
        first = (step - start) * rows + self.rank * mine
        block = np.empty((mine, context + 1), dtype=np.int64)
        is_retrieval = np.zeros(mine, dtype=bool)
        for index in range(mine):
            row = first + index
            before, after = self._retrieval_rows(row), self._retrieval_rows(row + 1)
            if after > before:
                is_retrieval[index] = True
                block[index] = self._retrieval_row(stage, row, context)
            else:
                block[index] = self._plain_row(stage, row - before, context)
        tokens = torch.from_numpy(block)
        return Batch(
            input_ids=tokens[:, :-1].contiguous(),
            targets=tokens[:, 1:].contiguous(),
            is_retrieval=torch.from_numpy(is_retrieval),
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the next step, with the data and settings it refers to. The state is the same on every rank."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. The number of ranks may have changed.

        Raises:
            DataError: The position was saved with other data, another seed or other settings.
        """
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise DataError(
                    f"the saved position of the loader does not fit: {key} was {state.get(key)!r} and is {value!r} "
                    "now; resume with the data and settings of the run, or start a new run"
                )
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "fingerprint": self.shards.manifest.fingerprint,
            "split": self.split,
            "batch_tokens": self.batch_tokens,
            "context_stages": [list(stage) for stage in self.context_stages],
            "retrieval": asdict(self.retrieval) if self.retrieval else None,
        }

    def _stage(self, step: int) -> int:
        if step < 0:
            raise ConfigError(f"step is {step}; it must be 0 or more")
        return max(index for index, (start, _) in enumerate(self.context_stages) if start <= step)

    def _draw_epoch(self, stage: int, epoch: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Draw the shift and the order of the windows of an epoch."""
        context = self.context_stages[stage][1]
        rng = np.random.default_rng([_FOR_EPOCH, self.seed, stage, epoch])
        windows = self._windows(context)
        shift = int(rng.integers(len(self._stream) - windows * context))
        return shift, rng.permutation(windows)

    def _retrieval_rows(self, rows: int) -> int:
        """Return the number of retrieval rows among the first `rows` of a stage: the share, rounded down."""
        return rows * self._share.numerator // self._share.denominator

    def _windows(self, context: int) -> int:
        """Return the number of windows per epoch, which leaves room for a shift by up to a window if possible."""
        return max(1, (len(self._stream) - context) // context)

    def _plain_row(self, stage: int, row: int, context: int) -> npt.NDArray[Any]:
        epoch, index = divmod(row, self._windows(context))
        shift, order = self._epoch(stage, epoch)
        offset = shift + int(order[index]) * context
        window: npt.NDArray[Any] = self._stream[offset : offset + context + 1]
        return window

    def _retrieval_row(self, stage: int, row: int, context: int) -> list[int]:
        assert self.retrieval is not None
        rng = np.random.default_rng([_FOR_RETRIEVAL, self.seed, stage, row])
        return training_document(rng, self.shards.tokenizer, self._stream, context_tokens=context, mix=self.retrieval)


def check_context_stages(stages: Sequence[tuple[int, int]], batch_tokens: int, *, parts: int, divisor: str) -> None:
    """Check that stages are in order and that each of the `parts` of a batch has the same number of complete rows.

    `divisor` names the setting that gives the number of parts, for messages.

    Raises:
        ConfigError: They are not in order, or the batch cannot be divided so.
    """
    starts = [start for start, _ in stages]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise ConfigError(
            f"context_stages={list(stages)}: give (first step, context) pairs with ascending steps from 0"
        )
    if batch_tokens > MOST_BATCH_TOKENS:
        raise ConfigError(f"batch_tokens={batch_tokens}: give at most {MOST_BATCH_TOKENS:,}")
    for start, context in stages:
        if context < 1 or batch_tokens < 1 or batch_tokens % (context * parts):
            raise ConfigError(
                f"batch_tokens={batch_tokens}: from step {start} it must be a multiple of {context * parts} (context "
                f"{context} x {divisor} {parts}), so that every part of a batch has the same number of complete rows"
            )


def validation_windows(
    shards: Shards, context_tokens: int, max_windows: int | None = None, *, split: Split = "validation"
) -> Iterator[npt.NDArray[np.int64]]:
    """Return fixed windows for evaluation, without overlap and evenly spread over the split.

    Args:
        shards: Shards to read.
        context_tokens: Context T. The last target of a window may be the first input of the next one.
        max_windows: Maximum number of windows; None for all that fit.
        split: Split to read.

    Returns:
        An iterator over (T + 1,) int64 arrays.

    Raises:
        ConfigError: A size is below 1.
        DataError: The split is shorter than one window.
    """
    if context_tokens < 1 or (max_windows is not None and max_windows < 1):
        raise ConfigError(f"context_tokens is {context_tokens} and max_windows {max_windows}; both must be at least 1")
    stream = shards.tokens(split)
    fitting = (len(stream) - 1) // context_tokens
    if fitting < 1:
        raise DataError(
            f"{shards.folder}: the {split} split has {len(stream)} tokens, a window takes {context_tokens + 1}; "
            "give more validation text (another share or source) or shorten the context"
        )
    count = fitting if max_windows is None else min(max_windows, fitting)
    offsets = [index * fitting // count * context_tokens for index in range(count)]
    return (np.asarray(stream[offset : offset + context_tokens + 1]).astype(np.int64) for offset in offsets)

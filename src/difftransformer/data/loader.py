"""A deterministic loader: the batch of a step is a pure function of (data, settings, seed, step).

Nothing but the step has to be saved to go on exactly, and w ranks together see the rows of one process. Plain rows are
windows of the token stream: for each epoch the stream is cut into non-overlapping windows at a random shift, and the
windows are taken in a random order, each once. Retrieval rows are needle documents (`needles`), drawn afresh from the
seed, and take the places in the sequence that a stated share gives them, evenly spread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError, DataError
from .needles import CITIES_SEEN, NeedleFormat, check_needles, needle_document_tokens, training_document
from .shards import Shards, Split

# First word of every seed sequence: what the random numbers are for.
_FOR_EPOCH, _FOR_RETRIEVAL = 1, 2


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of T + 1 tokens, seen as inputs and their next tokens.

    Attributes:
        input_ids: (B, T) int64.
        targets: (B, T) int64; targets[:, t] follows input_ids[:, t], so nothing is left to shift.
        is_retrieval: (B,) bool, the rows that are needle documents.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    is_retrieval: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RetrievalMix:
    """What share of training rows are needle documents, and what these are made of.

    Attributes:
        share: of all rows, 0 to 1.
        min_needles: fewest needles in a document.
        max_needles: most needles in a document; fewer where the context holds fewer.
        asks: most questions at the end of a document that is not dense.
        digits: digits of a number, 1 to 9.
        dense: share of the documents that fill all their room with questions.
        terse: share of the documents whose needle sentences are shortened at random, down to city and number alone.
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
        NeedleFormat(digits=self.digits)
        check_needles(min_needles=self.min_needles, max_needles=self.max_needles, asks=self.asks, cities=CITIES_SEEN)


class Loader:
    """An endless iterator over batches, with random access: `batch(step)`.

    Args:
        shards: the data.
        split: which split to read.
        batch_tokens: tokens of one step over all ranks; a multiple of every context.
        context_stages: (first step, context in tokens), ascending, the first at step 0: shorter contexts first make
            training cheaper. A step has batch_tokens / context rows.
        seed: everything random follows from it.
        rank: this process, 0 to world_size - 1.
        world_size: processes that share a step's rows, in consecutive blocks; it divides the rows of every stage.
        retrieval: the share of needle documents; None for none.

    Raises:
        ConfigError: settings that contradict each other.
        DataError: the split is shorter than a window, or needle documents are longer than a context.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        split: Split = "train",
        batch_tokens: int,
        context_stages: Sequence[tuple[int, int]],
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        retrieval: RetrievalMix | None = None,
    ) -> None:
        self.shards = shards
        self.split = split
        self.batch_tokens = batch_tokens
        self.context_stages = tuple((int(start), int(context)) for start, context in context_stages)
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.retrieval = retrieval if retrieval is not None and retrieval.share > 0 else None
        # The share as written (0.1 is 1/10), so that the rows it takes are counted in exact integers.
        self._share = Fraction(self.retrieval.share if self.retrieval else 0).limit_denominator(10**9)
        self.step = 0
        self._stream = shards.tokens(split)
        self._check()
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def _check(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} of world_size {self.world_size}; allowed are ranks 0 to world_size - 1"
            )
        starts = [start for start, _ in self.context_stages]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ConfigError(
                f"context_stages is {list(self.context_stages)}; give (first step, context) pairs with ascending steps "
                "from 0"
            )
        for start, context in self.context_stages:
            if context < 1 or self.batch_tokens < 1 or self.batch_tokens % (context * self.world_size):
                raise ConfigError(
                    f"batch_tokens is {self.batch_tokens}; from step {start} it must be a multiple of "
                    f"{context * self.world_size} (context {context} x {self.world_size} processes), so that every row "
                    "is whole and every process has as many"
                )
            if len(self._stream) < context + 1:
                raise DataError(
                    f"{self.shards.folder}: the {self.split} split has {len(self._stream)} tokens, a window takes "
                    f"{context + 1} (context {context} from step {start}); tokenise more text or shorten the context"
                )
            if self.retrieval is None:
                continue
            needed = needle_document_tokens(
                self.shards.tokenizer,
                needles=self.retrieval.min_needles,
                asks=1,
                digits=self.retrieval.digits,
                cities=CITIES_SEEN,
            )
            if needed > context + 1:
                raise DataError(
                    f"needle documents are longer than the context: {self.retrieval.min_needles} needles and 1 question "
                    f"of {self.retrieval.digits} digits take up to {needed} tokens without any corpus text, a row has "
                    f"{context + 1} (context {context} from step {start}); lower min_needles or digits, or raise the "
                    "context"
                )

    def context_tokens(self, step: int) -> int:
        """The context at a step.

        Raises:
            ConfigError: a negative step.
        """
        return self.context_stages[self._stage(step)][1]

    def batch(self, step: int) -> Batch:
        """This rank's rows of a step.

        Args:
            step: from 0.

        Raises:
            ConfigError: a negative step.
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
        """The position: the step that comes next, and what it is a position in. It is the same on every rank."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; the number of ranks may be another.

        Raises:
            DataError: the position was saved with other data, another seed or other settings.
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
        """Shift and order of the windows in one epoch; costs O(windows) once an epoch, and the last two are kept."""
        context = self.context_stages[stage][1]
        rng = np.random.default_rng([_FOR_EPOCH, self.seed, stage, epoch])
        windows = self._windows(context)
        shift = int(rng.integers(len(self._stream) - windows * context))
        return shift, rng.permutation(windows)

    def _retrieval_rows(self, rows: int) -> int:
        """Retrieval rows among the first `rows` of a stage: the share, rounded down."""
        return rows * self._share.numerator // self._share.denominator

    def _windows(self, context: int) -> int:
        """Windows an epoch: as many as leave room to shift by at least a window, where the stream allows it."""
        return max(1, (len(self._stream) - context) // context)

    def _plain_row(self, stage: int, row: int, context: int) -> npt.NDArray[Any]:
        epoch, index = divmod(row, self._windows(context))
        shift, order = self._epoch(stage, epoch)
        offset = shift + int(order[index]) * context
        window: npt.NDArray[Any] = self._stream[offset : offset + context + 1]
        return window

    def _retrieval_row(self, stage: int, row: int, context: int) -> list[int]:
        assert self.retrieval is not None
        return training_document(
            np.random.default_rng([_FOR_RETRIEVAL, self.seed, stage, row]),
            self.shards.tokenizer,
            self._stream,
            context_tokens=context,
            min_needles=self.retrieval.min_needles,
            max_needles=self.retrieval.max_needles,
            asks=self.retrieval.asks,
            digits=self.retrieval.digits,
            dense=self.retrieval.dense,
            terse=self.retrieval.terse,
        )


def validation_windows(
    shards: Shards, context_tokens: int, max_windows: int | None = None, *, split: Split = "validation"
) -> Iterator[npt.NDArray[np.int64]]:
    """Windows for evaluation: always the same, non-overlapping, evenly spread over the split.

    Args:
        shards: the data.
        context_tokens: T; neighbouring windows share one token, the last target of one being the first input of the
            next.
        max_windows: at most so many; None for all that fit.
        split: which split to read.

    Returns:
        An iterator over (T + 1,) int64 arrays.

    Raises:
        ConfigError: a size is below 1.
        DataError: the split is shorter than one window.
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

"""A deterministic loader: the batch of a step is a pure function of data, settings, seed and step.

To resume exactly, only the step has to be saved. Several ranks together see the same rows as one process. Plain rows are
windows of the token stream, or whole documents or examples packed side by side (`packing`), and each is read once an epoch,
in random order. In a mixture, each source has its own epochs, and rows are divided among the sources by weight (`Allocation`).
Retrieval rows are needle documents (`needles`), which are drawn from the seed and spread evenly over the sequence of rows
according to their share.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError, DataError
from .needles import CITIES_SEEN, RetrievalMix, needle_document_tokens, training_document
from .packing import IGNORED, ExamplePacks, Packs, Row, Windows, with_long_documents_again
from .shards import Shards, SourceConfig, Split

MOST_BATCH_TOKENS = 2**31 - 1
# The first word of a seed sequence tells what the random numbers are for.
_FOR_EPOCH, _FOR_RETRIEVAL, _FOR_MIXTURE, _FOR_SOURCE, _FOR_VALIDATION = 1, 2, 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of T inputs and their targets.

    Attributes:
        input_ids: (B, T) int64.
        targets: (B, T) int64. targets[:, t] follows input_ids[:, t], so they are already shifted. -100 in padding,
            and where an example says that nothing is learned.
        is_retrieval: (B,) bool. True for rows that are needle documents.
        position_ids: (B, T) int64 positions that start at 0 in each document, or None without packing.
        step_targets: Number of targets other than -100 in the step, over all ranks.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    is_retrieval: torch.Tensor
    position_ids: torch.Tensor | None
    step_targets: int

    def parts(self, count: int, device: str) -> "Iterator[Batch]":
        """Yield `count` batches of equally many rows on a device; positions stay on the host, to count documents."""
        chunks = self._tensors(lambda tensor: tensor.to(device, non_blocking=True).chunk(count))
        if self.position_ids is not None:
            chunks["position_ids"] = self.position_ids.chunk(count)
        for index in range(count):
            yield dataclasses.replace(self, **{name: parts[index] for name, parts in chunks.items()})

    def pinned(self) -> "Batch":
        """Return the batch in pinned memory, from where a GPU copies it while it computes."""
        return dataclasses.replace(self, **self._tensors(torch.Tensor.pin_memory))

    def _tensors(self, change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
        return {name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def share_of(value: float) -> Fraction:
    """Return a share or weight as the fraction that was written (0.1 is 1/10), so that rows are counted in exact integers."""
    return Fraction(value).limit_denominator(10**9) or Fraction(value)  # which is not 0 because it is small


class Allocation:
    """Divides rows 0, 1, 2 ... among sources by weight.

    Row by row, the first source takes its share of all rows, the second its share of the rest, and so on. Taken rows are
    spread evenly: of any n consecutive rows, a source takes its share of them to within the number of sources. So the
    number of a source's earlier rows is a formula, and any row can be found without its predecessors.

    Args:
        weights: Weights of the sources, each above 0.
        rng: Draws the phase of each source.
    """

    def __init__(self, weights: Sequence[float], rng: np.random.Generator) -> None:
        fractions = [share_of(weight) for weight in weights]
        self.steps = []
        for index, fraction in enumerate(fractions[:-1]):
            share, phase = fraction / sum(fractions[index:]), Fraction(int(rng.integers(2**32)), 2**32)
            # floor(rows * share + phase), over one denominator
            self.steps.append((share.numerator * phase.denominator, phase.numerator * share.denominator,
                               share.denominator * phase.denominator))  # fmt: skip

    def place(self, row: int) -> tuple[int, int]:
        """Return the source of a row, and how many earlier rows that source has."""
        for source, (slope, phase, denominator) in enumerate(self.steps):
            before = (row * slope + phase) // denominator
            if ((row + 1) * slope + phase) // denominator > before:
                return source, before
            row -= before
        return len(self.steps), row


@dataclass(eq=False)
class Loader:
    """An endless iterator over batches, with random access: `batch(step)`.

    Args:
        shards: Shards to read; for a mixture, see `Shards.mix`.
        split: Split to read.
        batch_tokens: Tokens of a step over all ranks, a multiple of every context.
        context_stages: (first step, context in tokens) pairs with ascending steps from 0. Shorter contexts at first make
            training cheaper. A step has batch_tokens / context rows.
        seed: Seed of all random draws.
        rank: Index of this process, 0 to world_size - 1.
        world_size: Number of processes that share the rows of a step, in consecutive blocks. It divides the number of rows
            in every stage.
        retrieval: Composition of the needle documents; None for none.
        pack_documents: Whether rows hold whole documents with positions of their own, in place of windows of the
            concatenated text. Examples are always packed so.
        prefetch: Whether the batch after the one that `next` returns is read in a thread meanwhile.
        pin_memory: Whether it is read into pinned memory.

    Raises:
        ConfigError: The settings contradict each other.
        DataError: A split is shorter than a window, or needle documents are longer than a context.
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
    pack_documents: bool = False
    prefetch: bool = False
    pin_memory: bool = False

    def __post_init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._reading: tuple[int, Future[Batch]] | None = None  # a step, and its batch
        self.context_stages = tuple((int(start), int(context)) for start, context in self.context_stages)
        if self.retrieval is not None and self.retrieval.share == 0:
            self.retrieval = None
        self._share = share_of(self.retrieval.share if self.retrieval else 0)
        self.step = 0
        self._stream = self.shards.tokens(self.split)
        self._sources = self.shards.sources or ((SourceConfig(source=self.shards.manifest.source), self.shards),)
        self._check()
        self._feed = cache(self._open_feed)
        self._allocation = cache(self._draw_allocation)

    def _check(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of world_size {self.world_size}; allowed are 0 to world_size - 1")
        check_context_stages(self.context_stages, self.batch_tokens, parts=self.world_size, divisor="world_size")
        for start, context in self.context_stages:
            for _, shards in self._sources:
                if shards.records and not self.pack_documents:
                    raise ConfigError(
                        f"pack_documents is false, and {shards.manifest.source} holds examples, which are packed into rows; "
                        "set pack_documents to true"
                    )
                if (longest := shards.manifest.request.get("longest_tokens", 0)) > context:
                    raise ConfigError(
                        f"context {context} from step {start}: examples of {shards.manifest.source} have up to {longest} "
                        "tokens, and cannot be cut; give every stage of context_stages at least as many"
                    )
                if (length := len(shards.tokens(self.split))) < context + 1 and not self.pack_documents:
                    raise DataError(
                        f"{shards.folder}: the {self.split} split has {length} tokens, a window takes "
                        f"{context + 1} (context {context} from step {start}); tokenise more text or shorten the context"
                    )
            if self.retrieval is None:
                continue
            if examples := [shards.manifest.source for _, shards in self._sources if shards.records]:
                raise ConfigError(
                    f"retrieval: needle documents take text, and {examples[0]} holds examples; leave it out"
                )
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
        first = (step - start) * rows
        inputs, targets, positions = np.empty((3, mine, context), dtype=np.int64)
        is_retrieval = np.zeros(mine, dtype=bool)
        for index in range(mine):
            row = first + self.rank * mine + index
            before, after = self._retrieval_rows(row), self._retrieval_rows(row + 1)
            is_retrieval[index] = after > before
            if after > before:
                inputs[index], targets[index], positions[index] = self._retrieval_row(stage, row, context)
            else:
                feed, place = self._plain_place(stage, row - before)
                inputs[index], targets[index], positions[index] = feed.row(place)
        return Batch(
            input_ids=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            is_retrieval=torch.from_numpy(is_retrieval),
            position_ids=torch.from_numpy(positions) if self.pack_documents else None,
            step_targets=self._step_targets(stage, range(first, first + rows)),
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._read_ahead() if self.prefetch else self.batch(self.step)
        self.step += 1
        return batch

    def _read_ahead(self) -> Batch:
        """Return the next batch, and begin to read the one after it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        step, batch = self._reading or (None, None)
        if batch is None or step != self.step:  # the first, or the position has changed
            batch = self._thread.submit(self._ready, self.step)
        read = batch.result()
        self._reading = self.step + 1, self._thread.submit(self._ready, self.step + 1)
        return read

    def _ready(self, step: int) -> Batch:
        batch = self.batch(step)
        return batch.pinned() if self.pin_memory else batch

    def close(self) -> None:
        """Stop to read ahead."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = self._reading = None

    @property
    def context_tokens(self) -> int:
        """Length of the rows of the last batch that was returned, or of the first."""
        return self.context_stages[self._stage(max(0, self.step - 1))][1]

    def state_dict(self) -> dict[str, Any]:
        """Return the next step, with the data and settings it refers to. The state is the same on every rank."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. The number of ranks may have changed.

        Raises:
            DataError: The position was saved with other data, another seed or other settings.
        """
        for key, value in self._identity().items():
            if state.get(key) != value and key != "data":
                raise DataError(
                    f"the saved position of the loader does not fit: {key} was {state.get(key)!r} and is {value!r} now"
                    f"{self._changed(state) if key == 'fingerprint' else ''}; resume with the data and settings of the run, "
                    "or start a new run"
                )
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        mixture = [asdict(config) | {"source": shards.manifest.fingerprint} for config, shards in self.shards.sources]
        return {
            "seed": self.seed,
            "fingerprint": self.shards.manifest.fingerprint,
            "data": {config.source: shards.manifest.fingerprint for config, shards in self._sources},
            "split": self.split,
            "batch_tokens": self.batch_tokens,
            "context_stages": [list(stage) for stage in self.context_stages],
            "retrieval": asdict(self.retrieval) if self.retrieval else None,
            # None where they are not used: checkpoints of earlier releases lack these keys.
            "mixture": mixture or None,
            "pack_documents": self.pack_documents or None,
        }

    def _changed(self, state: dict[str, Any]) -> str:
        """Name the sources that have changed since a position was saved, if it recorded them."""
        before, now = state.get("data") or {}, self._identity()["data"]
        if not before:
            return ""
        different = [source for source in {**before, **now} if before.get(source) != now.get(source)]
        return f" (other data in {', '.join(different)})" if different else ""

    def _stage(self, step: int) -> int:
        if step < 0:
            raise ConfigError(f"step is {step}; it must be 0 or more")
        return max(index for index, (start, _) in enumerate(self.context_stages) if start <= step)

    def _open_feed(self, stage: int, source: int) -> Windows | Packs:
        """Return the rows of a source at a stage."""
        config, shards = self._sources[source]
        stream, end_of_text = shards.tokens(self.split), shards.tokenizer.end_of_text
        key = (_FOR_SOURCE, source, self.seed, stage) if self.shards.sources else (_FOR_EPOCH, self.seed, stage)
        context = self.context_stages[stage][1]
        long = {"long_tokens": config.long_tokens, "times": config.long_times}
        if self.pack_documents:
            packs = _packs(shards, self.split, context=context, key=key, **long)
            if packs.left_out and self.rank == 0:
                warnings.warn(
                    f"{shards.manifest.source}: left out {packs.left_out:,} of the parts into which rows of {context} tokens "
                    f"cut examples, since nothing is learned from them ({packs.per_epoch:,} rows remain); a longer context "
                    "keeps examples whole",
                    stacklevel=2,
                )
            return packs
        if config.long_tokens and config.long_times > 1:
            stream = with_long_documents_again(stream, end_of_text, **long)
        return Windows(stream, context=context, key=key)

    def _plain_place(self, stage: int, row: int) -> tuple[Windows | Packs, int]:
        """Return the source of a plain row and the row's index in it."""
        if not self.shards.sources:
            return self._feed(stage, 0), row
        source, index = self._allocation(stage).place(row)
        return self._feed(stage, source), index

    def _draw_allocation(self, stage: int) -> Allocation:
        rng = np.random.default_rng([_FOR_MIXTURE, self.seed, stage])
        return Allocation([config.weight for config, _ in self._sources], rng)

    def _retrieval_rows(self, rows: int) -> int:
        """Return the number of retrieval rows among the first `rows` of a stage: the share, rounded down."""
        return rows * self._share.numerator // self._share.denominator

    def _step_targets(self, stage: int, rows: range) -> int:
        """Return the number of targets that count in the loss."""
        context = self.context_stages[stage][1]
        if not self.pack_documents:
            return len(rows) * context
        total = 0
        for row in rows:
            before = self._retrieval_rows(row)
            if self._retrieval_rows(row + 1) > before:
                total += context
            else:
                feed, index = self._plain_place(stage, row - before)
                total += feed.targets(index)
        return total

    def _retrieval_row(self, stage: int, row: int, context: int) -> Row:
        assert self.retrieval is not None
        rng = np.random.default_rng([_FOR_RETRIEVAL, self.seed, stage, row])
        ids = training_document(rng, self.shards.tokenizer, self._stream, context_tokens=context, mix=self.retrieval)
        return Row(np.array(ids[:-1]), np.array(ids[1:]), np.arange(context))


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


def _packs(shards: Shards, split: Split, **packing: Any) -> Packs:
    tokenizer = shards.tokenizer
    packing |= {"end_of_text": tokenizer.end_of_text, "pad": tokenizer.pad}
    if shards.records:
        packs = ExamplePacks(shards.records[split], **packing)
        if not packs.per_epoch:
            raise DataError(f"{shards.folder}: no token of the {split} split counts in the loss; label some")
        return packs
    return Packs(shards.tokens(split), **packing)


def validation_rows(shards: Shards, context_tokens: int, max_rows: int) -> torch.Tensor:
    """Return the fixed rows that a run is validated on: windows of text, and packed rows of examples.

    Args:
        shards: Shards to read.
        context_tokens: Context T.
        max_rows: Maximum number of rows, spread evenly over the rows of all sources.

    Returns:
        (N, 3, T) int64 inputs, targets (-100 for the end of text, in padding, and where nothing is learned), and positions
        that start at 0 in each document.

    Raises:
        ConfigError: A size is below 1.
        DataError: The split of text is shorter than one window.
    """
    if not shards.records and not any(part.records for _, part in shards.sources):
        validation_windows(shards, context_tokens, max_rows)  # checks
        feeds = [_validation_feed(shards, context_tokens)]
    else:
        feeds = [_validation_feed(part, context_tokens) for _, part in shards.sources or ((None, shards),)]
    ends = np.cumsum([count for count, _ in feeds])
    total = int(ends[-1])
    rows = []
    for index in range(min(max_rows, total)):
        place = index * total // min(max_rows, total)
        source = int(np.searchsorted(ends, place, side="right"))
        count, row = feeds[source]
        rows.append(row(place - int(ends[source]) + count))
    if all((row.targets == IGNORED).all() for row in rows):
        raise DataError(
            f"{shards.folder}: no token of the {len(rows)} validation rows counts in the loss; raise validation_windows, or "
            "give more validation examples"
        )
    return torch.from_numpy(np.array(rows, dtype=np.int64))


def _validation_feed(shards: Shards, context: int) -> tuple[int, Callable[[int], Row]]:
    """Return the number of validation rows of a source, and the function that reads one."""
    if shards.records:
        packs = _packs(shards, "validation", context=context, key=(_FOR_VALIDATION,))
        return packs.per_epoch, packs.row
    stream, end_of_text = shards.tokens("validation"), shards.tokenizer.end_of_text

    def row(index: int) -> Row:
        window = torch.from_numpy(stream[index * context : (index + 1) * context + 1].astype(np.int64))
        inputs, targets = window[:-1], window[1:]
        positions = document_positions(inputs[None], end_of_text)[0]
        return Row(inputs.numpy(), targets.where(targets != end_of_text, IGNORED).numpy(), positions.numpy())

    return (len(stream) - 1) // context, row


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


def document_positions(input_ids: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """Return positions that start at 0 in each document, (B, T) int64, for windows of concatenated text, (B, T).

    The end of text before a document is its first token, as in packed rows.
    """
    places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    starts: torch.Tensor = torch.where(input_ids == end_of_text, places, 0).cummax(1).values
    return places - starts

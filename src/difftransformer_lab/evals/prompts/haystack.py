"""Needle documents as the tasks draw them: whose cities are named, and which cells share their documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from difftransformer.data import CITIES_SEEN, CITIES_UNSEEN, NeedleQuestion, evaluation_document

from ..registry import at_least, refused
from .texts import HAYSTACK_TOKENS, VALIDATION, TaskContext

Kind = Literal["all", "seen", "unseen"]
CITIES: dict[Kind, tuple[str, ...]] = {"all": CITIES_SEEN + CITIES_UNSEEN, "seen": CITIES_SEEN, "unseen": CITIES_UNSEEN}


MOST_DOCUMENTS = 100_000


@dataclass(frozen=True, kw_only=True)
class NeedleOptions:
    """Which needle documents are drawn.

    Attributes:
        depths: Places of the answer, 0 (start of the context) to 1 (its end).
        documents: Documents in a cell of the grid, which is a depth at a length; the paper has 50.
        digits: Digits of a number.
        text: The haystack: python-stdlib, a text file, a folder of them, hf:NAME[:CONFIG][:SPLIT], or validation for the
            text that a run held out.
        paired: Whether the same needles in the same haystack stand in every cell; otherwise every cell draws its own
            documents.
        seed: Seed of places, cities and numbers.
    """

    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    documents: int = 10
    digits: int = 7
    text: str = "python-stdlib"
    paired: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.depths or any(not 0 <= depth <= 1 for depth in self.depths):
            raise refused(self, "depths", "give shares of the context, from 0 to 1")
        if not 1 <= self.documents <= MOST_DOCUMENTS or not 1 <= self.digits <= 9:
            most = f"give at least 1 document, at most {MOST_DOCUMENTS:,}, and 1 to 9 digits"
            raise refused(self, "documents digits", most)
        at_least(self, 0, "seed")

    @property
    def haystack(self) -> str:
        """Which part of the text is the haystack, for the choices of a task."""
        part = "whole held-out text" if self.text == VALIDATION else f"first {HAYSTACK_TOKENS:,} tokens of the text"
        return f"The haystack is the {part} named in the options"


def draw_documents(
    options: Any,
    context: TaskContext,
    haystack: npt.NDArray[np.int64],
    shared: Sequence[int],
    own: Sequence[int],
    **cell: Any,
) -> Iterator[NeedleQuestion]:
    """Draw the documents of one cell.

    Args:
        options: Options of the task with `documents`, `digits`, `cities` and `paired`.
        context: The tokenizer.
        haystack: Tokens of the text in which needles are hidden.
        shared: Seed of the documents where cells share them (`paired`): document i is drawn from [*shared, i].
        own: Seed of the cell where every cell draws its own documents, one after another.
        cell: Length, depth, needles and other arguments of `evaluation_document`.

    Raises:
        DataError: Needles and question do not fit into the length.
    """
    rng = np.random.default_rng(own)
    for document in range(options.documents):
        yield evaluation_document(
            np.random.default_rng([*shared, document]) if options.paired else rng,
            context.tokenizer,
            haystack,
            digits=options.digits,
            **{"cities": CITIES.get(options.cities), **cell},
        )

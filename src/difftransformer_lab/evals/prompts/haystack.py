"""Needle documents as the tasks draw them: whose cities are named, and which cells share their documents."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from difftransformer.data import CITIES_SEEN, CITIES_UNSEEN, NeedleQuestion, evaluation_document
from difftransformer.errors import ConfigError

from .texts import Setting

Kind = Literal["all", "seen", "unseen"]
CITIES: dict[Kind, tuple[str, ...]] = {
    "all": CITIES_SEEN + CITIES_UNSEEN,
    "seen": CITIES_SEEN,
    "unseen": CITIES_UNSEEN,
}


MOST_DOCUMENTS = 100_000


def check_documents(depths: Sequence[float], documents: int, digits: int, seed: int) -> None:
    """Refuse options that no document can have.

    Raises:
        ConfigError: a depth outside 0 to 1, no documents, digits outside 1 to 9, or a negative seed.
    """
    if not depths or any(not 0 <= depth <= 1 for depth in depths):
        raise ConfigError(f"depths={depths}: give shares of the context, from 0 to 1")
    if not 1 <= documents <= MOST_DOCUMENTS or not 1 <= digits <= 9:
        raise ConfigError(
            f"documents={documents}, digits={digits}: give at least 1 document, at most {MOST_DOCUMENTS:,}, and 1 to 9 digits"
        )
    if seed < 0:
        raise ConfigError(f"seed={seed}: give 0 or more")


def draw_documents(
    options: Any,
    setting: Setting,
    haystack: npt.NDArray[np.int64],
    shared: Sequence[int],
    own: Sequence[int],
    **cell: Any,
) -> Iterator[NeedleQuestion]:
    """Draw the documents of one cell.

    Args:
        options: Options of the task with `documents`, `digits`, `cities` and `paired`.
        setting: The tokenizer.
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
            setting.tokenizer,
            haystack,
            digits=options.digits,
            **{"cities": CITIES.get(options.cities), **cell},
        )

"""Public data sets by name, through the `datasets` library. Nothing of a set is run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DataError

CONVERTED = "refs/convert/parquet"
"""The hub's own conversion of a set to Parquet, for sets that are published as a script: scripts are not run."""


def load_set(
    name: str, hub_name: str, *, config: str | None, split: str, revision: str | None = None, otherwise: str = ""
) -> Any:
    """One split of a set, as `datasets` gives it.

    Args:
        name: What the user asked for, for messages.
        hub_name: Its name on the Hugging Face hub.
        config: Its configuration, where it has several.
        split: Which part.
        revision: A branch of it.
        otherwise: What else the user can do, as a message goes on with it: ", or ...".

    Raises:
        DataError: the library is missing, or cannot load the set.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{name}: the package datasets is not installed; run pip install 'difftransformer[data]'{otherwise}"
        ) from None
    try:
        with _quietly():
            return datasets.load_dataset(hub_name, config, split=split, revision=revision)
    except Exception as error:  # datasets raises many kinds: of its own, of the hub's client, of the network
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{name}: datasets cannot load {hub_name} ({reason}); check name, configuration, split and network{otherwise}"
        ) from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a warning for each time that the hub's client tries again: what matters is said at the end, on one line."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

"""Public data sets by name, through the `datasets` library. No code of a data set is run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DataError

CONVERTED = "refs/convert/parquet"
"""Branch with the hub's conversion to Parquet, for sets that are published as a script. Scripts are not run."""


def load_set(
    name: str,
    hub_name: str,
    *,
    config: str | None,
    split: str,
    revision: str | None = None,
    otherwise: str = "",
    streaming: bool = False,
) -> Any:
    """Load a split of a data set with `datasets`, or open it as a stream, which is not stored first.

    Error messages begin with `name`, which the user gave, and end with `otherwise`, an alternative: ", or ...".

    Raises:
        DataError: The library is missing or cannot load the set.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{name}: the package datasets is not installed; run pip install 'difftransformer[data]'{otherwise}"
        ) from None
    try:
        with errors_only("huggingface_hub"):  # not its warnings about retries
            options: dict[str, Any] = {"streaming": True} if streaming else {}
            return datasets.load_dataset(hub_name, config, split=split, revision=revision, **options)
    except Exception as error:  # datasets raises its own errors, those of the hub's client and those of the network
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{name}: datasets cannot load {hub_name} ({reason}); check name, configuration, split and network{otherwise}"
        ) from None


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Silence the warnings of a library's logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

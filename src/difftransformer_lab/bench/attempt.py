"""First calls that may fail: on a GPU, one implementation can run out of memory or lack a kernel, and the others go on."""

import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

LONGEST_REASON = 200  # characters

T = TypeVar("T")


def attempt_each(names: Iterable[str], build: Callable[[str], T], device: str) -> tuple[dict[str, T], dict[str, str]]:
    """Build what each implementation needs, its first call included.

    Args:
        device: "cpu", where errors are raised, or "cuda", where they become reasons.

    Returns:
        What was built, by name, and the reason in one line for each implementation that was left out. PyTorch often explains
        in a warning what the error itself does not say, so warnings are part of the reason.
    """
    if device == "cpu":
        return {name: build(name) for name in names}, {}
    built: dict[str, T] = {}
    reasons: dict[str, str] = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                built[name] = build(name)
            except (
                Exception
            ) as error:  # any library may raise its own; each means that this implementation cannot run here
                messages = [f"{type(error).__name__}: {error}", *(str(warning.message) for warning in caught)]
                reasons[name] = _one_line(messages)
    return built, reasons


def _one_line(messages: list[str]) -> str:
    reason = "; ".join(dict.fromkeys(" ".join(message.split("\n", 1)[0].split()) for message in messages))
    return reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 3] + "..."

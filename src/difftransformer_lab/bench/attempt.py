"""First calls that may fail: on a GPU, one implementation can run out of memory or lack a kernel, and the others go on."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

LONGEST_REASON = 200  # characters

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """The reason, in one line, why a call failed."""

    reason: str


def attempt(call: Callable[[], T]) -> T | Failure:
    """Return the result of a call, or a `Failure` with its error and the warnings that came before it.

    PyTorch often explains in a warning what the error itself does not say.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return call()
        except Exception as error:  # any library may raise its own; each means that this implementation cannot run here
            messages = [f"{type(error).__name__}: {error}", *(str(warning.message) for warning in caught)]
    lines = [" ".join(message.split("\n", 1)[0].split()) for message in messages]
    reason = "; ".join(dict.fromkeys(lines))
    return Failure(reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 3] + "...")


def attempt_each(
    names: Iterable[str], build: Callable[[str], T], *, base: str, device: str
) -> tuple[dict[str, T], dict[str, str]]:
    """Build what each implementation needs, and leave out those that fail.

    Args:
        names: Names of the implementations.
        build: Builds one implementation by its name, the first call included.
        base: The implementation that ratios refer to; if it fails, all others are left out too.
        device: "cpu", where errors are raised, or "cuda", where they become reasons.

    Returns:
        What was built, by name, and the reason for each implementation that was left out.
    """
    built: dict[str, T] = {}
    reasons: dict[str, str] = {}
    for name in names:
        result = build(name) if device == "cpu" else attempt(partial(build, name))
        if isinstance(result, Failure):
            reasons[name] = result.reason
        else:
            built[name] = result
    if base in reasons:
        lost = f"{base}, which ratios refer to, did not run ({reasons[base]})"
        return {}, dict.fromkeys(built, lost) | reasons
    return built, reasons

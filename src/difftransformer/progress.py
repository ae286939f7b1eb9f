"""How far long work has come. It is reported to whoever listens in this context, such as a command that draws a bar.

    with shown_by(draw), titled("needle"):
        ...  # whatever calls `report(300, 1200)` in here calls draw(300, 1200, "needle")

Without a listener a report does nothing. What else there is to say goes to `logging`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int, str], None]

_listener: ContextVar[Listener | None] = ContextVar("progress", default=None)


def report(done: int, total: int, title: str = "") -> None:
    """Say that `done` of `total` is done, in units of the caller's choice."""
    if (listener := _listener.get()) is not None:
        listener(done, total, title)


@contextmanager
def shown_by(listener: Listener) -> Iterator[None]:
    """Give the reports of the block to `listener`, which is called with `done`, `total` and a title that may be empty."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


@contextmanager
def titled(title: str) -> Iterator[None]:
    """Put a title before the titles of reports made in the block."""
    outer = _listener.get() or _unheard
    with shown_by(lambda done, total, inner: outer(done, total, f"{title}, {inner}" if inner else title)):
        yield


@contextmanager
def part(index: int, count: int) -> Iterator[None]:
    """Count the reports made in the block as one of `count` equal parts of the work, numbered from 0."""
    outer = _listener.get() or _unheard
    with shown_by(lambda done, total, title: outer(index * total + done, count * total, title)):
        yield


def _unheard(done: int, total: int, title: str) -> None:
    pass

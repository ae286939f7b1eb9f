"""The register of evaluation tasks. A task is one file in `evals/tasks/` that calls `register` with its `TaskKind`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftransformer.errors import ConfigError
from difftransformer.typed import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..results import TaskResult


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two figures of one result over the same items: `ItemScore.name` of the first and of the second.

    Attributes:
        figure: What both are, such as "nll".
        settings: What is compared, such as "8 bits minus 16 bits by row".
        first: Name of the first one's items.
        second: Name of the second one's items.
    """

    figure: str
    settings: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """An evaluation task: what `difftransformer eval NAME` runs.

    The headline figures of a task are its measurements that are not marked `detail`.

    Attributes:
        name: Name on the command line, in suites and in results files; for a task of this package the name of its file.
        doc: Text whose first line, without its full stop, stands in `difftransformer --help`; for a task of this package the
            docstring of its file.
        options: Dataclass of the command's flags; its docstring describes them.
        make: Called with the options and a `prompts.texts.TaskContext`; returns an `engine.Task`.
        draw: Draws the results of one or more models and returns title, caption and figure; None where a table says it all.
        contrasts: Names pairs of item figures of one result that are compared with each other; None where there are none.
    """

    name: str
    doc: str | None
    options: type
    make: Callable[[Any, Any], Any]
    draw: "Callable[[Sequence[TaskResult]], tuple[str, str, Figure]] | None" = None
    contrasts: "Callable[[TaskResult], list[Contrast]] | None" = None


_registered: dict[str, TaskKind] = {}


def register(kind: TaskKind) -> None:
    _registered[kind.name] = kind


def registered_tasks() -> dict[str, TaskKind]:
    """Return the registered tasks in alphabetical order. Importing `evals.tasks` registers this package's own."""
    return dict(sorted(_registered.items()))


def task_kind(name: str) -> TaskKind:
    if name not in _registered:
        raise ConfigError(f"no task {name!r}; choose one of {', '.join(registered_tasks())}")
    return _registered[name]


def task_help() -> dict[str, str]:
    """Return the help line of every task by name. Reads the first line of each file and imports none."""
    docs = {name: kind.doc or "" for name, kind in _registered.items()}
    for path in Path(__file__).with_name("tasks").glob("[!_]*.py"):
        with open(path, encoding="utf-8") as file:
            docs.setdefault(path.stem, file.readline().strip().strip('"'))
    return {name: doc.partition("\n")[0].rstrip(".") for name, doc in sorted(docs.items())}


def refused(options: object, names: str, advice: str) -> ConfigError:
    """Make the error for impossible options; `names` are separated by spaces."""
    return ConfigError(", ".join(f"{name}={short(getattr(options, name))}" for name in names.split()) + f": {advice}")


def at_least(options: object, least: int, *names: str) -> None:
    """Check that options are at least `least`; None passes, and a list is checked item by item."""
    for name in names:
        value = getattr(options, name)
        if any(one is not None and one < least for one in (value if isinstance(value, list) else [value])):
            raise refused(options, name, f"give at least {least}")

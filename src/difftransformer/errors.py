"""Errors of this package. Each message says what failed, the value met, what is allowed and what to do.

Every class also derives from the matching built-in error, so `except ValueError` works. The command line prints the message on
one line and exits with status 2.
"""

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130  # exit statuses of every command
EXIT_DIVERGED = 3  # of a run of a study
EXIT_REQUEUE = 75  # SIGTERM has stopped a run, which saved a checkpoint: BSD's EX_TEMPFAIL, "try again later"
MOST_QUOTED = 300  # characters of an error of another package


class DiffTransformerError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(DiffTransformerError, ValueError):
    """A recipe, a model configuration or a command line asks for something impossible."""


class ShapeError(DiffTransformerError, ValueError):
    """The shape, dtype or device of a tensor does not fit the function it was given to, or it is not a tensor."""


class DataError(DiffTransformerError, ValueError):
    """Text, a tokenizer or a shard is missing, empty, damaged or unreadable."""


class CheckpointError(DiffTransformerError, RuntimeError):
    """A checkpoint or run folder is missing, damaged or belongs to another recipe."""


class BackendUnavailable(DiffTransformerError, RuntimeError):
    """A backend that was selected by name cannot run this call."""


class FolderInUse(DiffTransformerError, RuntimeError):
    """Another process is working in a folder that a command writes to."""


class EvaluationError(DiffTransformerError, RuntimeError):
    """An evaluation cannot be run as requested."""


class ResultsError(DiffTransformerError, ValueError):
    """A results file is missing, damaged, of another kind or of another version."""


class DamagedResult(ResultsError):
    """A results file is not as it was written."""


class Diverged(DiffTransformerError, ArithmeticError):
    """Training met a loss or gradient that is not finite, and the run goes no further."""


class FailedElsewhere(DiffTransformerError):
    """Another process of the same run has failed, and says why."""


def on_one_line(error: BaseException) -> str:
    """Return the beginning of an error's message on one line, or the error's class if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_QUOTED else text[: MOST_QUOTED - 3] + "..."

"""Errors of this package. Each message says what failed, the value met, what is allowed and what to do.

Every class also derives from the matching built-in error, so `except ValueError` works. The command line prints the message on
one line and exits with status 2.
"""

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130  # exit statuses of every command


class DiffTransformerError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(DiffTransformerError, ValueError):
    """A recipe, a model configuration or a command line asks for something impossible."""


class ShapeError(DiffTransformerError, ValueError):
    """The shape or dtype of a tensor does not fit the function it was given to."""


class DataError(DiffTransformerError, ValueError):
    """Text, a tokenizer or a shard is missing, empty, damaged or unreadable."""


class CheckpointError(DiffTransformerError, RuntimeError):
    """A checkpoint or run folder is missing, damaged or belongs to another recipe."""


class BackendUnavailable(DiffTransformerError, RuntimeError):
    """A backend that was selected by name cannot run this call."""


class EvaluationError(DiffTransformerError, RuntimeError):
    """An evaluation cannot be run as requested."""


class ResultsError(DiffTransformerError, ValueError):
    """A results file is missing, damaged, of another kind or of another version."""


class DamagedResult(ResultsError):
    """A results file is not as it was written."""

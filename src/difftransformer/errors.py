"""One family of errors. Each message says what failed, the value met, what is allowed and what to do.

Every class also descends from the matching built-in, so that `except ValueError` keeps working.
The command line prints the message on one line and exits with status 2.
"""

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130  # exit statuses of every command


class DiffTransformerError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(DiffTransformerError, ValueError):
    """A recipe, a model configuration or a command line asks for something impossible."""


class ShapeError(DiffTransformerError, ValueError):
    """A tensor's shape or dtype breaks a rule of the function it was given to."""


class DataError(DiffTransformerError, ValueError):
    """Text, a tokenizer or a shard is missing, empty, damaged or unreadable."""


class CheckpointError(DiffTransformerError, RuntimeError):
    """A checkpoint or run folder is missing, damaged or belongs to another recipe."""


class BackendUnavailable(DiffTransformerError, RuntimeError):
    """A backend that was asked for by name cannot run this problem."""


class EvaluationError(DiffTransformerError, RuntimeError):
    """An evaluation cannot be run as asked."""


class ResultsError(DiffTransformerError, ValueError):
    """A results file is missing, damaged, of another kind or of another version."""

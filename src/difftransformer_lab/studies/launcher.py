"""Where the runs of a study compute: in processes of this machine, or as jobs of a cluster by submitit."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from difftransformer.errors import EXIT_ERROR, ConfigError
from difftransformer.reading import parse_yaml
from difftransformer.typed import short

POLL_SECONDS = 1.0
_executor: ContextVar[Any] = ContextVar("executor", default=None)


@contextmanager
def submitting(folder: Path, cluster: str, options: str = "{}") -> Iterator[None]:
    """Submit the runs that start in the block to a cluster.

    Args:
        folder: Folder for what submitit writes, which the cluster's machines share, as they do those of runs and shards.
        cluster: "slurm", or "local" for processes of this machine under submitit.
        options: Parameters of submitit's AutoExecutor in YAML, such as {timeout_min: 600, slurm_partition: gpu}.

    Raises:
        ConfigError: submitit is missing, or refuses an option.
    """
    try:
        import submitit
    except ImportError:
        raise ConfigError(f"--launcher {cluster} needs submitit; pip install 'difftransformer[slurm]'") from None
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**parse_yaml(options))
    except (RuntimeError, NameError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--launcher {cluster} --launcher-options {short(options)}: {reason}") from None
    before = _executor.set(executor)
    try:
        yield
    finally:
        _executor.reset(before)


def submit(words: Sequence[str], log: Path) -> "SubmittedRun | None":
    """Submit `studies.run.main(words)`, or return None where no cluster was named."""
    if (executor := _executor.get()) is None:
        return None
    from .run import main

    return SubmittedRun(executor.submit(main, list(words)), log)


class SubmittedRun:
    """A run on a cluster, with the part of the interface of `subprocess.Popen` that `jobs` uses."""

    def __init__(self, job: Any, log: Path) -> None:
        self._job, self._log, self.returncode = job, log, None

    returncode: int | None

    def poll(self) -> int | None:
        """Return the run's exit status, or None while it waits or computes; what it printed is then in its log."""
        if self.returncode is None and self._job.done():
            try:
                self.returncode = int(self._job.result())
            except Exception as error:  # submitit raises its own classes, and what the job raised
                self.returncode = EXIT_ERROR
                self._log.write_text(f"{' '.join(str(error).split())}\n", encoding="utf-8")
            else:
                self._log.write_text(self._job.stderr() or "", encoding="utf-8")
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Ask the cluster to end the run, which saves a checkpoint."""
        self._job.cancel(check=False)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def communicate(self) -> None:
        """Do nothing: no pipe is open."""

"""Training in one call: the trainer with the callbacks of this package."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ..attention.causality import check_causality
from ..data import Shards
from ..errors import ConfigError, EvaluationError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.start_sizes import drowning, first_layers, measured_layers, start_sizes
from .accuracy import Accuracy
from .activation_stats import ActivationStats
from .checkpoint import CheckpointState
from .config import LogsConfig, TrainingConfig
from .faults import Faults
from .parallel import DeferredModel, Mesh, Processes
from .speed import Speed, matmul_flops
from .trackers import Trackers
from .trainer import Callback, Trainer

# A variant from outside is asked in layers and tokens that take a moment; borders of tiles of up to 128 tokens are among these.
CHECKED_LAYERS, CHECKED_TOKENS = 2, 129
# Where bf16 is in hardware it is faster; where it is not, products of fp32 are about ten times as fast.
SLOW_BF16 = 2.0


def train(
    config: TrainingConfig,
    model_config: DiffTransformerConfig,
    shards: Shards,
    run: Path,
    *,
    device: str = "cpu",
    start: DeferredModel | None = None,
    mesh: Mesh | None = None,
    logs: LogsConfig | None = None,
    callbacks: Sequence[Callback] = (),
) -> DiffTransformerForCausalLM:
    """Train a model to the last step, from the run's newest intact checkpoint if there is one.

    Ctrl-C (SIGINT) and SIGTERM finish the step, save a checkpoint and raise Interrupted. The losses of an interrupted run
    are bit for bit those of an uninterrupted one, on CPU in fp32 with the same number of threads and the same mesh. On
    another mesh, sums are rounded otherwise. And with `nonfinite` "rollback", a later step may go back to the interruption's
    checkpoint.

    Args:
        config: Training configuration.
        model_config: Model configuration.
        shards: Tokens to train on.
        run: Folder for metrics.jsonl and checkpoints/.
        device: Device to train on.
        start: Model of that configuration to start from, whose values are read; None builds a new one from the seed.
        mesh: What this process and the others of the run compute; None for a single process. The first process writes.
        logs: What the metrics hold beside the loss, and where else they go.
        callbacks: Further callbacks, after those of this package.

    Returns:
        The trained model; each process holds its part.

    Raises:
        CheckpointError: No checkpoint is intact, or the first or the last of a run cannot be written, or one is not written in
            time. For others there is a warning.
        ConfigError: The adapters do not fit the model, PEFT or a tracker is missing, or the mesh does not divide the model or
            its rows.
        DataError: See `validation_rows`.
        Diverged: The loss or the gradient is not finite, and `config.nonfinite` is "stop", or it is so too often.
            Nothing is saved after that.
        FailedElsewhere: Another process has raised one of these.
        Interrupted: A signal has stopped the run, in one of its processes.
    """
    mesh, logs = mesh or Mesh(Processes(device=device)), logs or LogsConfig()
    own: list[Callback] = [
        Faults(config.nonfinite, config.outlier_sigmas),
        Speed(logs),
        ActivationStats(logs),
        Accuracy(),
        Trackers(logs),
        _StartChecks(is_new=start is None),
    ]
    trainer = Trainer(config, model_config, shards, run, mesh=mesh, start=start, callbacks=[*own, *callbacks])
    return trainer.fit()


class _StartChecks(Callback):
    """Warns of slow bf16 and of a start that hampers a new model, and refuses a variant from outside that sees the future."""

    def __init__(self, *, is_new: bool) -> None:
        self._is_new = is_new

    def on_restore(self, trainer: Trainer, state: CheckpointState | None) -> None:
        if trainer.processes.is_first and trainer.config.precision == "bf16":
            _warn_of_precision(trainer.processes.device)
        if state is None and trainer.processes.is_first:
            if self._is_new:
                _warn_of_start(trainer.model_config, trainer.config.seed)
            _check_variant(trainer.model_config, trainer.config.seed)


def _check_variant(config: DiffTransformerConfig, seed: int) -> None:
    """Refuse a causal model if attention of another package reads later tokens. Only its first layers are tried."""
    if not isinstance(config, DiffTransformerConfig) or not config.is_causal:
        return
    if config.attention.__module__.startswith(f"{__name__.partition('.')[0]}."):
        return
    network = first_layers(config, min(CHECKED_LAYERS, measured_layers(config)), seed).eval()
    draw = torch.Generator().manual_seed(seed)
    length = min(CHECKED_TOKENS, config.max_position_embeddings)
    ids = torch.randint(network.config.vocab_size, (1, length), generator=draw)
    try:
        with torch.no_grad():
            report = check_causality(
                lambda rows: network(rows, use_cache=False), ids, vocabulary=network.config.vocab_size
            )
    except EvaluationError as error:
        warnings.warn(
            f"attention_type={config.attention_type!r} could not be checked for causality: {error}", stacklevel=3
        )
        return
    if not report.is_causal:
        change = max(report.changed, report.alone, key=lambda one: one.size)
        raise ConfigError(
            f"attention_type={config.attention_type!r} is not causal: the output at token {change.output} depends on tokens "
            f"from {change.position} on, so a loss would be too low; correct {config.attention.__name__}, and see "
            "difftransformer check causality"
        )


def _warn_of_precision(device: str) -> None:
    """Warn if the processor computes bf16 in software; a GPU is not asked."""
    if device == "cpu" and (ratio := matmul_flops(device, "fp32") / matmul_flops(device, "bf16")) > SLOW_BF16:
        warnings.warn(
            f"precision bf16: products of matrices take {ratio:.1f} times as long as with fp32 on this processor; "
            "training.precision=fp32 trains faster",
            stacklevel=3,
        )


def _warn_of_start(config: DiffTransformerConfig, seed: int) -> None:
    """Warn if a branch of the first two layers drowns the residual stream, unless attention starts mimetic and is meant to.

    They are built once more, so that neither the model that trains, which may be compiled or divided, nor the other processes
    take part.
    """
    if config.mimetic_attention:
        return
    with suppress(ConfigError):  # a layer is too large for that
        if said := drowning(config, start_sizes(config, seed=seed, layers=2)):
            warnings.warn(f"at step 0 {said}", stacklevel=3)

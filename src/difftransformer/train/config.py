"""Configuration of a training run: steps, batches, optimiser, schedule, validation and checkpoints."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..data import RetrievalMix, check_context_stages
from ..errors import ConfigError
from ..typed import ADJUSTABLE, ASIDE


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon for hidden matrices.

    The defaults come from the paper's 3B run (arXiv:2410.05258 Table 9), which states no clipping.

    Attributes:
        method: "adamw"; or "muon" for the matrices between embedding and output layer (torch.optim.Muon), with AdamW for
            embeddings, vectors and matrices of a single row. Updates of Muon are scaled to AdamW's size (arXiv:2502.16982
            section 2.2), so that both take the same learning rate and weight decay.
        momentum: Momentum of Muon.
        learning_rate: Peak learning rate.
        betas: Decay rates of the two moments.
        eps: Term added to the denominator.
        weight_decay: Weight decay of matrices. Norms and lambdas have none.
        clip_norm: Maximum gradient norm; None turns clipping off.
        base_width: Width at which all parameters have `learning_rate`. At another width d, AdamW's rates are multiplied so
            that a step changes activations as much (muP, arXiv:2203.03466, for models that start by fan-in and whose MLP
            grows with d): those of layers' matrices and of the output layer by base_width / d, that of the embedding, which
            the model multiplies by sqrt(d), by sqrt(base_width / d), and those of vectors, lambda among them, by 1. Weights
            decay as without it. None: one rate for all.
    """

    method: Literal["adamw", "muon"] = "adamw"
    momentum: float = 0.95
    learning_rate: float = 3.2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    base_width: int | None = None

    def __post_init__(self) -> None:
        if self.base_width is not None and (self.base_width < 1 or self.method != "adamw"):
            raise ConfigError(
                f"base_width={self.base_width} with method={self.method!r}: give a width of at least 1 and adamw, or null"
            )
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay}: give 0 or more")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: give a decay rate, at least 0 and below 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas={list(self.betas)}: each is a decay rate, at least 0 and below 1")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigError(f"clip_norm={self.clip_norm}: give a norm above 0, or null for no clipping")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, and a decay to a floor.

    Attributes:
        shape: "linear" decays in a line from the peak on (arXiv:2410.05258 section 3.1), "cosine" in half a wave
            (arXiv:1608.03983), and "wsd" stays at the peak and decays in a line over the last `decay_steps`
            (arXiv:2404.06395), so that one run serves several numbers of steps (see `Recipe.branch_from`).
        warmup_steps: Number of steps until the peak.
        decay_steps: Number of steps in which "wsd" decays; None means a tenth of all.
        floor: Last learning rate as a share of the peak (1.28e-5 / 3.2e-4 in Table 9).
    """

    shape: Literal["linear", "cosine", "wsd"] = "linear"
    warmup_steps: int = 1000
    decay_steps: int | None = None
    floor: float = 0.04

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.floor <= 1:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps}, floor={self.floor}: give 0 or more steps, and a share from 0 to 1"
            )
        if self.decay_steps is not None and (self.shape != "wsd" or self.decay_steps < 1):
            raise ConfigError(
                f"decay_steps={self.decay_steps}: give at least 1 with shape: wsd, and null with another shape"
            )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, which are trained in place of the full weights (arXiv:2106.09685).

    Attributes:
        rank: Rank of the adapters.
        alpha: Scale: the product of the two adapter matrices is multiplied by alpha / rank.
        targets: Names of the projections that get an adapter.
        also: Parts of names of further parameters to train in full. Lambda, W_D of DEX and the headwise gain are always
            trained in full.
    """

    rank: int = 16
    alpha: int = 32
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    also: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise ConfigError(f"rank={self.rank}, alpha={self.alpha}: give at least 1 of each")
        if not self.targets:
            raise ConfigError("targets=[]: name at least one projection, such as q_proj")


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """How processes that see different rows hold the weights.

    Attributes:
        replicate: Number of copies of the weights.
        shard: Number of processes that share each copy, layer by layer (FSDP); None means all that are left.
    """

    replicate: int = 1
    shard: int | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the processes of a run divide its work. The product of the four degrees is their number.

    Attributes:
        data: Processes that see different rows.
        tensor: Processes that divide the heads and the MLP of every layer, and see the same rows.
        context: Processes that divide the tokens of every row (DeepSpeed-Ulysses), and exchange them for heads in attention.
    """

    data: DataParallelConfig = field(default_factory=DataParallelConfig)
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        degrees = {"data.replicate": self.data.replicate, "tensor": self.tensor, "context": self.context}
        if self.data.shard is not None:
            degrees["data.shard"] = self.data.shard
        for name, degree in degrees.items():
            if degree < 1:
                raise ConfigError(f"{name}={degree}: give at least 1")

    def degrees(self, processes: int) -> tuple[int, int, int, int]:
        """Return the replicate, shard, context and tensor degrees on a number of processes.

        Raises:
            ConfigError: Their product is another number.
        """
        replicate, shard, context, tensor = self.data.replicate, self.data.shard, self.context, self.tensor
        rest = replicate * context * tensor
        shard = max(1, processes // rest) if shard is None else shard
        if rest * shard != processes:
            raise ConfigError(
                f"parallel: data.replicate {replicate} x data.shard {shard} x tensor {tensor} x context {context} = "
                f"{rest * shard}, and the run has {processes} process{'es' if processes > 1 else ''}; start it with "
                f"--processes {rest * shard}, or change a degree (data.shard: null takes what the others leave)"
            )
        return replicate, shard, context, tensor


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    """What a run logs besides the loss, and where. None of it affects the weights.

    Attributes:
        inside_every: Steps between looks inside the model (`InsideMetrics`), each a forward pass over one row; 0 for none.
        evaluate_every: Steps between evaluations by the recipe's tasks, which open the checkpoint of the step, so a multiple of
            `checkpoint_every`; 0 for none. Training waits for them, and every process holds the model once more meanwhile.
        peak_tflops: Peak speed of one device in TFLOP/s, for the MFU; None measures a matrix product.
        tensorboard: Whether TensorBoard gets the metrics too, in the run folder.
        wandb: Project of Weights & Biases that gets the metrics too, or None. WANDB_MODE=offline keeps them in the run folder.
    """

    inside_every: int = 0
    evaluate_every: int = 0
    peak_tflops: float | None = None
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        for name in ("inside_every", "evaluate_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1, or 0 for none")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise ConfigError(f"peak_tflops={self.peak_tflops}: give a number above 0, or null to measure it")
        if self.wandb == "":
            raise ConfigError("wandb='': name a project, or null")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written.

    Attributes:
        asynchronous: Whether training goes on while a checkpoint is written, from a copy in the memory of the CPU.
        timeout_seconds: Time after which a save that has not ended ends the run.
    """

    asynchronous: bool = False
    timeout_seconds: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_seconds < math.inf:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds}: give a number above 0")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One training run.

    Attributes:
        steps: Number of optimiser steps.
        batch_tokens: Number of tokens per step, over all rows.
        context_stages: (first step, row length in tokens) pairs in order. Retrieval is learned sooner from short contexts.
        accumulation: Number of parts that a batch is split into to save memory. It may change when a run continues.
        precision: "fp32", or "bf16" for autocast with fp32 weights. On CPUs without bf16 arithmetic it is slow, which
            a warning says.
        seed: Seed of weights and batches. A DIFF model and its twin with the same seed see the same batches.
        pack_documents: Whether a row holds whole documents that do not see each other, in place of a window of the
            concatenated text.
        prefetch: Whether the next batch is read while a step is computed, into pinned memory for a GPU. Batches are the same.
        retrieval: Needle documents among the rows, or None.
        lora: Adapters to train in place of the weights, or None. They are meant for a pretrained model.
        optimizer: Settings of AdamW.
        schedule: Schedule of the learning rate.
        validate_every: Steps between validations. The last step is always validated.
        validation_windows: Number of validation windows, each of the last stage's length.
        nonfinite: What follows a loss or gradient that is not finite, which never reaches saved weights: "stop" ends the run,
            "skip" goes on with the next batch, and "rollback" goes back to the newest checkpoint and goes on from there with
            the batches after that one. The last two read the loss before each update, and so wait for a GPU.
        outlier_sigmas: Skips a step whose gradient norm is this number of standard deviations above the mean of the last 128,
            such as 6; None skips none. Reading the norm before each update waits for a GPU.
        checkpoint: How checkpoints are written.
        checkpoint_every: Steps between checkpoints. The last step is always saved.
        keep_checkpoints: Number of newest checkpoints to keep.
        keep_every: Keep every checkpoint whose step is a multiple of this; None keeps only the newest.
        keep_steps: Further steps whose checkpoints are written and kept for good.
        ema: Decay per step of a moving average of the weights, such as 0.999, which checkpoints hold beside the weights. A
            recipe's evaluations ask it, and `export --average` writes it. None keeps none. It takes as much memory as the
            weights.
        z_loss: Weight of the mean square of log Z, Z the sum of exponentials of a token's logits (arXiv:2204.02311 section 5),
            such as 1e-4; the training loss that is logged includes it, and validation does not.
        loss_chunk_tokens: Number of tokens whose logits are in memory at a time. None means all where they are few, else a
            number that suits the device.
        gradient_checkpointing: Whether to recompute activations in the backward pass, which saves memory and takes time. True
            keeps the input of each layer alone; "selective" also keeps the results of attention and of matrix products.
        compile: Whether to compile every layer with torch.compile, all as one graph; "auto" does so on CUDA. Results differ by
            rounding.
    """

    steps: int
    batch_tokens: int
    context_stages: list[tuple[int, int]]
    accumulation: int = field(default=1, metadata=ADJUSTABLE)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    pack_documents: bool = False
    prefetch: bool = field(default=False, metadata=ASIDE)
    retrieval: RetrievalMix | None = None
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validate_every: int = 100
    validation_windows: int = 16
    nonfinite: Literal["stop", "skip", "rollback"] = field(default="stop", metadata=ADJUSTABLE)
    outlier_sigmas: float | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=ASIDE)
    checkpoint_every: int = field(default=500, metadata=ASIDE)
    keep_checkpoints: int = field(default=2, metadata=ASIDE)
    keep_every: int | None = field(default=None, metadata=ASIDE)
    keep_steps: list[int] = field(default_factory=list, metadata=ASIDE)
    ema: float | None = None
    z_loss: float = 0.0
    loss_chunk_tokens: int | None = None
    gradient_checkpointing: Literal[False, True, "selective"] = False
    compile: Literal[False, True, "auto"] = field(default="auto", metadata=ASIDE)

    def __post_init__(self) -> None:
        counts = ("steps", "batch_tokens", "accumulation", "validate_every", "validation_windows")
        for name in (*counts, "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: give 0 or more")
        if self.loss_chunk_tokens is not None and self.loss_chunk_tokens < 1:
            raise ConfigError(f"loss_chunk_tokens={self.loss_chunk_tokens}: give at least 1, or null to choose by size")
        if self.ema is not None and (not 0 < self.ema < 1 or self.lora is not None):
            raise ConfigError(f"ema={self.ema}: give a decay between 0 and 1, and no lora, or null")
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss={self.z_loss}: give 0 for none, or a weight such as 1.0e-4")
        if (decay := self.schedule.decay_steps) is not None and decay > self.steps:
            raise ConfigError(f"schedule.decay_steps={decay}: give at most steps={self.steps}")
        if self.outlier_sigmas is not None and not 0 < self.outlier_sigmas < math.inf:
            raise ConfigError(
                f"outlier_sigmas={self.outlier_sigmas}: give a number above 0, such as 6, or null for none"
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every={self.keep_every}: give at least 1, or null to keep the newest alone")
        if outside := [step for step in self.keep_steps if not 1 <= step <= self.steps]:
            raise ConfigError(f"keep_steps: {outside[0]} is not a step; give numbers from 1 to steps={self.steps}")
        check_context_stages(self.context_stages, self.batch_tokens, parts=self.accumulation, divisor="accumulation")

    def keeps_step(self, step: int) -> bool:
        """Whether the checkpoint of a step is kept for good."""
        return step in self.keep_steps or bool(self.keep_every and step % self.keep_every == 0)

    def retired(self, steps: Iterable[int], now: int) -> list[int]:
        """Return the saved steps to delete once `now` is saved. Later ones may be damaged, and are left."""
        saved = sorted(step for step in steps if step <= now)
        return [step for step in saved[: -self.keep_checkpoints] if not self.keeps_step(step)]

    @property
    def context_tokens(self) -> int:
        """Row length of the last stage, at which the model is evaluated."""
        return self.context_stages[-1][1]

"""The trainer: a loop of steps that resumes bit for bit, and callbacks that look at it or step in."""

import copy
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..attention import Attention
from ..data import Loader, Shards, validation_rows
from ..data.documents import IGNORED
from ..errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Diverged
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.nll import loss_chunk, summed_next_token_nll
from .checkpoint import CheckpointState, folder_of_step, load_checkpoint, newest_intact
from .config import TrainingConfig
from .late import Moment, OnTheWay
from .lora import add_lora
from .metrics import METRICS_FILE, Metrics, MetricsLog, StepMetrics, ValidationMetrics, finite
from .optim import build_optimizer, learning_rate, update_average
from .parallel import DeferredModel, Mesh, Processes
from .saving import Saver

# gradient_checkpointing "selective" keeps the results of matrix products and of attention, whatever its backend.
KEPT_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
KEPT_OPERATORS = "difftransformer::"

ON_DIVERGING = "lower training.optimizer.learning_rate or lengthen the warm-up, and train in a new folder"


class Interrupted(Exception):
    """Training was asked to stop, and has saved a checkpoint of the last step.

    Attributes:
        checkpoint: The checkpoint.
        step: The last step.
        status: Exit status of a command that was stopped so.
    """

    def __init__(self, checkpoint: Path, step: int, status: int = EXIT_INTERRUPTED) -> None:
        super().__init__(f"stopped after step {step}; saved {checkpoint}")
        self.checkpoint, self.step, self.status = checkpoint, step, status


@dataclass(kw_only=True)
class Update:
    """What a step is about to do to the weights.

    Attributes:
        numbers: Loss, gradient norm and the gradient norms of `parts`, on the device; reading one waits for the device.
        parts: Names of the parts of the model that have gradients.
        targets: Number of tokens that count in the loss, over all processes.
        action: None updates the weights, "skip" leaves them as they are, and after "rollback" the step has not been.
    """

    numbers: Tensor
    parts: list[str]
    targets: int
    action: Literal["skip", "rollback"] | None = None

    @cached_property
    def _read(self) -> list[float]:
        return self.numbers.tolist()

    @property
    def loss_nats(self) -> float:
        """Mean loss over the tokens of all processes."""
        return self._read[0]

    @property
    def gradient_norm(self) -> float:
        """Norm of the gradients of all processes, before clipping."""
        return self._read[1]


@dataclass(kw_only=True)
class _Unread:
    """A step whose figures the host has not read.

    Attributes:
        update: The step.
        rate: Its learning rate.
        numbers: Those of the update, and each layer's lambda after it.
        worked: When the device began and ended to work on it, in two parts.
    """

    update: Update
    rate: float
    numbers: OnTheWay
    worked: list[tuple[Moment, Moment]]


class Callback:
    """Looks at training, or steps in. Every process calls every hook in the same order, so hooks may talk to the others."""

    def on_restore(self, trainer: "Trainer", state: CheckpointState | None) -> None:
        """Training goes on from a checkpoint, or begins (None). A failure here ends all processes; no communication."""

    def on_gradients(self, trainer: "Trainer", update: Update) -> None:
        """Gradients are there, and no callback before has set `update.action`; this one may.

        They are summed over all processes and clipped; a process may hold only its parts. Random numbers must follow from
        the seed and the step, so that a resumed run draws the same.
        """

    def on_step(self, trainer: "Trainer", figures: dict[str, Any]) -> None:
        """The weights are updated. Fields of the step's `StepMetrics` may be added.

        A GPU computes ahead: the gradients may belong to the next step already.
        """

    def on_validation(self, trainer: "Trainer", figures: dict[str, Any]) -> None:
        """The validation loss is known. Fields of its `ValidationMetrics` may be added."""

    def on_metrics(self, trainer: "Trainer", metrics: Metrics) -> None:
        """A line was written to the metrics; in the first process only."""

    def on_save(self, trainer: "Trainer", state: dict[str, Any]) -> None:
        """A checkpoint is due. What `state["callbacks"]` gets under a name of your own is in `state.callbacks` at `on_restore`.

        It must be plain data that JSON holds. The checkpoint has that of the first process, and all processes get it back.
        """

    def on_checkpoint(self, trainer: "Trainer") -> None:
        """The checkpoint of a step is written, or being written (see `Trainer.finish_saving`); or training goes on from it."""

    def close(self) -> None:
        """Training has ended, well or not."""


def build_model(config: DiffTransformerConfig, seed: int) -> DiffTransformerForCausalLM:
    """Build a new model whose weights depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DiffTransformerForCausalLM(config)


@torch.no_grad()
def layer_lambdas(model: DiffTransformerForCausalLM) -> list[Tensor]:
    """Return each layer's lambda, averaged over heads. Layers without lambda or with one per token are left out."""
    lambdas = [module.lam() for module in model.modules() if isinstance(module, Attention)]
    return [lam.mean() for lam in lambdas if lam is not None]


class Trainer:
    """Trains one model in a run folder. `train` puts it together with the callbacks of this package.

    Args:
        config, model_config, shards, mesh, start: As in `train`.
        folder: Run folder.
        callbacks: Called in this order.

    Attributes:
        model: The model, or this process's part of it.
        step: Number of finished steps.
        tokens: Number of tokens trained on.
        seconds: Time spent in training steps.
        validated: Last step that was validated.
        evaluated: Last step whose checkpoint was evaluated.
        stopping: Whether a signal has asked the run to stop.
        reads_late: Whether the figures of a step are read when the next one computes, as on a GPU, which would be waited for.

    Raises:
        ConfigError: The adapters do not fit the model, PEFT is missing, or the mesh does not divide the model or its rows.
        DataError: See `validation_rows`.
        FailedElsewhere: Another process has raised it.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model_config: DiffTransformerConfig,
        shards: Shards,
        folder: Path,
        *,
        mesh: Mesh,
        start: DeferredModel | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.model_config, self.shards, self.folder = config, model_config, shards, folder
        self.mesh, self.processes, self.callbacks = mesh, mesh.processes, callbacks
        self.step, self.tokens, self.seconds, self.validated, self.evaluated = 0, 0, 0.0, 0, 0
        self.stopping, self.reads_late = False, mesh.processes.device != "cpu"
        self._unread: _Unread | None = None
        with self.processes.fail_together():
            mesh.check(model_config, config)
            validation_rows(shards, config.context_tokens, config.validation_windows)  # what it refuses, it refuses now
            folder.mkdir(parents=True, exist_ok=True)
            start = start or DeferredModel(lambda: build_model(model_config, config.seed))
            if (lora := config.lora) is not None:
                start.change(lambda model: add_lora(model, lora, seed=config.seed))
            self.loader = Loader(
                shards,
                split="train",
                batch_tokens=config.batch_tokens,
                context_stages=config.context_stages,
                seed=config.seed,
                rank=mesh.row_rank,
                world_size=mesh.row_ranks,
                retrieval=config.retrieval,
                pack_documents=config.pack_documents,
                prefetch=config.prefetch,
                pin_memory=self.processes.device == "cuda",
            )
        self.model = self._placed(start)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self._log: MetricsLog | None = None  # in the first process alone
        self._stop: Callable[[], int] = lambda: 0
        self._saver = Saver(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            tokenizer=shards.tokenizer,
            config=config,
            processes=self.processes,
        )

    def _placed(self, start: DeferredModel) -> DiffTransformerForCausalLM:
        model: DiffTransformerForCausalLM = start.network
        config, mesh = self.config, self.mesh
        if hasattr(model, "loss_chunk_tokens"):
            part_tokens = config.batch_tokens // config.accumulation // mesh.row_ranks // mesh.context
            chunk = loss_chunk(part_tokens, self.model_config.vocab_size, self.processes.device)
            model.loss_chunk_tokens = config.loss_chunk_tokens or chunk
        recompute_activations(model, config)
        model = mesh.place(model, config)
        start.fill(self.processes.device)
        return model.train()

    def fit(self) -> DiffTransformerForCausalLM:
        """Train to the last step, from the newest intact checkpoint if there is one, and return the model.

        Raises:
            CheckpointError: No checkpoint is intact, or the first or the last of a run cannot be written, or one is not
                written in time. For others there is a warning.
            FailedElsewhere: Another process has raised an error.
            Interrupted: A signal has stopped the run, in one of its processes.
        """
        try:
            continued = self.restore()
            with _signals(self.processes) as self._stop:
                if continued:
                    self.validate_if_due()  # a signal may have cut it short
                    if status := self._stop():
                        raise Interrupted(continued, self.step, status)
                    self._tell_of_checkpoint()  # as well
                while self.step < self.config.steps:
                    if self.train_step() and self.validate_if_due():
                        self.save_if_due()
        finally:
            self.close()
        return self.model

    def restore(self) -> Path | None:
        """Go to the newest intact checkpoint, if there is one, and drop the metrics of later steps."""
        path, state = self.processes.broadcast(lambda: newest_intact(self.folder)) or (None, None)
        if path and state:
            load_checkpoint(path, model=self.model, optimizer=self.optimizer, processes=self.processes, state=state)
            self.step, self.tokens, self.seconds = state.step, state.tokens, state.seconds
        with self.processes.fail_together():
            if state:
                self.loader.load_state_dict(state.loader)
            if self._log is not None:
                self._log.close()
            self._log = MetricsLog(self.folder / METRICS_FILE, step=self.step) if self.processes.is_first else None
            for callback in self.callbacks:
                callback.on_restore(self, state)
        self.validated, self.evaluated = self.processes.broadcast(
            lambda: (self._log.validated_step, self._log.evaluated_step) if self._log else (0, 0)
        )
        return path

    def roll_back(self) -> None:
        """Go back to the newest checkpoint, and on with the batches after those that were drawn."""
        next_batch = self.loader.step
        self.optimizer.zero_grad()
        self._saver.wait()
        self.restore()
        self.loader.step = next_batch

    def train_step(self) -> bool:
        """Make one step of the optimizer, unless a callback prevents it. Return whether the step counts."""
        config = self.config
        rate = learning_rate(
            self.step, peak=config.optimizer.learning_rate, steps=config.steps, schedule=config.schedule
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_factor"]
        device = self.processes.device
        began = Moment(device)
        update = self._compute_gradients()
        worked = [(began, Moment(device))]
        self._read_figures()  # of the step before, which the device has finished by now or will have before this one
        began = Moment(device)
        for callback in self.callbacks:
            if update.action is None:
                callback.on_gradients(self, update)
        if update.action == "rollback":
            return False
        if update.action is None:
            self.optimizer.step()
            if config.ema is not None:
                update_average(self.optimizer, config.ema)
        self.optimizer.zero_grad()
        self.step, self.tokens = self.step + 1, self.tokens + config.batch_tokens
        numbers = OnTheWay(torch.cat([update.numbers, *(lam.double()[None] for lam in layer_lambdas(self.model))]))
        self._unread = _Unread(update=update, rate=rate, numbers=numbers, worked=[*worked, (began, numbers.sent)])
        if not self.reads_late:
            self._read_figures()
        return True

    def _read_figures(self) -> None:
        """Read and report the figures of the last step, if that has not been done."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        update, (loss, norm, *others) = unread.update, unread.numbers.read()
        elapsed = sum(end.seconds_since(start) for start, end in unread.worked)
        self.seconds += elapsed
        if update.action is None:
            parts = len(update.parts)
            figures: dict[str, Any] = {
                "loss_nats": loss,
                "gradient_norm": norm,
                "learning_rate": unread.rate,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "tokens_per_second": self.config.batch_tokens / elapsed,
                "lambdas": finite(others[parts:]),  # exponentials overflow before the loss does
                "gradient_norms": dict(zip(update.parts, others[:parts], strict=True)),
            }
            for callback in self.callbacks:
                callback.on_step(self, figures)
            self.report(StepMetrics(step=self.step, **figures))

    def _compute_gradients(self) -> Update:
        """Run the forward and the backward pass of the next batch, in parts, and clip the gradients."""
        batch, device, config = next(self.loader), self.processes.device, self.config
        loss = torch.zeros((), device=device)
        for index, part in enumerate(batch.parts(config.accumulation, device), start=1):
            self.mesh.synchronise(self.model, now=index == config.accumulation)
            with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
                inputs = self.mesh.inputs(part.input_ids, part.targets, part.position_ids)
                nll = summed_next_token_nll(self.model, **inputs, z_loss=config.z_loss)
            mean = nll / max(1, batch.step_targets)  # a step of few examples may have none
            mean.backward()
            loss += mean.detach()
        clip = config.optimizer.clip_norm
        norms, parts = self.mesh.clip_gradients(self.model, float("inf") if clip is None else clip)
        return Update(
            numbers=torch.cat((self.mesh.sum(loss)[None], norms.double())), parts=parts, targets=batch.step_targets
        )

    def validate_if_due(self) -> bool:
        """Validate after the last step and every `validate_every`, unless that has been done or a signal ends it.

        Return whether the step may be saved: no step goes back to weights whose validation loss is not finite.
        """
        due = self.step == self.config.steps or self.step % self.config.validate_every == 0
        if not due or self.step <= self.validated:
            return True
        self._read_figures()
        loss = validate(self.model, self.shards, self.config, self.mesh, self._stop)
        if loss is not None and not math.isfinite(loss):
            if self.config.nonfinite == "rollback" and self.step < self.config.steps:
                return False  # the next step goes back
            self.processes.fail(
                Diverged(f"{self.folder}: the validation loss after step {self.step} is {loss}; {ON_DIVERGING}")
            )
        if loss is not None:
            figures: dict[str, Any] = {"validation_loss_nats": loss}
            for callback in self.callbacks:
                callback.on_validation(self, figures)
            self.report(ValidationMetrics(step=self.step, **figures))
            self.validated = self.step
        return True

    def save_if_due(self) -> None:
        """Save after the last step and at a signal, which then ends the run; and every `checkpoint_every`, if possible."""
        status, is_last = self._stop(), self.step == self.config.steps
        is_due = self.step % self.config.checkpoint_every == 0 or self.config.keeps_step(self.step)
        if is_last or status or is_due:
            self._read_figures()
        if is_last or status:
            saved = self._saver.save(self._state())
            self.stopping = bool(status)
            self._tell_of_checkpoint()
            if status and not (is_last and self.validated == self.step):
                raise Interrupted(saved, self.step, status)
        elif is_due:
            self._saver.save_if_possible(self._state())
            self._tell_of_checkpoint()

    def finish_saving(self) -> bool:
        """Wait for a checkpoint that is being written, and return whether this step has one."""
        self._saver.wait()
        return self.processes.broadcast(folder_of_step(self.folder, self.step).is_dir)

    def _tell_of_checkpoint(self) -> None:
        for callback in self.callbacks:
            callback.on_checkpoint(self)

    def _state(self) -> CheckpointState:
        state: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        state |= {"loader": self.loader.state_dict(), "callbacks": {}}
        for callback in self.callbacks:
            callback.on_save(self, state)
        return CheckpointState(**copy.deepcopy(state))  # which is written while training goes on

    def report(self, metrics: Metrics) -> None:
        """Write metrics, in the first process."""
        if self._log is not None:
            self._log.write(metrics)
            for callback in self.callbacks:
                callback.on_metrics(self, metrics)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, close files and callbacks, and let the model give logits again."""
        self._saver.close()
        self.loader.close()
        for callback in self.callbacks:
            callback.close()
        if self._log is not None:
            self._log.close()
        self.model.loss_chunk_tokens = None


@torch.no_grad()
def validate(
    model: DiffTransformerForCausalLM,
    shards: Shards,
    config: TrainingConfig,
    mesh: Mesh,
    stop: Callable[[], int] = lambda: 0,
) -> float | None:
    """Return the mean loss in nats per token of the run's fixed validation rows (see `validation_rows`).

    None if `stop` ended it.
    """
    held, counts = mesh.own_rows(validation_rows(shards, config.context_tokens, config.validation_windows))
    model.eval()
    rows = max(1, config.batch_tokens // config.accumulation // config.context_tokens // mesh.row_ranks)
    device, stopped = mesh.processes.device, False
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # nats and tokens
    for part, weight in zip(held.split(rows), counts.split(rows), strict=True):
        if stopped := bool(stop()):
            break
        input_ids, targets, positions = part.unbind(1)
        inputs = mesh.inputs(input_ids, targets.where(weight, IGNORED), positions if config.pack_documents else None)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            nll = summed_next_token_nll(model, **inputs)
        totals += torch.stack((nll, (inputs["targets"] != IGNORED).sum()))
    model.train()
    mesh.forget_whole(model)
    if stopped:
        return None
    total, tokens = mesh.sum(totals).tolist()
    return total / tokens  # type: ignore[no-any-return]


def recompute_activations(model: DiffTransformerForCausalLM, config: TrainingConfig) -> None:
    """Let the layers keep what `gradient_checkpointing` says for the backward pass, and compute the rest again."""
    if not config.gradient_checkpointing:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if config.gradient_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _selective)
    # Newer releases of transformers rename the method and warn about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def _selective(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operator in KEPT_PRODUCTS or str(operator.name()).startswith(KEPT_OPERATORS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _signals(processes: Processes) -> Iterator[Callable[[], int]]:
    """Turn SIGINT and SIGTERM, in any of the processes, into the exit status that they ask for, 0 before.

    A second signal interrupts a single process at once. Several processes get the same signal from a terminal and from
    torchrun, and torchrun kills them if they do not end.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and processes.count == 1:
            raise KeyboardInterrupt
        received.append(number)

    def status() -> int:
        own = max((EXIT_REQUEUE if number == signal.SIGTERM else EXIT_INTERRUPTED for number in received), default=0)
        return processes.largest(own)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, handle) for number in numbers}
    except ValueError:  # signals can only be handled in the main thread
        yield lambda: processes.largest(0)
        return
    try:
        yield status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

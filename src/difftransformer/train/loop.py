"""The training loop, which resumes bit for bit and saves a checkpoint when it is stopped."""

import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from ..attention import Attention
from ..data import Loader, Shards, validation_rows
from ..errors import EXIT_INTERRUPTED, EXIT_REQUEUE, ConfigError, DiffTransformerError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.nll import IGNORED, loss_chunk, summed_next_token_nll
from ..model.start_sizes import drowning, start_sizes
from .accuracy import answer_scores
from .checkpoint import CheckpointState, checkpoints, load_checkpoint, newest_intact
from .config import LogsConfig, TrainingConfig
from .faults import MOST_NONFINITE, Fault, GradientWatch
from .inside import look_inside
from .lora import add_lora
from .metrics import METRICS_FILE, FaultMetrics, InsideMetrics, Metrics, MetricsLog, StepMetrics, ValidationMetrics
from .optim import build_optimizer, learning_rate
from .parallel import Mesh, Processes, Unfilled
from .recompute import recompute_activations
from .saving import Saver
from .speed import Speed
from .trackers import Trackers


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


def build_model(config: DiffTransformerConfig, seed: int) -> DiffTransformerForCausalLM:
    """Build a new model whose weights depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DiffTransformerForCausalLM(config)


def layer_lambdas(model: DiffTransformerForCausalLM) -> list[float]:
    """Return each layer's lambda, averaged over heads. Layers without lambda or with one per token are left out."""
    lambdas = [module.lam() for module in model.modules() if isinstance(module, Attention)]
    return [lam.mean().item() for lam in lambdas if lam is not None]


def train(
    config: TrainingConfig,
    model_config: DiffTransformerConfig,
    shards: Shards,
    run: Path,
    *,
    device: str = "cpu",
    start: Unfilled | None = None,
    mesh: Mesh | None = None,
    logs: LogsConfig | None = None,
    on_metrics: Callable[[Metrics], None] = lambda metrics: None,
) -> DiffTransformerForCausalLM:
    """Train a model to the last step, from the run's newest intact checkpoint if there is one.

    Ctrl-C (SIGINT) and SIGTERM finish the step, save a checkpoint and raise Interrupted. The losses of an interrupted run
    are bit for bit those of an uninterrupted one, on CPU in fp32 with the same number of threads and the same mesh. On another
    mesh, sums are rounded otherwise.

    Args:
        config: Training configuration.
        model_config: Model configuration.
        shards: Tokens to train on.
        run: Folder for metrics.jsonl and checkpoints/.
        device: Device to train on.
        start: Model of that configuration to start from, whose values are read; None builds a new one from the seed.
        mesh: What this process and the others of the run compute; None for a single process. The first process writes.
        logs: What the metrics hold beside the loss, and where else they go.
        on_metrics: Called with all metrics of the run, in the first process.

    Returns:
        The trained model, of which each process holds its part.

    Raises:
        CheckpointError: No checkpoint is intact, or the first or the last of a run cannot be written. For others there is a
            warning.
        ConfigError: The adapters do not fit the model, PEFT is missing, or the mesh does not divide the model or its rows.
        DiffTransformerError: The loss or the gradient is not finite, and `config.nonfinite` is "stop", or it is so too often.
            Nothing is saved after that.
        FailedElsewhere: Another process has raised one of these.
        Interrupted: A signal has stopped the run, in one of its processes.
    """
    mesh, logs = mesh or Mesh(Processes(device=device)), logs or LogsConfig()
    processes = mesh.processes
    with processes.together():
        mesh.check(model_config, config)
        run.mkdir(parents=True, exist_ok=True)
        is_new = start is None
        start = start or Unfilled(lambda: build_model(model_config, config.seed))
        if (lora := config.lora) is not None:
            start.change(lambda model: add_lora(model, lora, seed=config.seed))
        loader = Loader(
            shards,
            split="train",
            batch_tokens=config.batch_tokens,
            context_stages=config.context_stages,
            seed=config.seed,
            rank=mesh.row_rank,
            world_size=mesh.row_ranks,
            retrieval=config.retrieval,
            pack_documents=config.pack_documents,
        )
    model: DiffTransformerForCausalLM = start.network
    if hasattr(model, "loss_chunk_tokens"):
        part_tokens = config.batch_tokens // config.accumulation // mesh.row_ranks // mesh.context
        chunk = loss_chunk(part_tokens, model_config.vocab_size, processes.device)
        model.loss_chunk_tokens = config.loss_chunk_tokens or chunk
    recompute_activations(model, config)
    model = mesh.place(model, config)
    start.fill(processes.device)
    model.train()
    optimizer = build_optimizer(model, config.optimizer)
    step, tokens, seconds, watch = 0, 0, 0.0, GradientWatch(config.outlier_sigmas)
    log: MetricsLog | None = None
    validated = 0

    def restore() -> Path | None:
        """Go to the newest intact checkpoint, if there is one, and drop the lines of later steps."""
        nonlocal step, tokens, seconds, log, validated
        found = processes.from_first(lambda: newest_intact(run))
        if found:
            path, state = found
            load_checkpoint(path, model=model, optimizer=optimizer, processes=processes, state=state)
            step, tokens, seconds = state.step, state.tokens, state.seconds
            watch.restore(state.norms)
            with processes.together():
                loader.load_state_dict(state.loader)
        with processes.together():
            if log is not None:
                log.close()
            log = MetricsLog(run / METRICS_FILE, step=step) if processes.is_first else None
        validated = processes.from_first(lambda: log.validated_step if log else 0)
        return found[0] if found else None

    continued = restore()
    saver = Saver(run, model=model, optimizer=optimizer, tokenizer=shards.tokenizer, config=config, processes=processes)

    with processes.together():
        if is_new and continued is None and processes.is_first:
            _warn_of_start(model_config, config.seed)
        trackers = Trackers(logs if processes.is_first else LogsConfig(), run, step=step)
        speed = Speed(model_config, config, logs, device=processes.device, processes=processes.count)
        row = validation_rows(shards, config.context_tokens, 1)

    def report(metrics: Metrics) -> None:
        if log is not None:
            log.write(metrics)
            trackers.write(metrics)
            on_metrics(metrics)

    def look_inside_if_due() -> None:
        if logs.inside_every and step % logs.inside_every == 0 and (found := look_inside(model, row, config, mesh)):
            report(InsideMetrics(step=step, **found))

    def state_now() -> CheckpointState:
        norms, position = list(watch.norms), loader.state_dict()
        return CheckpointState(step=step, tokens=tokens, seconds=seconds, loader=position, norms=norms)

    def report_fault(kind: Fault, action: Literal["skip", "rollback"], at_step: int, loss: float, norm: float) -> None:
        if processes.is_first:
            follows = "it is skipped" if action == "skip" else f"training goes back to step {step}"
            warnings.warn(f"step {at_step} has loss {loss:.4g} and gradient norm {norm:.4g}; {follows}", stacklevel=2)
        report(
            FaultMetrics(
                step=at_step if action == "skip" else step + 1,
                fault=kind,
                action=action,
                at_step=at_step,
                faulty_loss_nats=loss if math.isfinite(loss) else None,
                faulty_gradient_norm=norm if math.isfinite(norm) else None,
            )
        )

    def stop_if_hopeless(loss: float, norm: float) -> None:
        often = watch.nonfinite > MOST_NONFINITE
        nowhere = config.nonfinite == "rollback" and not processes.from_first(lambda: checkpoints(run))
        if config.nonfinite == "stop" or often or nowhere:
            count = f", the {watch.nonfinite}th such step since the last checkpoint" if often else ""
            processes.fail(
                DiffTransformerError(
                    f"{run}: step {step + 1} has loss {loss} and gradient norm {norm}{count}; lower "
                    "training.optimizer.learning_rate or lengthen the warm-up, and train in a new folder"
                )
            )

    def go_back(loss: float, norm: float) -> None:
        at_step, next_batch = step + 1, loader.step
        saver.wait()
        restore()
        loader.step = next_batch
        report_fault("nonfinite", "rollback", at_step, loss, norm)

    def validate_if_due(stop: Callable[[], int]) -> None:
        nonlocal validated
        if step > validated and (step == config.steps or step % config.validate_every == 0):
            loss = validate(model, shards, config, mesh, stop)
            if loss is not None:
                answers = answer_scores(model, shards, config, mesh)
                report(
                    ValidationMetrics(
                        step=step,
                        validation_loss_nats=loss,
                        validation_accuracy=None if answers is None else answers.accuracy,
                        validation_answer_nll_nats=None if answers is None else answers.nll_nats,
                    )
                )
                validated = step

    try:
        with _signals(processes) as stop:
            if continued:
                validate_if_due(stop)  # a signal may have cut it short
                if status := stop():
                    raise Interrupted(continued, step, status)
            while step < config.steps:
                rate = learning_rate(
                    step, peak=config.optimizer.learning_rate, steps=config.steps, schedule=config.schedule
                )
                for group in optimizer.param_groups:
                    group["lr"] = rate
                started = time.perf_counter()
                loss, norm, norms, fault = _step(model, optimizer, loader, config, mesh, watch)
                elapsed = time.perf_counter() - started
                if fault == "nonfinite":
                    stop_if_hopeless(loss, norm)
                    if config.nonfinite == "rollback":
                        go_back(loss, norm)
                        continue
                step, tokens, seconds = step + 1, tokens + config.batch_tokens, seconds + elapsed
                if fault is not None:
                    report_fault(fault, "skip", step, loss, norm)
                else:
                    report(
                        StepMetrics(
                            step=step,
                            loss_nats=loss,
                            gradient_norm=norm,
                            learning_rate=rate,
                            tokens=tokens,
                            seconds=seconds,
                            tokens_per_second=config.batch_tokens / elapsed,
                            lambdas=layer_lambdas(model),
                            gradient_norms=norms,
                            **speed.of_step(elapsed),
                        )
                    )
                look_inside_if_due()
                validate_if_due(stop)
                status, last = stop(), step == config.steps
                if last or status:
                    saved = saver.save(state_now())
                    if status and not (last and validated == step):
                        raise Interrupted(saved, step, status)
                elif step % config.checkpoint_every == 0 or config.keeps_step(step):
                    saver.save_if_possible(state_now())
                    watch.saved()
    finally:
        saver.close()
        trackers.close()
        if log is not None:
            log.close()
    return model


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


def _step(
    model: DiffTransformerForCausalLM,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    config: TrainingConfig,
    mesh: Mesh,
    watch: GradientWatch,
) -> tuple[float, float, dict[str, float], Fault | None]:
    """Make one optimiser step, unless `watch` finds a fault.

    Returns:
        The mean loss in nats per token, the gradient norm before clipping and that of each part, all of the batch of all
        processes; and the fault.
    """
    batch, device = next(loader), mesh.processes.device
    loss = torch.zeros((), device=device)
    for index, part in enumerate(batch.parts(config.accumulation, device), start=1):
        mesh.synchronise(model, now=index == config.accumulation)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            nll = summed_next_token_nll(model, **mesh.inputs(part.input_ids, part.targets, part.position_ids))
        mean = nll / max(1, batch.step_targets)  # a step of few examples may have none
        mean.backward()
        loss += mean.detach()
    clip = config.optimizer.clip_norm
    norm, norms = mesh.clip_gradients(model, float("inf") if clip is None else clip)
    total = mesh.sum(loss.item())
    fault = watch.fault(total, norm)
    if fault is None:
        optimizer.step()
    optimizer.zero_grad()
    return total, norm, norms, fault


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
    total, tokens, stopped = 0.0, 0, False
    device = mesh.processes.device
    for part, weight in zip(held.to(device).split(rows), counts.to(device).split(rows), strict=True):
        if stopped := bool(stop()):
            break
        input_ids, targets, positions = part.unbind(1)
        inputs = mesh.inputs(input_ids, targets.where(weight, IGNORED), positions if config.pack_documents else None)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            total += summed_next_token_nll(model, **inputs).item()
        tokens += int((inputs["targets"] != IGNORED).sum())
    model.train()
    mesh.forget_whole(model)
    return None if stopped else mesh.sum(total) / mesh.sum(tokens)


@contextmanager
def _signals(processes: Processes) -> Iterator[Callable[[], int]]:
    """Turn SIGINT and SIGTERM, in any of the processes, into the exit status that they ask for, 0 before.

    A second signal interrupts a single process at once. Several processes get the same signal from a terminal and from
    torchrun, and torchrun kills them if they do not end.
    """
    received: list[int] = []
    parent = os.getppid()

    def handle(number: int, frame: FrameType | None) -> None:
        if received and processes.count == 1:
            raise KeyboardInterrupt
        received.append(number)

    def status() -> int:
        own = max((EXIT_REQUEUE if number == signal.SIGTERM else EXIT_INTERRUPTED for number in received), default=0)
        if processes.count > 1 and os.getppid() != parent:  # torchrun has been killed
            own = own or EXIT_REQUEUE
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

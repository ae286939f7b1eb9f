"""The training loop, which resumes bit for bit and saves a checkpoint when it is stopped."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from ..attention import Attention
from ..data import Loader, Shards, validation_windows
from ..errors import DiffTransformerError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.nll import IGNORED, loss_chunk, summed_next_token_nll
from .checkpoint import CheckpointState, checkpoints, load_checkpoint, save_checkpoint
from .config import TrainingConfig
from .lora import add_lora
from .metrics import METRICS_FILE, Metrics, MetricsLog, StepMetrics, ValidationMetrics
from .optim import build_optimizer, learning_rate


class Interrupted(Exception):
    """Training was asked to stop, and has saved a checkpoint of the last step."""

    def __init__(self, checkpoint: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; saved {checkpoint}")
        self.checkpoint, self.step = checkpoint, step


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
    start: DiffTransformerForCausalLM | None = None,
    on_metrics: Callable[[Metrics], None] = lambda metrics: None,
) -> DiffTransformerForCausalLM:
    """Train a model to the last step, from the run's newest checkpoint if there is one.

    Ctrl-C (SIGINT) and SIGTERM finish the step, save a checkpoint and raise Interrupted. The losses of an interrupted run
    are bit for bit those of an uninterrupted one, on CPU in fp32 with the same number of threads.

    Args:
        config: Training configuration.
        model_config: Model configuration.
        shards: Tokens to train on.
        run: Folder for metrics.jsonl and checkpoints/.
        device: Device to train on.
        start: Model of that configuration to start from; None builds a new one from the seed.
        on_metrics: Called with all metrics of the run.

    Returns:
        The trained model.

    Raises:
        CheckpointError: The newest checkpoint is damaged, or a new one cannot be written.
        ConfigError: The adapters do not fit the model, or PEFT is missing.
        DiffTransformerError: The loss or the gradient is no longer finite. Nothing is saved after that.
        Interrupted: A signal has stopped the run.
    """
    run.mkdir(parents=True, exist_ok=True)
    model = (build_model(model_config, config.seed) if start is None else start.float()).to(device)
    if config.gradient_checkpointing:
        # Newer releases of transformers rename the method and warn about the old name.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if config.lora is not None:
        add_lora(model, config.lora, seed=config.seed)
    if isinstance(model, DiffTransformerForCausalLM):
        tokens = config.batch_tokens // config.accumulation
        model.loss_chunk_tokens = config.loss_chunk_tokens or loss_chunk(tokens, model_config.vocab_size, device)
    model.train()
    optimizer = build_optimizer(model, config.optimizer)
    loader = Loader(
        shards,
        split="train",
        batch_tokens=config.batch_tokens,
        context_stages=config.context_stages,
        seed=config.seed,
        retrieval=config.retrieval,
    )
    step, tokens, seconds = 0, 0, 0.0
    if found := checkpoints(run):
        state = load_checkpoint(found[-1], model=model, optimizer=optimizer)
        step, tokens, seconds = state.step, state.tokens, state.seconds
        loader.load_state_dict(state.loader)
    log = MetricsLog(run / METRICS_FILE, step=step)

    def report(metrics: Metrics) -> None:
        log.write(metrics)
        on_metrics(metrics)

    def save() -> Path:
        state = CheckpointState(step=step, tokens=tokens, seconds=seconds, loader=loader.state_dict())
        return save_checkpoint(
            run, state, model=model, optimizer=optimizer, tokenizer=shards.tokenizer, keep=config.keep_checkpoints
        )

    try:
        with _signals() as stop:
            while step < config.steps:
                rate = learning_rate(
                    step, peak=config.optimizer.learning_rate, steps=config.steps, schedule=config.schedule
                )
                for group in optimizer.param_groups:
                    group["lr"] = rate
                started = time.perf_counter()
                loss, norm = _step(model, optimizer, loader, config, device)
                elapsed = time.perf_counter() - started
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    raise DiffTransformerError(
                        f"{run}: step {step + 1} has loss {loss} and gradient norm {norm}; lower "
                        "training.optimizer.learning_rate or lengthen the warm-up, and train in a new folder"
                    )
                step, tokens, seconds = step + 1, tokens + config.batch_tokens, seconds + elapsed
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
                    )
                )
                last = step == config.steps
                if last or step % config.validate_every == 0:
                    report(ValidationMetrics(step=step, validation_loss_nats=validate(model, shards, config, device)))
                if last or stop() or step % config.checkpoint_every == 0:
                    saved = save()
                    if stop() and not last:
                        raise Interrupted(saved, step)
    finally:
        log.close()
    return model


def _step(
    model: DiffTransformerForCausalLM,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    config: TrainingConfig,
    device: str,
) -> tuple[float, float]:
    """Make one optimiser step. Return the mean loss in nats per token and the gradient norm before clipping."""
    batch = next(loader)
    loss = torch.zeros((), device=device)
    for input_ids, targets in zip(
        batch.input_ids.chunk(config.accumulation), batch.targets.chunk(config.accumulation), strict=True
    ):
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            nll = summed_next_token_nll(model, input_ids.to(device), targets.to(device))
        part = nll / config.batch_tokens
        part.backward()
        loss += part.detach()
    clip = config.optimizer.clip_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


@torch.no_grad()
def validate(model: DiffTransformerForCausalLM, shards: Shards, config: TrainingConfig, device: str) -> float:
    """Return the mean loss in nats per token of the text in the run's fixed validation windows, separators left out."""
    found = validation_windows(shards, config.context_tokens, config.validation_windows)
    windows = torch.from_numpy(np.stack(list(found)))
    model.eval()
    rows = max(1, config.batch_tokens // config.accumulation // config.context_tokens)
    total, tokens = 0.0, 0
    for part in windows.to(device).split(rows):
        is_text = part[:, 1:] != shards.tokenizer.end_of_text
        targets = part[:, 1:].where(is_text, IGNORED)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            total += summed_next_token_nll(model, part[:, :-1], targets).item()
        tokens += int(is_text.sum())
    model.train()
    return total / tokens


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Turn SIGINT and SIGTERM into a flag. A second signal interrupts at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, handle) for number in numbers}
    except ValueError:  # signals can only be handled in the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

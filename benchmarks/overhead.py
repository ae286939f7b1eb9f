"""What the training loop costs beside the model: against a bare PyTorch loop over the same model, in turns with it."""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from script import Steps, run

from difftransformer.data import DataConfig, Loader, prepare_shards
from difftransformer.model import DiffTransformerConfig
from difftransformer.train import Callback, LogsConfig, Trainer, TrainingConfig, build_model, train
from difftransformer.train.metrics import Metrics, StepMetrics
from difftransformer_lab.bench.models import SIZES
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.results import BenchRow

WARM_UP, SAVES = 3, 2
WORDS = 400_000


def steps(settings: Settings) -> Steps:
    """List the sizes and the data types."""
    return {
        f"training loop of {size}, {dtype}": partial(measure, size, dtype, settings)
        for size in settings.sizes or ("5M",)
        for dtype in settings.dtypes or ()
    }


def measure(size: str, dtype: str, settings: Settings) -> list[BenchRow]:
    """Run the training loop, and after each of its steps a bare step on a copy of the model.

    The loop runs as in `train`: it reads batches, computes metrics of every step, looks inside the model, writes lines and
    saves checkpoints. The bare step computes logits, cross-entropy, gradients, their clipping and fused AdamW on tokens that
    are in memory. On the CPU, times are CPU times of all threads, which do not grow while other processes use the machine.

    Returns:
        A row with these figures: medians of a step of the loop (batch, step, metrics and their line) and of the bare step after
        it, their ratio, and as shares of a step the reading of a batch, metrics and their line (wall time), looks inside
        the model every `inside_every` steps and checkpoints every `save_every` steps.
    """
    device, rounds, budget_seconds = settings.device, settings.repeats, settings.seconds
    fields, batch, context = SIZES[size]
    config = DiffTransformerConfig(**{"max_position_embeddings": context, **fields})
    every = TrainingConfig(steps=1, batch_tokens=context, context_stages=[(0, context)]).checkpoint_every
    inside = 100  # as the documentation recommends
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary, "text.txt")
        text.write_text(" ".join(f"word{index * 7919 % 100_003}" for index in range(WORDS)))
        shards = prepare_shards(DataConfig(source=str(text), tokenizer="byte", folder=str(Path(temporary, "data"))))
        bare = bare_step(config, batch, context, dtype, device)
        bare()
        began = time.perf_counter()
        bare()
        steps = WARM_UP + max(8, min(rounds, int(budget_seconds / 2 / (time.perf_counter() - began))))
        clock = time.process_time if device == "cpu" else time.perf_counter
        training = TrainingConfig(
            steps=steps,
            batch_tokens=batch * context,
            context_stages=[(0, context)],
            precision="bf16" if dtype == "bf16" else "fp32",
            validate_every=steps,
            validation_windows=1,
            checkpoint_every=steps + 1,
            keep_steps=[steps - 2 - index for index in range(SAVES)],
        )
        whole: dict[int, float] = {}
        logged: dict[int, float] = {}
        bares: list[float] = []
        last = [clock(), time.perf_counter(), 0.0]

        class AfterStep(Callback):
            def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
                now, wall = clock(), time.perf_counter()
                if not isinstance(metrics, StepMetrics):
                    return
                whole[metrics.step] = now - last[0]
                logged[metrics.step] = 1 - (metrics.seconds - last[2]) / (wall - last[1])
                begin = clock()
                bare()
                bares.append(clock() - begin)
                last[:] = clock(), time.perf_counter(), metrics.seconds

        # A step's checkpoint is saved before the next step, so its time is in the next one's.
        saved = {step + 1 for step in training.keep_steps}
        looked = steps - 1
        logs = LogsConfig(inside_every=looked)
        train(training, config, shards, Path(temporary, "run"), device=device, logs=logs, callbacks=[AfterStep()])
        loader = Loader(
            shards, split="train", batch_tokens=batch * context, context_stages=training.context_stages, seed=0
        )
        loading = median_seconds(lambda: list(next(loader).parts(1, device)), clock)
    timed = [step for step in whole if step > WARM_UP]
    plain = [step for step in timed if step not in saved and step != looked + 1]
    step_seconds = statistics.median(whole[step] for step in plain)
    look_seconds = max(0.0, whole[looked + 1] - step_seconds)
    save_seconds = max(0.0, statistics.median(whole[step] for step in saved) - step_seconds)
    figures = {
        "step_seconds": step_seconds,
        "bare_seconds": statistics.median(bares[WARM_UP:]),
        "ratio_to_bare": statistics.median(whole[step] / bares[step - 1] for step in plain),
        "loader_share": loading / step_seconds,
        "log_share": statistics.median(logged[step] for step in plain),
        "inside_share": look_seconds / inside / step_seconds,
        "save_share": save_seconds / every / step_seconds,
        "steps": len(plain),
        "inside_every": inside,
        "save_every": every,
    }
    return [
        BenchRow(
            part="overhead",
            work="training step",
            dtype=dtype,
            shape={"model": size, "batch": batch, "context_tokens": context},
            implementation="loop of the package",
            figures={name: float(value) for name, value in figures.items()},
        )
    ]


def bare_step(config: DiffTransformerConfig, batch: int, context: int, dtype: str, device: str) -> Callable[[], None]:
    """Build a training step as one writes it by hand."""
    model = build_model(config, seed=0).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, context + 1), generator=draw).to(device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def median_seconds(call: Callable[[], object], clock: Callable[[], float], rounds: int = 20) -> float:
    seconds = []
    for _ in range(rounds):
        began = clock()
        call()
        seconds.append(clock() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    run(steps, __doc__)

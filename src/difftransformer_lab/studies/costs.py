"""What a model costs compared with its twin: training step, prefill, decoding and memory."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from difftransformer.data import Shards
from difftransformer.errors import DiffTransformerError
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM, count, weights_and_kv_bytes
from difftransformer.train.parallel import Mesh, Processes
from difftransformer.train.trainer import Trainer

from ..bench.models import decode_work, prefill_work, training_work
from ..bench.timing import time_interleaved
from ..child import start_child
from ..results import CostRow, Timing
from .recipe import Recipe

REPEATS = 7
STEPS, FIRST_STEPS = 60, 3  # timed, and before them, which compile
DECODE_TOKENS = 16
SHORT, LONG = 4096, 65_536  # context lengths of the memory columns, in tokens
# arXiv:2410.05258 section 3.2: a 6.8B DIFF matches the loss of an 11B Transformer (62.2 %), by the fitted curves.
PAPER_SHARE = 0.62
# Variables of glibc that return freed blocks to the system at once, so that the peak counts only memory in use.
RETURN_FREED_BLOCKS = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}


def measure_costs(
    configs: Mapping[str, DiffTransformerConfig], *, rows: int, context_tokens: int, labels: Mapping[str, str]
) -> list[CostRow]:
    """Time the models in one interleaved run, measure the memory of each in its own process, add a smaller DIFF by formula.

    Args:
        configs: Configuration of each model by name; the first is the model under test, the last its twin.
        rows: Rows of a training step, of a prefill and of a decoding step.
    """
    models = {name: DiffTransformerForCausalLM(config) for name, config in configs.items()}

    def time_all(work: Callable[..., Callable[[], None]], *arguments: int, warmup: int = 1) -> dict[str, Timing]:
        calls = {name: work(model, rows, context_tokens, *arguments) for name, model in models.items()}
        return time_interleaved(calls, rounds=REPEATS, warmup=warmup)

    train = time_all(training_work, warmup=2)
    prefill = time_all(prefill_work)
    decode = time_all(decode_work, DECODE_TOKENS)
    sizes = {"rows": rows, "context_tokens": context_tokens, "threads": torch.get_num_threads()}
    result = []
    for name, config in configs.items():
        counts = count(config)
        row = CostRow(
            model=name,
            label=labels.get(name, name),
            parameters=counts.parameters,
            train_step_seconds=train[name].median_seconds,
            prefill_tokens_per_second=rows * context_tokens / prefill[name].median_seconds,
            decode_tokens_per_second=rows * DECODE_TOKENS / decode[name].median_seconds,
            peak_training_bytes=peak_training_bytes(config, **sizes),
            weights_and_kv_bytes_4k=weights_and_kv_bytes(counts, SHORT),
            weights_and_kv_bytes_64k=weights_and_kv_bytes(counts, LONG),
        )
        result.append(row)
    return [*result, _smaller(next(iter(configs)), configs, labels)]


def time_steps(
    recipes: Mapping[str, Recipe], shards: Shards, *, labels: Mapping[str, str], device: str
) -> list[CostRow]:
    """Time training steps of several models in turns, each as its recipe trains it, at its last context length."""
    trainers: dict[str, Trainer] = {}
    rows = []
    # Models of several types share the code of a layer, and each needs a compiled one of its own.
    limit = torch._dynamo.config.patch(recompile_limit=2 * len(recipes) + torch._dynamo.config.recompile_limit)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened, limit:
        for name, recipe in recipes.items():
            training = replace(recipe.training, context_stages=[(0, recipe.training.context_tokens)])
            config = recipe.model_config(vocab_size=shards.tokenizer.vocab_size)
            mesh = Mesh(Processes(device=device))
            trainers[name] = trainer = Trainer(training, config, shards, Path(folder, name), mesh=mesh)
            opened.callback(trainer.close)
            trainer.restore()
        calls = {name: trainer.train_step for name, trainer in trainers.items()}
        timed = time_interleaved(calls, rounds=STEPS, warmup=FIRST_STEPS, device=device)
    for name, trainer in trainers.items():
        counts = count(trainer.model_config)
        row = CostRow(
            model=name,
            label=labels[name],
            parameters=counts.parameters,
            train_step_seconds=timed[name].median_seconds,
            weights_and_kv_bytes_4k=weights_and_kv_bytes(counts, SHORT),
            weights_and_kv_bytes_64k=weights_and_kv_bytes(counts, LONG),
        )
        rows.append(row)
    return rows


def _smaller(name: str, configs: Mapping[str, DiffTransformerConfig], labels: Mapping[str, str]) -> CostRow:
    """Compute the costs of the model under test at PAPER_SHARE of the twin's parameters.

    Width and depth shrink by the same factor: parameters scale with its cube, keys and values with its square.
    """
    twin, under_test = count(list(configs.values())[-1]), count(configs[name])
    parameters = round(PAPER_SHARE * twin.parameters)
    kv_bytes = under_test.kv_bytes_per_token * PAPER_SHARE ** (2 / 3)
    weights = 2 * parameters
    return CostRow(
        model=f"{name}-{PAPER_SHARE:.0%}",
        label=f"{labels.get(name, name)} at {PAPER_SHARE:.0%} of the parameters, by formula",
        parameters=parameters,
        weights_and_kv_bytes_4k=round(weights + SHORT * kv_bytes),
        weights_and_kv_bytes_64k=round(weights + LONG * kv_bytes),
    )


def peak_training_bytes(config: DiffTransformerConfig, *, rows: int, context_tokens: int, threads: int) -> int:
    """Measure the peak of two training steps: weights, gradients, both moments and activations.

    They run in a fresh process, because allocators keep memory.
    """
    spec = json.dumps({"config": config.to_dict(), "rows": rows, "context": context_tokens, "threads": threads})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with start_child(__name__, spec, env=os.environ | RETURN_FREED_BLOCKS, **pipes) as process:
        lines = process.stdout.read().decode(errors="replace").splitlines()  # type: ignore[union-attr]
    if process.returncode:
        reason = lines[-1] if lines else f"status {process.returncode}"
        raise DiffTransformerError(f"the memory measurement failed: {reason}")
    return int(next(line for line in reversed(lines) if line.isdecimal()))


def main(arguments: list[str]) -> int:
    """Train as a spec says, and print the peak in bytes."""
    spec = json.loads(arguments[0])
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)

    def train() -> None:
        model = DiffTransformerForCausalLM(DiffTransformerConfig.from_dict(spec["config"]))
        step = training_work(model, spec["rows"], spec["context"])
        step()
        step()

    sys.stdout.write(f"{peak_bytes(train)}\n")
    return 0


def peak_bytes(work: Callable[[], object]) -> int:
    """Measure the peak of the resident set during the work, above its size before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which the imports have set
    before = _resident_bytes("VmRSS")
    work()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    """Read VmRSS (now) or VmHWM (peak) of this process."""
    status = Path("/proc/self/status")
    if not status.exists():  # other systems tell only the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

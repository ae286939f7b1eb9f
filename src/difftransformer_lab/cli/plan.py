"""difftransformer plan."""

import re
from dataclasses import asdict
from json import dumps
from typing import TYPE_CHECKING, Any

from rich.table import Table

from difftransformer.errors import ConfigError

from ..recipe_files import read_recipe
from .arguments import SET, check_positive
from .console import console, show

if TYPE_CHECKING:
    from difftransformer.train.plan import Plan

H100_TFLOPS = 989.0  # of bf16 matrix products, by NVIDIA's data sheet
SHOWN = 8
_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "TiB": 2**40}

ARGUMENTS = SET | {
    "--gpu-memory": {
        "dest": "gpu_memory",
        "default": "80GiB",
        "help": "Memory of one GPU, such as 80GiB; a tenth stays free for the allocator and libraries. (default: 80GiB)",
    },
    "--tokens-per-second": {
        "dest": "tokens_per_second",
        "type": float,
        "help": "Measured training tokens a second of one GPU, in place of --mfu and --tflops.",
    },
    "--json": {"action": "store_true", "help": "Print JSON in place of tables."},
}


def run(
    recipe: str,
    gpus: int = 8,
    gpu_memory: str = "80GiB",
    mfu: float = 0.4,
    tflops: float = H100_TFLOPS,
    tokens_per_second: float | None = None,
    json: bool = False,
    set: list[str] | None = None,
) -> int:
    """Compute what training a recipe's model and its twin takes on many GPUs. Neither GPUs nor data are needed.

    Args:
        recipe: YAML file, or the name of a shipped recipe, such as paper-3b.
        gpus: Number of GPUs.
        gpu_memory: Memory of one GPU.
        mfu: Share of the peak speed that model FLOPs reach; recomputed activations do not count.
        tflops: Peak speed of one GPU in TFLOP/s. Defaults to an H100's in bf16.
        tokens_per_second: Measured training tokens a second of one GPU.
        json: Whether to print JSON.
    """
    read_recipe(recipe)
    check_positive(gpus=gpus)
    memory = _bytes(gpu_memory)
    for name, value in (("mfu", mfu), ("tflops", tflops), ("tokens-per-second", tokens_per_second)):
        if value is not None and not value > 0:
            raise ConfigError(f"--{name} {value}: give a number above 0")
    if mfu > 1:
        raise ConfigError(f"--mfu {mfu}: give a share from 0 to 1")
    from difftransformer.model import count
    from difftransformer.train.plan import fitting_plans

    from ..studies import load_recipe

    loaded = load_recipe(recipe, set)
    training, planned = loaded.training, loaded.planned_config()
    tokens = training.steps * training.batch_tokens
    documents = []
    for word in dict.fromkeys((planned.attention_type, *loaded.compare.models)):
        config = planned.twin(word)
        counts = count(config, context_tokens=training.context_tokens)
        rate = tokens_per_second or 1e12 * tflops * mfu / counts.train_flops_per_token
        plans = fitting_plans(config, training, gpus=gpus, gpu_bytes=0.9 * memory)
        document = {
            "attention_type": word,
            "parameters": counts.parameters,
            "train_flops_per_token": counts.train_flops_per_token,
            "train_flops": counts.train_flops_per_token * tokens,
            "tokens": tokens,
            "gpu_tokens_per_second": rate,
            "days": tokens / (rate * gpus) / 86_400,
            "layouts": [_document(plan) for plan in plans],
        }
        documents.append(document)
    if json:
        show(dumps({"recipe": loaded.name, "gpus": gpus, "gpu_bytes": memory, "models": documents}, indent=1))
        return 0
    _print(loaded.name, gpus, gpu_memory, documents)
    return 0


def _bytes(text: str) -> float:
    amount = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text)
    if amount is None or amount[2] not in _UNITS or not float(amount[1]):
        raise ConfigError(
            f"--gpu-memory {text}: give a number above 0 with a unit ({', '.join(_UNITS)}), such as 80GiB"
        )
    return float(amount[1]) * _UNITS[amount[2]]


def _document(plan: "Plan") -> dict[str, Any]:
    memory = asdict(plan.rank_bytes) | {"total": plan.rank_bytes.total}
    return {"layout": asdict(plan.layout), "rank_bytes": memory, "communicated_bytes": plan.communicated_bytes}


def _print(name: str, gpus: int, memory: str, documents: list[dict[str, Any]]) -> None:
    sizes = Table(
        "",
        *(document["attention_type"] for document in documents),
        title=f"{name} on {gpus} GPUs of {memory}",
        caption="Bytes are those of one rank at the peak of a step. A layout ends with the rows of a part x parts of a step.",
    )
    best = [document["layouts"][0] for document in documents]
    rows = {
        "parameters": [f"{document['parameters'] / 1e9:.3f}B" for document in documents],
        "training FLOPs": [f"{document['train_flops']:.3g}" for document in documents],
        "tokens": [f"{document['tokens'] / 1e9:,.1f}B" for document in documents],
        "tokens/s of a GPU": [f"{document['gpu_tokens_per_second']:,.0f}" for document in documents],
        "days": [f"{document['days']:,.1f}" for document in documents],
        "layout": [_layout(layout) for layout in best],
        **{f"{part}, GiB": [_gib(layout["rank_bytes"][part]) for layout in best] for part in best[0]["rank_bytes"]},
        "sent a step, GiB": [_gib(layout["communicated_bytes"]) for layout in best],
    }
    for label, cells in rows.items():
        sizes.add_row(label, *cells)
    console.print(sizes)
    for document in documents:
        others = Table(
            "layout", "GiB of a rank", "sent a step, GiB", title=f"Layouts that fit, {document['attention_type']}"
        )
        for layout in document["layouts"][:SHOWN]:
            others.add_row(_layout(layout), _gib(layout["rank_bytes"]["total"]), _gib(layout["communicated_bytes"]))
        console.print(others)
        if len(document["layouts"]) > SHOWN:
            show(f"and {len(document['layouts']) - SHOWN} more (--json lists all)")


def _layout(layout: dict[str, Any]) -> str:
    degrees = layout["layout"]
    words = [f"{name} {degrees[name]}" for name in ("replicate", "shard", "tensor", "context") if degrees[name] > 1]
    rows = degrees["micro_rows"]
    words.append(f"{rows} row{'s' * (rows > 1)} x {degrees['accumulation']}")
    return ", ".join(words + (["recompute"] if degrees["recompute"] else []))


def _gib(count: float) -> str:
    return f"{count / 2**30:,.2f}"

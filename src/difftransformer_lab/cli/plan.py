"""difftransformer plan."""

import re
from dataclasses import asdict
from json import dumps
from typing import Any

from difftransformer.errors import ConfigError

from ..recipe_files import read_recipe
from .arguments import check_positive
from .console import show, show_table

H100_TFLOPS = 989.0  # of bf16 matrix products, by NVIDIA's data sheet
DIFF_SPEED = 0.9  # 6718 over 7491 tokens/s on H100 GPUs (arXiv:2410.05258 Table 7, 3B, 4K tokens)
SHOWN = 8
_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "TiB": 2**40}


def run(
    recipe: str,
    gpus: int = 8,
    gpu_memory: str = "80GiB",
    mfu: float = 0.4,
    tflops: float = H100_TFLOPS,
    tokens_per_second: float | None = None,
    diff_speed: float = DIFF_SPEED,
    machine_gpus: int = 8,
    within_gbs: float = 450.0,
    across_gbs: float = 50.0,
    json: bool = False,
    set: list[str] | None = None,
) -> int:
    """Compute what training a recipe's model and its twin takes on many GPUs. Neither GPUs nor data are needed.

    Args:
        recipe: YAML file, or the name of a shipped recipe, such as paper-3b.
        gpus: Number of GPUs.
        gpu_memory: Memory of one GPU, such as 80GiB; a tenth stays free for the allocator and libraries.
        mfu: Share of the peak speed that model FLOPs reach, in diff's twin; recomputed activations do not count.
        tflops: Peak speed of one GPU in TFLOP/s. Defaults to an H100's in bf16.
        tokens_per_second: Measured training tokens a second of one GPU, by the recipe's model, in place of mfu and tflops.
        diff_speed: Measured speed of diff over that of its twin; the default is the paper's on H100 GPUs.
        machine_gpus: GPUs of one machine.
        within_gbs: GB/s that a GPU sends to others of its machine; the default is NVLink of an H100.
        across_gbs: GB/s that a machine sends to others, for each of its GPUs; the default is 400 Gbit/s.
        json: Print JSON in place of tables.
    """
    read_recipe(recipe)
    check_positive(gpus=gpus, machine_gpus=machine_gpus)
    memory = _bytes(gpu_memory)
    speeds = {"tokens-per-second": tokens_per_second, "within-gbs": within_gbs, "across-gbs": across_gbs}
    for name, value in {"mfu": mfu, "tflops": tflops, "diff-speed": diff_speed, **speeds}.items():
        if value is not None and not value > 0:
            raise ConfigError(f"--{name} {value}: give a number above 0")
    if mfu > 1:
        raise ConfigError(f"--mfu {mfu}: give a share from 0 to 1")
    from difftransformer.model import count
    from difftransformer.train.plan import Cluster, fitting_plans

    from ..studies import load_recipe

    loaded = load_recipe(recipe, set)
    training, planned = loaded.training, loaded.planned_config()
    tokens = training.steps * training.batch_tokens
    links = {"within_bytes": 1e9 * within_gbs, "across_bytes": 1e9 * across_gbs}
    cluster = Cluster(gpus=gpus, gpu_bytes=0.9 * memory, machine_gpus=machine_gpus, **links)
    words = dict.fromkeys((planned.attention_type, *loaded.compare.models))
    counted = {word: count(planned.twin(word), context_tokens=training.context_tokens) for word in words}
    # FLOPs that take as long at the twin's speed.
    work: dict[str, float] = {word: counts.train_flops_per_token for word, counts in counted.items()}
    if "diff" in work:
        twin = count(planned.twin("softmax"), context_tokens=training.context_tokens)
        work["diff"] = twin.train_flops_per_token / diff_speed
    speed = tokens_per_second * work[planned.attention_type] if tokens_per_second else 1e12 * tflops * mfu
    documents = []
    for word, counts in counted.items():
        rate = speed / work[word]
        computing = training.batch_tokens / (rate * gpus)
        plans = fitting_plans(planned.twin(word), training, cluster, computing_seconds=computing)
        layouts = [
            asdict(plan) | {"rank_bytes": asdict(plan.rank_bytes) | {"total": plan.rank_bytes.total}} for plan in plans
        ]
        document = {
            "attention_type": word,
            "parameters": counts.parameters,
            "train_flops_per_token": counts.train_flops_per_token,
            "train_flops": counts.train_flops_per_token * tokens,
            "tokens": tokens,
            "gpu_tokens_per_second": rate,
            "computing_seconds": computing,
            "days": plans[0].step_seconds * training.steps / 86_400,
            "layouts": layouts,
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


def _print(name: str, gpus: int, memory: str, documents: list[dict[str, Any]]) -> None:
    from ..report.tables import Table, columns, names

    best = [document["layouts"][0] for document in documents]
    rows = {
        "parameters": [f"{document['parameters'] / 1e9:.3f}B" for document in documents],
        "training FLOPs": [f"{document['train_flops']:.3g}" for document in documents],
        "tokens": [f"{document['tokens'] / 1e9:,.1f}B" for document in documents],
        "tokens/s of a GPU": [f"{document['gpu_tokens_per_second']:,.0f}" for document in documents],
        "computing a step, s": [f"{document['computing_seconds']:,.3f}" for document in documents],
        "a step, s": [f"{layout['step_seconds']:,.3f}" for layout in best],
        "days": [f"{document['days']:,.1f}" for document in documents],
        "layout": [_layout(layout) for layout in best],
        **{f"{part}, GiB": [_gib(layout["rank_bytes"][part]) for layout in best] for part in best[0]["rank_bytes"]},
        "sent a step, GiB": [_gib(layout["communicated_bytes"]) for layout in best],
    }
    notes = [
        "Bytes are those of one rank at the peak of a step. A layout ends with the rows of a part x parts of a step."
    ]
    titles = names("", *(document["attention_type"] for document in documents))
    lines = [[label, *cells] for label, cells in rows.items()]
    show_table(Table("sizes", f"{name} on {gpus} GPUs of {memory}", titles, lines, notes))
    for document, layout in zip(documents, best, strict=True):
        if (seconds := layout["step_seconds"]) > 2 * document["computing_seconds"]:
            show(
                f"{document['attention_type']}: sending takes most of a step ({seconds:,.3f} s, of which "
                f"{document['computing_seconds']:,.3f} s compute); take fewer GPUs, larger batches or a faster network"
            )
    for document in documents:
        lines = []
        for layout in document["layouts"][:SHOWN]:
            sizes = (layout["rank_bytes"]["total"], layout["communicated_bytes"])
            lines.append([_layout(layout), *map(_gib, sizes), f"{layout['step_seconds']:,.3f}"])
        titles = columns("layout", "GiB of a rank", "sent a step, GiB", "a step, s")
        show_table(Table("layouts", f"Layouts that fit, {document['attention_type']}", titles, lines))
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

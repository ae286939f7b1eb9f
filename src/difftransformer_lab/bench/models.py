"""Whole models: work of models of one shape, and decoding behind a long cache by models of the same weights.

The models of one shape are DIFF, DIFF V2, the twin, transformers' Llama and DiffLlama. Decoding behind a long cache is one
forward pass of one token, logits included, without the work of `generate` around it. It must read every weight and every cached
key and value once: `MODEL` has 50.7M weights (203 MB in fp32; the embedding is also the output layer) and caches 2 x 8 x 64
numbers a layer and token (201 MB at 4,096 tokens) in each model.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from difftransformer.errors import ConfigError
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.model.weights import DTYPES

from ..results import BenchRow, Dtype
from .attention_work import fastest_attention
from .memory import device_peak_bytes
from .model_work import SPARE_TOKENS, CacheKind, decode_work, next_token_work, prefill_work, training_work
from .settings import Settings, Step
from .timing import attempt_each, time_interleaved

DIFF, V2, TWIN, TWIN_SDPA, LLAMA = "DIFF", "DIFF V2", "twin", "twin sdpa", "Llama sdpa"
DIFFLLAMAS = ("DiffLlama sdpa", "DiffLlama eager")
TRANSFORMER = "Transformer"
"""DIFF's twin among the models of the same weights."""
WORKS = ("training step", "prefill", "decoding")
DECODED_TOKENS = 8  # tokens that a call decodes, one by one

# Fields that transformers' configurations share.
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


class ModelSize(NamedTuple):
    """The size of a model, and the rows of a training step; prefill and decoding have one row of the same length."""

    fields: Mapping[str, Any]
    rows: int
    context_tokens: int


_SMALL = {"vocab_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 1024}
# GPT-3's two smallest shapes (arXiv:2005.14165 Table 2.1) with GPT-2's vocabulary, padded; inner widths are multiples of 16.
_LARGE = {"vocab_size": 50_304, "max_position_embeddings": 4096}
_SMALLEST = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
# SmolLM2-135M, but its 9 heads cannot be paired: 8 heads with 4 of keys and values have as many weights as 9 with 3.
_SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
SIZES = {
    "0.5M": ModelSize(_SMALLEST, 16, 128),  # the model of the demo
    "5M": ModelSize({"hidden_size": 256, **_SMALL}, 4, 512),
    "20M": ModelSize({"hidden_size": 512, **_SMALL}, 2, 512),
    "125M": ModelSize({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **_LARGE}, 8, 2048),
    "135M": ModelSize(_SMOLLM2 | {"vocab_size": 49_152, "num_hidden_layers": 30, "num_key_value_heads": 4}, 2, 256),
    "350M": ModelSize(
        _LARGE | {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 24, "num_attention_heads": 16},
        8,
        2048,
    ),
}

# As many heads of keys and values as of queries: copying those is where DiffLlama spends its time.
MODEL = _SMOLLM2 | {"vocab_size": 8192, "num_hidden_layers": 12, "num_key_value_heads": 8}
MODEL |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
CACHED_TOKENS = 4096


def model_steps(settings: Settings) -> list[Step]:
    sizes = settings.sizes or settings.defaults.models
    if unknown := [size for size in sizes if size not in SIZES]:
        raise ConfigError(f"--sizes: {unknown[0]!r} is unknown; choose from {', '.join(SIZES)}")
    if unknown := [work for work in settings.works or () if work not in WORKS]:
        raise ConfigError(f"--works: {unknown[0]!r} is unknown; choose from {', '.join(WORKS)}")
    return [
        Step(f"{work} of {size}, {dtype}", partial(time_models, size, dtype, work, settings))
        for work in settings.works or WORKS
        for size in sizes
        for dtype in settings.dtypes or settings.defaults.dtypes
    ]


def time_models(
    size: str,
    dtype: Dtype,
    work: str,
    settings: Settings,
    models: Mapping[str, PreTrainedModel] | None = None,
    part: str = "models",
) -> list[BenchRow]:
    """Time one kind of work of all models, interleaved.

    Args:
        dtype: Data type of weights and activations; in a training step "bf16" and "fp16" mean autocast.
        work: "training step" (forward, backward, fused AdamW; on a GPU with compiled layers, as recipes train), "prefill" into
            a cache or "decoding" behind one.
    """
    models, device = models or build_models(size, settings.peers), settings.device
    rows, context = SIZES[size].rows if work == "training step" else 1, SIZES[size].context_tokens
    figures = {name: {"parameters": float(model.num_parameters())} for name, model in models.items()}

    def build(name: str) -> Callable[[], None]:
        if work == "prefill":
            return prefill_work(models[name].to(device, DTYPES[dtype]), rows, context)
        if work == "decoding":
            return decode_work(models[name].to(device, DTYPES[dtype]), rows, context, DECODED_TOKENS)
        held = 0 if device == "cpu" else torch.cuda.memory_allocated()
        call = training_work(models[name].to(device), rows, context, dtype)
        if device == "cpu":
            return call
        for layer in models[name].model.layers:
            layer.compile()

        def step() -> None:
            with fastest_attention():  # affects only models that call PyTorch's attention
                call()

        figures[name]["model_flops"] = model_flops(models[name], rows, context)
        begun = time.perf_counter()
        step()  # creates the optimizer's moments and compiles; all later steps are alike
        torch.cuda.synchronize()
        figures[name]["first_step_seconds"] = time.perf_counter() - begun
        figures[name]["peak_bytes"] = device_peak_bytes(step, held)
        return step

    if device != "cpu" and work == "training step":
        torch.compile(torch.sin)(torch.ones(2, device=device))  # what a process compiles first takes longer
    calls, reasons = attempt_each(models, build, device)
    timings = time_interleaved(calls, rounds=settings.repeats, budget_seconds=settings.seconds, device=device)
    shape = {"model": size, "batch": rows, "context_tokens": context}
    row = partial(BenchRow, part=part, work=work, dtype=dtype, shape=shape)
    return [
        row(implementation=name, timing=timings.get(name), figures=figures[name], left_out=reasons.get(name))
        for name in models
    ]


def build_models(size: str, peers: bool = True) -> dict[str, PreTrainedModel]:
    """Build the models of one shape in fp32. The twin runs as `auto` chooses, and once more on PyTorch's attention."""
    config = DiffTransformerConfig(**SIZES[size].fields, attention_type="diff")
    shape = {name: getattr(config, name) for name in _SHAPE}
    on_sdpa = config.twin()
    on_sdpa.attn_backend = "sdpa"
    models: dict[str, PreTrainedModel] = {
        DIFF: DiffTransformerForCausalLM(config),
        V2: DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES[size].fields, attention_type="diff_v2")),
        TWIN: DiffTransformerForCausalLM(config.twin()),
        TWIN_SDPA: DiffTransformerForCausalLM(on_sdpa),
        LLAMA: LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa")),
    }
    for name in DIFFLLAMAS if peers else ():
        models[name] = DiffLlamaForCausalLM(DiffLlamaConfig(**shape, attn_implementation=name.split()[1]))
    return models


def model_flops(model: PreTrainedModel, rows: int, context: int) -> float:
    """Count the FLOPs of a causal training step: 6 a weight of a matrix and token, and 3 times the forward FLOPs of attention.

    Nothing that is computed again counts (arXiv:2204.02311 appendix B), and half of the pairs are masked.
    """
    config: Any = model.config
    weights = sum(
        x.numel() for x in model.parameters() if x.dim() == 2
    )  # the embedding counts where it is the output layer
    weights -= (not config.tie_word_embeddings) * config.vocab_size * config.hidden_size
    if isinstance(model, DiffTransformerForCausalLM):
        pair = config.head_layout().map_flops_per_pair()
    else:
        pair = 4 * config.num_attention_heads * config.head_dim
    return 6 * weights * rows * context + 3 * config.num_hidden_layers * pair * rows * context * (context + 1) / 2


def generation_steps(settings: Settings) -> list[Step]:
    return [
        Step(f"decoding by whole models, {dtype}", partial(time_generation, dtype, settings))
        for dtype in settings.dtypes or settings.defaults.dtypes
    ]


def time_generation(dtype: Dtype, settings: Settings) -> list[BenchRow]:
    """Time a decoding step of every model with either cache, the models interleaved.

    On the CPU the rows also have the CPU time of all threads, which does not grow while a thread waits for a core.
    """
    models = {name: model.to(settings.device, DTYPES[dtype]) for name, model in build_equal_models().items()}
    kinds: tuple[CacheKind, ...] = ("static", "dynamic")
    rows = []
    for kind in kinds:
        cpu_seconds: dict[str, list[float]] = {name: [] for name in models}
        calls = {
            name: _with_cpu_time(next_token_work(model, CACHED_TOKENS, kind), cpu_seconds[name])
            for name, model in models.items()
        }
        rounds = min(settings.repeats, SPARE_TOKENS - 1)
        timings = time_interleaved(calls, rounds=rounds, budget_seconds=settings.seconds, device=settings.device)
        shape = {"cache": f"{kind} cache", "cached_tokens": CACHED_TOKENS}
        row = partial(BenchRow, part="generation", work="next token", dtype=dtype, shape=shape)
        for name, timing in timings.items():
            figures = {"parameters": float(models[name].num_parameters())}
            if settings.device == "cpu":
                figures["cpu_seconds"] = statistics.median(cpu_seconds[name][-timing.rounds :])
            rows.append(row(implementation=name, timing=timing, figures=figures))
    return rows


def build_equal_models() -> dict[str, PreTrainedModel]:
    """Build models in fp32, with the same weights in DIFF and DiffLlama, and DIFF's twin."""
    torch.manual_seed(0)
    theirs = {
        name: DiffLlamaForCausalLM(DiffLlamaConfig(**MODEL, attn_implementation=name.split()[1])) for name in DIFFLLAMAS
    }
    first, other = theirs.values()
    other.load_state_dict(first.state_dict())
    config = DiffTransformerConfig(**MODEL, attention_type="diff", head_norm="plain", initialization="normal")
    config.rms_norm_eps = config.head_norm_eps = first.config.rms_norm_eps
    ours = DiffTransformerForCausalLM(config)
    ours.load_state_dict({name: _our_order(name, tensor) for name, tensor in first.state_dict().items()})
    return {DIFF: ours, **theirs, TRANSFORMER: DiffTransformerForCausalLM(config.twin())}


def _our_order(name: str, tensor: Tensor) -> Tensor:
    """Reorder heads: DiffLlama pairs head i with head i + H, we pair neighbours. The columns of o_proj agree."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return tensor
    return tensor.view(2, -1, MODEL["head_dim"], tensor.shape[1]).transpose(0, 1).reshape(tensor.shape)


def _with_cpu_time(call: Callable[[], object], seconds: list[float]) -> Callable[[], None]:
    """Return the call, which then appends its CPU time to `seconds`."""

    def timed() -> None:
        begun = time.process_time()
        call()
        seconds.append(time.process_time() - begun)

    return timed

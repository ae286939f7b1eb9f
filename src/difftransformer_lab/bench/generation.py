"""Decoding by whole models: DIFF, transformers' DiffLlama with the same weights, and the same-size Transformer.

A step is one forward pass of one token behind a filled cache, logits included, without the work of `generate` around it.

A step must read every weight once and every cached key and value once. `MODEL` has 50.7M weights (203 MB in fp32; the
embedding is also the output layer) and caches 2 x 8 x 64 numbers a layer and token (201 MB at 4,096 tokens) in each model.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, PreTrainedModel

from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.model.weights import DTYPES

from ..results import BenchRow, Dtype
from .model_work import SPARE_TOKENS, CacheKind, next_token_work
from .settings import Settings, Step
from .timing import time_interleaved

OURS, TWIN = "DIFF", "Transformer"
THEIRS = ("DiffLlama sdpa", "DiffLlama eager")
# With heads of width 64 a model 576 wide would have 9 heads, which neither DiffLlama nor DIFF can pair. 8 heads cache fewer
# keys and values, and copying those is where DiffLlama spends its time.
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CACHED_TOKENS = 4096


def generation_steps(settings: Settings) -> list[Step]:
    return [
        Step(f"decoding by whole models, {dtype}", partial(time_generation, dtype, settings))
        for dtype in settings.dtypes or settings.defaults.dtypes
    ]


def time_generation(dtype: Dtype, settings: Settings) -> list[BenchRow]:
    """Time a decoding step of every model with either cache, interleaved.

    On the CPU the rows also have the CPU time of all threads, which does not grow while a thread waits for a core.
    """
    device = settings.device
    models = {name: model.to(device, DTYPES[dtype]).eval() for name, model in build_models().items()}
    kinds: tuple[CacheKind, ...] = ("static", "dynamic")
    candidates = [(name, kind) for kind in kinds for name in models]
    cpu_seconds: dict[str, list[float]] = {f"{name}, {kind}": [] for name, kind in candidates}
    timings = time_interleaved(
        {
            f"{name}, {kind}": _with_cpu_time(
                next_token_work(models[name], CACHED_TOKENS, kind), cpu_seconds[f"{name}, {kind}"]
            )
            for name, kind in candidates
        },
        rounds=min(settings.repeats, SPARE_TOKENS - 1),
        budget_seconds=settings.seconds,
        device=device,
    )
    rows = []
    for name, kind in candidates:
        timing, cpu = timings[f"{name}, {kind}"], cpu_seconds[f"{name}, {kind}"]
        figures = {"cpu_seconds": statistics.median(cpu[-timing.rounds :])} if device == "cpu" else {}
        rows.append(
            BenchRow(
                part="generation",
                work="next token",
                dtype=dtype,
                shape={"cache": f"{kind} cache", "cached_tokens": CACHED_TOKENS},
                implementation=name,
                timing=timing,
                figures=figures | {"parameters": float(models[name].num_parameters())},
            )
        )
    return rows


def build_models() -> Mapping[str, PreTrainedModel]:
    """Build the models in fp32, with the same weights in DIFF and DiffLlama."""
    torch.manual_seed(0)
    theirs = {
        name: DiffLlamaForCausalLM(DiffLlamaConfig(**MODEL, attn_implementation=name.split()[1])) for name in THEIRS
    }
    first, *others = theirs.values()
    for other in others:
        other.load_state_dict(first.state_dict())
    config = DiffTransformerConfig(**MODEL, attention_type="diff", head_norm="plain", initialization="normal")
    config.rms_norm_eps = config.head_norm_eps = first.config.rms_norm_eps
    ours = DiffTransformerForCausalLM(config)
    ours.load_state_dict({name: _our_order(name, tensor) for name, tensor in first.state_dict().items()})
    return {OURS: ours, **theirs, TWIN: DiffTransformerForCausalLM(config.twin())}


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

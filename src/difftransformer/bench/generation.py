"""Decoding of whole models: DIFF, transformers' DiffLlama with the same weights, and the same-size Transformer.

A step is one forward pass of one token behind a filled cache, logits included, without `generate`'s work around it.

The least that a step moves is every weight once and every cached key and value once. `MODEL` has 50.7M weights (203 MB in
fp32; the embedding is the output layer) and caches 2 x 8 x 64 numbers a layer and token (201 MB at 4,096 tokens), all equal.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.dtypes import DTYPES
from ..results import Dtype, GenerationTiming
from .timing import time_interleaved

CacheKind = Literal["static", "dynamic"]

OURS, TWIN = "DIFF", "Transformer"
THEIRS = ("DiffLlama sdpa", "DiffLlama eager")
# Heads of 64 in a model 576 wide would be 9, an odd number, which neither DiffLlama nor DIFF can pair; 8 is the even number
# below, with fewer bytes of keys and values, on whose copies DiffLlama spends its time.
MODEL: dict[str, Any] = {
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
CACHED_TOKENS = 4096  # when decoding starts
SPARE_TOKENS = 256  # of the static cache, for the rounds
SAME_LOGITS = 1e-4  # largest difference of DIFF and DiffLlama on one row, over the largest logit


class Candidate(NamedTuple):
    """What is timed: a model and the kind of its cache."""

    implementation: str
    cache: CacheKind


def time_generation(dtype: Dtype, *, device: str = "cpu", rounds: int, budget_seconds: float) -> list[GenerationTiming]:
    """Time a decoding step of every model with either cache, interleaved.

    Args:
        dtype: Of weights, activations and caches.
        device: "cpu" or "cuda".
        rounds: Timed rounds at most.
        budget_seconds: As in `time_interleaved`.

    Returns:
        A timing of each, with its token rate over those with a static cache: of the faster DiffLlama and of the Transformer.
    """
    models = {name: model.to(device, DTYPES[dtype]).eval() for name, model in build_models().items()}
    candidates = {
        f"{name}, {kind}": Candidate(name, kind)
        for kind in ("static", "dynamic")  # type: CacheKind
        for name in models
    }
    cpu_seconds: dict[str, list[float]] = {key: [] for key in candidates}
    timings = time_interleaved(
        {
            key: _clocked(_step(models[candidate.implementation], candidate.cache), cpu_seconds[key])
            for key, candidate in candidates.items()
        },
        rounds=min(rounds, SPARE_TOKENS - 1),
        budget_seconds=budget_seconds,
        device=device,
    )
    diffllama = min(timings[f"{name}, static"].median_seconds for name in THEIRS)
    twin = timings[f"{TWIN}, static"].median_seconds
    return [
        GenerationTiming(
            **dataclasses.asdict(timing),
            dtype=dtype,
            cached_tokens=CACHED_TOKENS,
            parameters=models[candidates[key].implementation].num_parameters(),
            implementation=candidates[key].implementation,
            cache=candidates[key].cache,
            tokens_per_second=1 / timing.median_seconds,
            rate_over_diffllama=diffllama / timing.median_seconds,
            rate_over_twin=twin / timing.median_seconds,
            median_cpu_seconds=statistics.median(cpu_seconds[key][-timing.rounds :]) if device == "cpu" else None,
        )
        for key, timing in timings.items()
    ]


def build_models() -> Mapping[str, PreTrainedModel]:
    """The models in fp32, DIFF and DiffLlama with the same weights, which their logits on a short row confirm."""
    torch.manual_seed(0)
    theirs = {
        name: DiffLlamaForCausalLM(DiffLlamaConfig(**MODEL, attn_implementation=name.split()[1])) for name in THEIRS
    }
    first, *others = theirs.values()
    for other in others:
        other.load_state_dict(first.state_dict())
    config = DiffTransformerConfig(**MODEL, attention_type="diff", head_norm="plain")
    config.rms_norm_eps = config.head_norm_eps = first.config.rms_norm_eps
    ours = DiffTransformerForCausalLM(config)
    ours.load_state_dict({name: _our_order(name, tensor) for name, tensor in first.state_dict().items()})
    with torch.inference_mode():
        ids = torch.arange(16)[None]
        expected, logits = first.eval()(ids).logits, ours.eval()(ids).logits
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    if error > SAME_LOGITS:
        raise AssertionError(f"DIFF with DiffLlama's weights differs from it by {error:.1e} of the largest logit")
    return {OURS: ours, **theirs, TWIN: DiffTransformerForCausalLM(config.twin())}


def _our_order(name: str, tensor: Tensor) -> Tensor:
    """DiffLlama keeps what is paired in two halves of the heads, ours side by side; o_proj's columns have one order."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return tensor
    return tensor.view(2, -1, MODEL["head_dim"], tensor.shape[1]).transpose(0, 1).reshape(tensor.shape)


def _clocked(call: Callable[[], Tensor], seconds: list[float]) -> Callable[[], None]:
    """The call, which notes its CPU time too."""

    def clocked() -> None:
        begun = time.process_time()
        call()
        seconds.append(time.process_time() - begun)

    return clocked


def _step(model: PreTrainedModel, kind: CacheKind) -> Callable[[], Tensor]:
    """One token more at every call."""
    cache: Cache = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(model.config, max_cache_len=CACHED_TOKENS + SPARE_TOKENS)
    heads, head_dim = MODEL["num_key_value_heads"], MODEL["head_dim"]
    if isinstance(model, DiffTransformerForCausalLM):
        layout = model.config.head_layout()
        heads, head_dim = layout.num_key_value_heads, layout.key_width
    for index in range(MODEL["num_hidden_layers"]):
        key, value = torch.randn(2, 1, heads, CACHED_TOKENS, head_dim, device=model.device, dtype=model.dtype)
        cache.update(key, value, index)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def call() -> Tensor:
        return model(token, past_key_values=cache).logits

    return call

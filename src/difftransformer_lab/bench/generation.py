"""Decoding by whole models: DIFF, transformers' DiffLlama with the same weights, and the same-size Transformer.

A step is one forward pass of one token behind a filled cache, logits included, without the work of `generate` around it.

A step must read every weight once and every cached key and value once. `MODEL` has 50.7M weights (203 MB in fp32; the
embedding is also the output layer) and caches 2 x 8 x 64 numbers a layer and token (201 MB at 4,096 tokens) in each model.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, PreTrainedModel

from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.model.weights import DTYPES

from ..results import Dtype, GenerationTiming
from .timing import time_interleaved
from .work import CACHED_TOKENS, SMALL_MODEL, SPARE_TOKENS, CacheKind, next_token_work

OURS, TWIN = "DIFF", "Transformer"
THEIRS = ("DiffLlama sdpa", "DiffLlama eager")
# With heads of width 64 a model 576 wide would have 9 heads, which neither DiffLlama nor DIFF can pair. 8 heads cache fewer
# keys and values, and copying those is where DiffLlama spends its time.
MODEL = SMALL_MODEL | {"hidden_size": 576, "intermediate_size": 1536, "tie_word_embeddings": True}


def time_generation(dtype: Dtype, *, device: str = "cpu", rounds: int, budget_seconds: float) -> list[GenerationTiming]:
    """Time a decoding step of every model with either cache, interleaved.

    Args:
        dtype: Data type of weights, activations and caches.
        device: "cpu" or "cuda".
        rounds: Largest number of timed rounds.
        budget_seconds: As in `time_interleaved`.

    Returns:
        A timing for each model and cache, with its token rate over two rates with a static cache: that of the faster
        DiffLlama and that of the Transformer.
    """
    models = {name: model.to(device, DTYPES[dtype]).eval() for name, model in build_models().items()}
    kinds: tuple[CacheKind, ...] = ("static", "dynamic")
    candidates = {f"{name}, {kind}": (name, kind) for kind in kinds for name in models}
    cpu_seconds: dict[str, list[float]] = {key: [] for key in candidates}
    timings = time_interleaved(
        {
            key: _with_cpu_time(next_token_work(models[name], CACHED_TOKENS, kind), cpu_seconds[key])
            for key, (name, kind) in candidates.items()
        },
        rounds=min(rounds, SPARE_TOKENS - 1),
        budget_seconds=budget_seconds,
        device=device,
    )
    diffllama = min(timings[f"{name}, static"].median_seconds for name in THEIRS)
    twin = timings[f"{TWIN}, static"].median_seconds
    return [
        GenerationTiming(
            **vars(timings[key]),
            dtype=dtype,
            cached_tokens=CACHED_TOKENS,
            parameters=models[name].num_parameters(),
            implementation=name,
            cache=kind,
            tokens_per_second=1 / timings[key].median_seconds,
            rate_over_diffllama=diffllama / timings[key].median_seconds,
            rate_over_twin=twin / timings[key].median_seconds,
            median_cpu_seconds=statistics.median(cpu_seconds[key][-timings[key].rounds :]) if device == "cpu" else None,
        )
        for key, (name, kind) in candidates.items()
    ]


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

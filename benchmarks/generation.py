"""Decoding behind a long cache by DIFF, DiffLlama with the same weights, and DIFF's twin.

A step is one forward pass of one token, logits included, without the work of `generate` around it. It must read every weight
and every cached key and value once: `MODEL` has 50.7M weights (203 MB in fp32; the embedding is also the output layer) and
caches 2 x 8 x 64 numbers a layer and token (201 MB at 4,096 tokens) in each model.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from script import Steps, run
from torch import Tensor
from transformers import Cache, DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.model.weights import DTYPES
from difftransformer_lab.bench.models import SMOLLM2
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.bench.timing import time_rows
from difftransformer_lab.results import BenchRow

DIFFLLAMAS = ("DiffLlama sdpa", "DiffLlama eager")
# As many heads of keys and values as of queries: copying those is where DiffLlama spends its time.
MODEL = SMOLLM2 | {"vocab_size": 8192, "num_hidden_layers": 12, "num_key_value_heads": 8}
MODEL |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
CACHED_TOKENS = 4096
SPARE_TOKENS = 256  # of a static cache, for the timed rounds
CacheKind = Literal["static", "dynamic"]


def steps(settings: Settings) -> Steps:
    """List the data types."""
    return {f"decoding by whole models, {dtype}": partial(measure, dtype, settings) for dtype in settings.dtypes or ()}


def measure(dtype: str, settings: Settings) -> list[BenchRow]:
    """Time a decoding step of every model with either cache, the models interleaved.

    On the CPU the rows also have the CPU time of all threads, which does not grow while a thread waits for a core.
    """
    models = {name: model.to(settings.device, DTYPES[dtype]) for name, model in build_equal_models().items()}
    rows = []
    for kind in ("static", "dynamic"):
        cpu_seconds: dict[str, list[float]] = {name: [] for name in models}
        builders = {
            name: partial(with_cpu_time, partial(next_token_work, model, CACHED_TOKENS, kind), cpu_seconds[name])
            for name, model in models.items()
        }
        shape = {"cache": f"{kind} cache", "cached_tokens": CACHED_TOKENS}
        row = partial(BenchRow, part="generation", work="next token", dtype=dtype, shape=shape)
        for one in time_rows(builders, replace(settings, repeats=min(settings.repeats, SPARE_TOKENS - 1)), row):
            figures = {}
            if settings.device == "cpu":
                figures = {"cpu_seconds": statistics.median(cpu_seconds[one.implementation][-one.timing.rounds :])}
            rows.append(replace(one, figures=figures))
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
    ours.load_state_dict({name: our_order(name, tensor) for name, tensor in first.state_dict().items()})
    return {"DIFF": ours, **theirs, "Transformer": DiffTransformerForCausalLM(config.twin())}


def our_order(name: str, tensor: Tensor) -> Tensor:
    """Reorder heads: DiffLlama pairs head i with head i + H, we pair neighbours. The columns of o_proj agree."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return tensor
    return tensor.view(2, -1, MODEL["head_dim"], tensor.shape[1]).transpose(0, 1).reshape(tensor.shape)


def next_token_work(model: PreTrainedModel, cached_tokens: int, kind: CacheKind) -> Callable[[], Tensor]:
    """Build a call that decodes one token and returns its logits.

    At first the cache holds random keys and values of `cached_tokens` tokens; every call adds one token. A static cache has
    room for SPARE_TOKENS calls.
    """
    model.eval()
    cache: Cache = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(model.config, max_cache_len=cached_tokens + SPARE_TOKENS)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    if isinstance(model, DiffTransformerForCausalLM):
        layout = model.config.head_layout()
        heads, width = layout.num_key_value_heads, layout.key_width
    for index in range(model.config.num_hidden_layers):
        key, value = torch.randn(2, 1, heads, cached_tokens, width, device=model.device, dtype=model.dtype)
        cache.update(key, value, index)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def call() -> Tensor:
        return model(token, past_key_values=cache).logits

    return call


def with_cpu_time(build: Callable[[], Callable[[], object]], seconds: list[float]) -> Callable[[], None]:
    """Build a call that also appends its CPU time to `seconds`."""
    call = build()

    def timed() -> None:
        begun = time.process_time()
        call()
        seconds.append(time.process_time() - begun)

    return timed


if __name__ == "__main__":
    run(steps, __doc__)

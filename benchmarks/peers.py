"""transformers' DiffLlama beside our attention and models, and the deterministic backward pass of our kernel on a GPU.

DiffLlama's attention includes the headwise norm, so it is compared with our kernel with the norm fused, `normed`.
"""

from collections.abc import Callable
from functools import partial

import torch
from script import Steps, run
from torch import Tensor, nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM
from transformers.models.diffllama import modeling_diffllama

from difftransformer.ops import normed_differential_attention
from difftransformer.ops.problem import Restrictions, allowed_keys
from difftransformer_lab.bench.attention import (
    KERNELS,
    LAMBDA,
    AttentionShape,
    attention_call,
    attention_rows,
    attention_shapes,
    by_head,
    draw,
    timed_call,
)
from difftransformer_lab.bench.models import DEFAULT_SIZES, SHARED_FIELDS, WORKS, build_models, time_models
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.results import BenchRow

# Whether each attn_implementation of transformers makes n x n maps.
ATTN_IMPLEMENTATIONS = {"sdpa": False, "eager": True}
LONGEST_MAPS = 4096
"""In tokens; longer maps take gigabytes."""


def steps(settings: Settings) -> Steps:
    """List the shapes of attention and the works of models."""
    shapes = [shape for shape in attention_shapes(settings) if shape.mode != "decode"]
    found = {f"attention, {shape}": partial(time_peers, shape, settings) for shape in shapes}
    return found | {
        f"{work} of {size}, {dtype}": partial(time_all_models, size, dtype, work, settings)
        for work in WORKS
        for size in settings.sizes or DEFAULT_SIZES[settings.device]
        for dtype in settings.dtypes or ()
    }


def time_peers(shape: AttentionShape, settings: Settings) -> list[BenchRow]:
    """Time our kernel, alone, with the norm and deterministic, and DiffLlama's attention."""
    kernel, data = KERNELS[settings.device], draw(shape, settings.device)
    builders: dict[str, Callable[[], Callable[[], Tensor]]] = {
        name: partial(attention_call, name, shape, data) for name in ("torch sdpa", f"diff {kernel}")
    }
    if settings.device != "cpu" and shape.has_backward:  # on the CPU the order of sums is always the same
        builders[f"diff {kernel} deterministic"] = partial(deterministic_call, f"diff {kernel}", shape, data)
    builders[f"normed {kernel}"] = partial(normed_call, kernel, shape, data)
    for name, makes_maps in ATTN_IMPLEMENTATIONS.items():
        if not makes_maps or shape.length_tokens <= LONGEST_MAPS:
            builders[f"DiffLlama {name}"] = partial(diffllama_call, name, shape, data)
    return attention_rows("attention", shape, settings, builders)


def normed_call(backend: str, shape: AttentionShape, data: list[Tensor]) -> Callable[[], Tensor]:
    """Build a call of our op with the headwise norm, without gain as in DiffLlama."""
    inputs = [*by_head(data, shape, maps=2), torch.full((shape.heads,), LAMBDA, device=data[0].device)]
    norm = {"weight": None, "eps": 1e-5, "factor": 1 - LAMBDA}
    return timed_call(
        partial(normed_differential_attention, *inputs, **norm, is_causal=True, backend=backend), inputs, shape
    )


def deterministic_call(implementation: str, shape: AttentionShape, data: list[Tensor]) -> Callable[[], Tensor]:
    """Build a call under torch.use_deterministic_algorithms, which would also fill new tensors with NaN."""
    call, memory = attention_call(implementation, shape, data), torch.utils.deterministic

    def deterministic() -> Tensor:
        memory.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)
            memory.fill_uninitialized_memory = True

    return deterministic


def diffllama_call(attn_implementation: str, shape: AttentionShape, data: list[Tensor]) -> Callable[[], Tensor]:
    """Build a call of DiffLlama's attention."""
    width = 2 * shape.heads * shape.head_dim
    inputs = [x.detach().view(shape.batch, -1, width) for x in data]
    core = DiffLlamaCore(*inputs, head_dim=shape.head_dim, attn_implementation=attn_implementation)
    return timed_call(core, [*inputs, *core.parameters()], shape)


class DiffLlamaCore:
    """The causal forward pass of transformers' `DiffLlamaAttention`, given what its projections would return.

    It repeats the halves of V, calls ordinary attention on each, subtracts and normalises. Differential head i has the maps
    i and H + i, and the value [V_i; V_(H + i)].

    Args:
        query: Output of the query projection, (B, T, 2 H D).
        key: Output of the key projection, (B, T, 2 H D).
        value: Output of the value projection, (B, T, 2 H D).
        head_dim: Width D of a map.
        attn_implementation: A name in `ATTN_IMPLEMENTATIONS`.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, *, head_dim: int, attn_implementation: str) -> None:
        length, width = query.shape[1:]
        heads = width // head_dim
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
        config = DiffLlamaConfig(**sizes, rms_norm_eps=1e-5)
        config._attn_implementation = attn_implementation
        self.layer = modeling_diffllama.DiffLlamaAttention(config, layer_idx=0).to(query.device, query.dtype)
        for name, projected in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
            delattr(self.layer, name)
            setattr(self.layer, name, lambda _, projected=projected: projected)
        self.layer.o_proj = nn.Identity()
        self.hidden = query  # the layer reads only its leading dimensions
        # Their model makes the mask once for all layers, and makes none for SDPA.
        allowed = allowed_keys(Restrictions(is_causal=True), length, length, query.device)
        self.mask = None
        if ATTN_IMPLEMENTATIONS[attn_implementation] and allowed is not None:
            self.mask = torch.zeros(1, 1, length, length, device=query.device, dtype=query.dtype)
            self.mask.masked_fill_(~allowed, torch.finfo(query.dtype).min)

    def parameters(self) -> list[nn.Parameter]:
        """The four lambda vectors, (D,) each."""
        return list(self.layer.parameters())

    def __call__(self) -> Tensor:
        """Compute (1 - lambda_init) RMSNorm((A1 - lambda A2) V), (B, T, 2 H D)."""
        rotate = modeling_diffllama.apply_rotary_pos_emb
        modeling_diffllama.apply_rotary_pos_emb = lambda query, key, cos, sin: (query, key)
        try:
            return self.layer(self.hidden, (None, None), attention_mask=self.mask)[0]
        finally:
            modeling_diffllama.apply_rotary_pos_emb = rotate


def time_all_models(size: str, dtype: str, work: str, settings: Settings) -> list[BenchRow]:
    """Time DiffLlama with each of its kernels in turn with the models of `difftransformer bench models`."""
    return time_models(size, dtype, work, settings, build_all_models(size))


def build_all_models(size: str) -> dict[str, nn.Module]:
    """Build the models of one shape, DiffLlama among them."""
    models = build_models(size)
    shape = {name: getattr(models["DIFF"].config, name) for name in SHARED_FIELDS}
    for name in ATTN_IMPLEMENTATIONS:
        models[f"DiffLlama {name}"] = DiffLlamaForCausalLM(DiffLlamaConfig(**shape, attn_implementation=name))
    return models


if __name__ == "__main__":
    run(steps, __doc__)

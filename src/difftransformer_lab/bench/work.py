"""The calls that benchmarks time, and whose memory they measure."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from difftransformer.model import DiffTransformerForCausalLM
from difftransformer.model.nll import loss_chunk, summed_next_token_nll
from difftransformer.model.weights import DTYPES
from difftransformer.ops import differential_attention, normed_differential_attention, softmax_attention

from ..results import AttentionShape, Dtype
from .diffllama import DiffLlamaCore
from .timing import Prepared

LAMBDA = 0.8  # close to lambda in most layers, at the start and after training (arXiv:2410.05258)
DETERMINISTIC = " deterministic"  # suffix of an implementation's name
SPARE_TOKENS = 256  # of a static cache, for the timed rounds

CACHED_TOKENS = 4096  # in the cache when the decoding of `SMALL_MODEL` starts
# Fields of the models that are compared with transformers' DiffLlama, which needs an even number of heads.
SMALL_MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
CacheKind = Literal["static", "dynamic"]
Data = tuple[Tensor, Tensor, Tensor]  # the numbers of query, key and value, each in one dimension
Attend = tuple[
    Callable[[], Tensor], list[Tensor]
]  # a function that computes the output, and the tensors with gradients
Work = Callable[[], Tensor] | Prepared[Tensor]


def attention_work(implementation: str, shape: AttentionShape, device: str = "cpu", data: Data | None = None) -> Work:
    """Return one causal call; in mode "forward+backward" it computes the gradients of query, key, value and lambda.

    Args:
        implementation: "diff BACKEND", our op with H heads of width 2 D and a lambda for each; "normed BACKEND", the same
            with the headwise norm, without gain as in DiffLlama; "softmax BACKEND", our op for the same-size Transformer
            with 2 H heads of width D; "torch sdpa" or "torch cudnn", PyTorch's function for the same, see `pinned`;
            "DiffLlama sdpa" or "DiffLlama eager", see `DiffLlamaCore`. The suffix " deterministic" runs the call under
            torch.use_deterministic_algorithms.
        shape: The attention call.
        device: "cpu" or "cuda".
        data: Result of `draw`, to be shared between implementations; None draws new numbers.

    Returns:
        A function that does the work and returns the output; in mode "backward" a `Prepared`, whose first part is the
        forward pass.
    """
    family, _, name = implementation.removesuffix(DETERMINISTIC).partition(" ")
    guard = deterministically if implementation.endswith(DETERMINISTIC) else contextlib.nullcontext
    attend, inputs = _FAMILIES[family](name, shape, data or draw(shape, device))
    for tensor in inputs:
        tensor.requires_grad_(shape.has_backward)
    grad = torch.randn_like(inputs[2]) if shape.has_backward else None  # outputs have the value's shape

    def forward() -> Tensor:
        with torch.set_grad_enabled(shape.has_backward), guard():
            return attend()

    def backward(out: Tensor) -> Tensor:
        with guard():
            torch.autograd.grad(out, inputs, grad)
        return out

    if shape.mode == "backward":
        return Prepared(forward, backward)
    return (lambda: backward(forward())) if shape.has_backward else forward


def draw(shape: AttentionShape, device: str) -> Data:
    """Draw normal numbers for query, key and value; H heads of 2 D and 2 H heads of D have equally many."""
    numbers = 2 * shape.batch * shape.heads * shape.head_dim
    lengths = (shape.queries_tokens, shape.length_tokens, shape.length_tokens)
    query, key, value = (torch.randn(numbers * n, device=device).to(DTYPES[shape.dtype]) for n in lengths)
    return query * (shape.score_factor or 1), key, value


def pinned(name: str, dtype: Dtype, device: str) -> contextlib.AbstractContextManager[None]:
    """Restrict PyTorch's attention on a GPU to one kernel; on the CPU there is nothing to choose.

    "sdpa" means the flash kernel, or in fp32, which that lacks, the memory-efficient one. "cudnn" means cuDNN's.
    """
    if device == "cpu":
        return contextlib.nullcontext()
    flash = SDPBackend.EFFICIENT_ATTENTION if dtype == "fp32" else SDPBackend.FLASH_ATTENTION
    return sdpa_kernel({"sdpa": flash, "cudnn": SDPBackend.CUDNN_ATTENTION}[name])


@contextlib.contextmanager
def deterministically() -> Iterator[None]:
    """Request deterministic algorithms, but do not fill new memory, which the same switch turns on and would be timed."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = deterministic  # the type stubs lack this module's switch
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _diff(backend: str, shape: AttentionShape, data: Data, is_normed: bool = False) -> Attend:
    query, key, value = _by_head(data, shape, maps=2)
    lam = torch.full((shape.heads,), LAMBDA, device=query.device)
    attend: Callable[..., Tensor] = differential_attention
    if is_normed:
        attend = partial(normed_differential_attention, weight=None, eps=1e-5, factor=1 - LAMBDA)
    return partial(attend, query, key, value, lam, is_causal=True, backend=backend), [query, key, value, lam]


def _softmax(backend: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=1)
    return partial(softmax_attention, query, key, value, is_causal=True, backend=backend), [query, key, value]


def _torch(name: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=1)
    is_causal = shape.mode != "decode"  # PyTorch aligns a causal mask top-left: one query would see one key

    def attend() -> Tensor:
        with pinned(name, shape.dtype, query.device.type):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    return attend, [query, key, value]


def _diffllama(attn_implementation: str, shape: AttentionShape, data: Data) -> Attend:
    width = 2 * shape.heads * shape.head_dim
    query, key, value = (x.detach().view(shape.batch, -1, width) for x in data)
    core = DiffLlamaCore(query, key, value, head_dim=shape.head_dim, attn_implementation=attn_implementation)
    return core, [query, key, value, *core.parameters()]


_FAMILIES: dict[str, Callable[[str, AttentionShape, Data], Attend]] = {
    "diff": _diff,
    "normed": partial(_diff, is_normed=True),
    "softmax": _softmax,
    "torch": _torch,
    "DiffLlama": _diffllama,
}


def _by_head(data: Data, shape: AttentionShape, maps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (B, heads, T, width), key and value (B, heads, S, width): H heads of 2 D for two maps, else 2 H of D."""
    heads, width = 2 * shape.heads // maps, maps * shape.head_dim
    query, key, value = (x.detach().view(shape.batch, heads, -1, width) for x in data)
    return query, key, value


def training_work(model: PreTrainedModel, rows: int, context: int, dtype: str = "fp32") -> Callable[[], None]:
    """Return a training step with AdamW on `rows` rows of `context` random tokens; "bf16" and "fp16" mean autocast.

    The loss is that of the training loop, in chunks where a model can and its logits are many.
    """
    model.train()
    device = model.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (rows, context + 1), device=device)
    if hasattr(model, "loss_chunk_tokens"):
        model.loss_chunk_tokens = loss_chunk(rows * context, model.config.vocab_size, device)

    def step() -> None:
        with torch.autocast(device, DTYPES[dtype], enabled=dtype != "fp32"):
            loss = summed_next_token_nll(model, ids[:, :-1], ids[:, 1:]) / (rows * context)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill_work(model: PreTrainedModel, rows: int, context: int) -> Callable[[], None]:
    """Return a call that reads `rows` prompts of `context` tokens into a cache."""
    ids = torch.randint(model.config.vocab_size, (rows, context), device=model.device)
    model.eval()

    @torch.inference_mode()
    def call() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return call


def decode_work(model: PreTrainedModel, rows: int, context: int, tokens: int) -> Callable[[], None]:
    """Return a call that decodes `tokens` tokens one by one after `rows` prompts of `context` tokens."""
    ids = torch.randint(model.config.vocab_size, (rows, context), device=model.device)
    model.eval()
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def call() -> None:
        for _ in range(tokens):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-tokens)

    return call


def next_token_work(model: PreTrainedModel, cached_tokens: int, kind: CacheKind) -> Callable[[], Tensor]:
    """Return a call that decodes one token and returns its logits.

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

"""`difftransformer bench`: attention and a training step of DIFF against the same-size Transformer, in one run."""

from collections.abc import Callable

from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..results import MemoryPoint, Timing
from .memory import peak_attention_bytes
from .timing import time_interleaved
from .work import attention_work, training_work

# (length in tokens, differential heads): shapes that two cores finish in a minute.
SHAPES = ((256, 8), (512, 8), (2048, 4))
HEAD_DIM = 64
MEMORY_LENGTHS = (2048, 4096, 8192)
MEMORY_HEADS = 2
DIFF_BACKENDS = ("reference", "chunked", "sdpa")
QUADRATIC_BACKENDS_UP_TO = 1024
TRAINING_FIELDS = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
TRAINING_ROWS, TRAINING_CONTEXT = 8, 256


def bench_attention(
    *, repeats: int, dtypes: tuple[str, ...] = ("fp32", "bf16"), say: Callable[[str], None] = lambda text: None
) -> list[Timing]:
    """Time of every backend over the Transformer's attention (PyTorch's fused kernel, 2 H heads), causal, batch 1.

    Args:
        repeats: Timed rounds of each shape.
        dtypes: Among "fp32" and "bf16".
        say: Told what is being timed.
    """
    timings: list[Timing] = []
    for dtype in dtypes:
        for length, heads in SHAPES:
            for backward in (False, True):
                where = f"{dtype} n={length} H={heads} d={HEAD_DIM} {'forward+backward' if backward else 'forward'}"
                say(where)
                names = [b for b in DIFF_BACKENDS if b != "reference" or length <= QUADRATIC_BACKENDS_UP_TO]
                work = {
                    f"{where}: diff {name}": attention_work(
                        "diff", name, heads, length, HEAD_DIM, dtype, backward=backward
                    )
                    for name in names
                }
                twin = f"{where}: softmax sdpa"
                work[twin] = attention_work("softmax", "sdpa", heads, length, HEAD_DIM, dtype, backward=backward)
                timings += time_interleaved(work, against=twin, repeats=repeats)
    return timings


def bench_training_step(*, repeats: int, say: Callable[[str], None] = lambda text: None) -> list[Timing]:
    """Time of a training step of a small model over its twin's, in fp32 and under bf16 autocast."""
    timings: list[Timing] = []
    for dtype in ("fp32", "bf16"):
        say(f"training step, {dtype}")
        work = {}
        for attention_type in ("diff", "softmax"):
            config = DiffTransformerConfig(attention_type=attention_type, **TRAINING_FIELDS)
            model = DiffTransformerForCausalLM(config)
            work[f"{dtype} training step: {attention_type}"] = training_work(
                model, TRAINING_ROWS, TRAINING_CONTEXT, dtype
            )
        timings += time_interleaved(work, against=f"{dtype} training step: softmax", repeats=repeats)
    return timings


def bench_memory(*, threads: int, say: Callable[[str], None] = lambda text: None) -> list[MemoryPoint]:
    """Peak memory above the inputs of a forward and backward pass of the chunked backend, by length."""
    points = []
    for length in MEMORY_LENGTHS:
        say(f"peak memory at {length} tokens")
        peak = peak_attention_bytes(
            op="diff",
            backend="chunked",
            heads=MEMORY_HEADS,
            length_tokens=length,
            head_dim=HEAD_DIM,
            dtype="fp32",
            threads=threads,
        )
        points.append(MemoryPoint(name="diff chunked forward+backward", length_tokens=length, peak_bytes=peak))
    return points

"""Memory of a training step by formula: nothing is built.

Weights, gradients and both moments of AdamW are in fp32 and divided as FSDP2 divides them, layer by layer. The embedding and
the output layer form a group of their own, which is gathered in every process during a step; where heads are divided, so is
their vocabulary if the degree divides it. Activations are what autograd keeps of a layer as `model/` writes it.
"""

from dataclasses import dataclass

from ..model import DiffTransformerConfig, count
from ..model.nll import loss_chunk
from .config import ParallelConfig, TrainingConfig

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of one process at the peak of a training step, by part.

    Attributes:
        weights: Its part of the weights in fp32.
        gradients: Its part of the gradients in fp32, if they are complete then.
        optimizer: Its part of AdamW's moments.
        activations: What autograd keeps for the backward pass, or computes again for one layer.
        logits: Logits of a chunk of tokens with their gradient, and the gradients of the output layer.
        buffers: Weights and gradients that are whole for a while, gathered or about to be divided.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(vars(self).values())


def step_bytes(
    config: DiffTransformerConfig, training: TrainingConfig, parallel: ParallelConfig, processes: int = 1
) -> StepBytes:
    """Compute the memory of one process at the peak of a step: in the loss, the last layer's backward pass, or the update.

    Args:
        config: Model configuration.
        training: Training configuration.
        parallel: How processes divide the work.
        processes: Number of processes.

    Raises:
        ConfigError: `parallel` is for another number of processes.
    """
    replicate, shard, context, tensor = parallel.degrees(processes)
    parts = shard * context if shard > 1 else 1  # that share a copy of the weights, heads apart
    root_parts = tensor if config.vocab_size % tensor == 0 else 1
    counts, heads, width = count(config), config.head_layout(), config.hidden_size
    low = 2 if training.precision == "bf16" else FP32
    casts = low if low < FP32 else 0

    head = config.vocab_size * width / root_parts
    root_weights = counts.embedding_parameters * (1 if config.tie_word_embeddings else 2) + width
    layers, root = (counts.parameters - root_weights) / tensor, root_weights / root_parts
    layer, weights = layers / config.num_hidden_layers, layers + root
    own = FP32 * weights / parts
    # Without a sum over processes in the earlier parts of a step, their gradients are kept whole.
    earlier = FP32 * weights if training.accumulation > 1 else 0.0
    gathered = FP32 * root if processes > 1 else casts * layers
    gathered_layers, reduced = (2 * low * layer, (low + FP32) * layer) if processes > 1 else (0.0, 0.0)

    row_tokens = training.batch_tokens // training.accumulation // (replicate * shard)
    tokens = row_tokens // context
    stream = FP32 * width * tokens
    exchanged = heads.query_groups * heads.query_width + heads.cached_values_per_token()
    # Twice the input of a norm and its normalised value; the five projections of each norm's result keep it in low precision.
    shared = 2 * 2 * FP32 * width + (5 * low * width if low < FP32 else 2 * FP32 * width)
    # Queries, keys, values, the heads' outputs with and without their norm, the normalizers, and four widths of SwiGLU.
    out = heads.query_maps * heads.num_heads
    divided = low * (exchanged + out * heads.value_head_dim) + FP32 * out + 4 * low * config.intermediate_size
    if config.qk_norm:  # which keep their input and its normalised value, both wide
        divided += 2 * FP32 * (exchanged - heads.cache_heads * heads.value_width)
    kept, recompute = (shared + divided / tensor) * tokens, training.gradient_checkpointing
    activations = config.num_hidden_layers * (stream if recompute else kept)
    in_layer = (2 * low * config.intermediate_size / tensor + 2 * FP32 * width) * tokens

    chunk = training.loss_chunk_tokens or loss_chunk(tokens, config.vocab_size, "cuda")
    if chunk is None:  # logits, their logarithms and their gradient, and the weight in low precision
        logits = tokens * config.vocab_size * (2 * FP32 + casts) + casts * head
    else:
        logits = min(chunk, tokens) * config.vocab_size / root_parts * (FP32 + casts) + (2 * casts + FP32) * head
    moments: list[dict[str, float]] = [
        {
            "gradients": 0.0,
            "activations": activations + 3 * stream,  # of the last norm
            "logits": logits + 2 * low * width * tokens,
            "buffers": gathered + earlier,
        },
        {
            "gradients": 0.0,
            "activations": activations + (kept if recompute else 0.0) + max(in_layer, reduced - kept),
            "logits": FP32 * head,  # the output layer's gradient
            "buffers": gathered + gathered_layers + earlier,
        },
        {"gradients": own, "activations": 0.0, "logits": 0.0, "buffers": 0.0},
    ]
    return StepBytes(weights=own, optimizer=2 * own, **max(moments, key=lambda moment: sum(moment.values())))

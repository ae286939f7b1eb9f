"""Memory, communication and time of a training run on many GPUs, by formula: nothing is built.

Weights, gradients and both moments of AdamW are in fp32 and divided as FSDP2 divides them, layer by layer. The embedding and
the output layer form a group of their own, which is gathered on every rank during a step; where heads are divided, so is their
vocabulary if the degree divides it. Activations are what autograd keeps of a layer as `model/` writes it.

A step takes as long as its computation with the exchanges of heads and tokens, which computation waits for, or as long as
weights and gradients are sent, which happens meanwhile: whichever is longer.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ConfigError
from ..model import DiffTransformerConfig, count
from ..model.nll import loss_chunk
from .config import TrainingConfig

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks divide a run. The product of the degrees is the number of ranks.

    Attributes:
        replicate: Copies of the weights that see different rows.
        shard: Parts that each copy is divided into; they see different rows too.
        tensor: Parts that heads and MLPs are divided into.
        context: Parts that the tokens of a row are divided into.
        micro_rows: Rows that a rank computes at once.
        accumulation: Parts that its rows of a step are computed in.
        recompute: Whether activations of a layer are computed again in the backward pass.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    micro_rows: int = 1
    accumulation: int = 1
    recompute: bool = False

    @property
    def parts(self) -> int:
        """Number of ranks among which a copy of the weights is divided, heads apart."""
        return self.shard * self.context if self.shard > 1 else 1

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same weights."""
        return self.replicate if self.shard > 1 else self.replicate * self.context

    def root_parts(self, vocab_size: int) -> int:
        """Number of ranks among which the embedding and the output layer are divided as heads are: if it divides them."""
        return self.tensor if vocab_size % self.tensor == 0 else 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.tensor * self.context


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes of one rank at the peak of a step, by part.

    Attributes:
        weights: Its part of the weights in fp32.
        gradients: Its part of the gradients in fp32, if they are complete then.
        optimizer: Its part of the optimizer's state.
        activations: What autograd keeps for the backward pass, or computes again for one layer.
        logits: Logits of a chunk of tokens with their gradient, and the gradients of the output layer.
        buffers: Weights and gradients that are whole for a while, gathered or about to be divided.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of one model in one layout.

    Attributes:
        layout: How ranks divide it.
        rank_bytes: Memory of one rank.
        communicated_bytes: Bytes that a rank sends in a step.
        waiting_seconds: Time of a step's exchanges of heads and tokens.
        sending_seconds: Time in which a step's weights and gradients are sent.
        step_seconds: Time of a step.
    """

    layout: Layout
    rank_bytes: RankBytes
    communicated_bytes: int
    waiting_seconds: float
    sending_seconds: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs and what lies between them.

    Attributes:
        gpus: Number of GPUs.
        gpu_bytes: Bytes that a step may take of a GPU.
        machine_gpus: GPUs of a machine, within which heads and tokens are divided.
        within_bytes: Bytes a second that a GPU sends to others of its machine.
        across_bytes: Bytes a second that a machine sends to others, for each of its GPUs.
    """

    gpus: int
    gpu_bytes: float
    machine_gpus: int = 8
    within_bytes: float = 450e9  # NVLink of an H100, in each direction
    across_bytes: float = 50e9  # a network card of 400 Gbit/s for each GPU

    def seconds(self, sent_bytes: float, ranks: int, stride: int) -> float:
        """Return the time of ring collectives, which leave a machine once however many of its GPUs take part.

        Args:
            sent_bytes: Bytes that a rank sends.
            ranks: Number of ranks in the ring.
            stride: Distance between two of them, in ranks.
        """
        time = sent_bytes / self.within_bytes if stride < self.machine_gpus else 0.0
        if ranks * stride > self.machine_gpus:
            time = max(time, sent_bytes / max(1, self.machine_gpus // stride) / self.across_bytes)
        return time


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the formulas need of a model and its training: numbers of weights, widths and bytes.

    Attributes:
        layer_weights: Weights of a layer.
        root_weights: Weights of embedding, output layer and last norm.
        low: Bytes of a number in matrix products.
    """

    layers: int
    layer_weights: int
    root_weights: int
    width: int
    vocab_size: int
    row_tokens: int
    rows: int
    chunk_tokens: int | None
    low: int
    shared_bytes: int
    divided_bytes: int
    inner_width: int
    exchanged_values: int

    def layer_bytes(self, layout: Layout) -> float:
        """Bytes that autograd keeps of a token in a layer."""
        return self.shared_bytes + self.divided_bytes / layout.tensor


def sizes_of(config: DiffTransformerConfig, training: TrainingConfig) -> Sizes:
    """Collect the sizes of a model whose vocabulary is known."""
    counts = count(config, context_tokens=training.context_tokens)
    low = 2 if training.precision == "bf16" else FP32
    heads, width = config.head_layout(), config.hidden_size
    root = counts.embedding_parameters * (1 if config.tie_word_embeddings else 2) + width
    exchanged = heads.query_groups * heads.query_width + heads.cached_values_per_token()
    out = heads.num_heads * heads.value_head_dim
    maps = heads.query_maps
    # Twice the input of a norm and its normalised value; the five projections of each norm's result keep it in low precision.
    shared = 2 * 2 * FP32 * width + (5 * low * width if low < FP32 else 2 * FP32 * width)
    # Queries, keys, values, the heads' outputs with and without their norm, the normalizers, and four widths of SwiGLU.
    divided = low * (exchanged + maps * out) + FP32 * maps * heads.num_heads + 4 * low * config.intermediate_size
    if config.qk_norm:  # which keep their input and its normalised value, both wide
        divided += 2 * FP32 * (exchanged - heads.cache_heads * heads.value_width)
    return Sizes(
        layers=config.num_hidden_layers,
        layer_weights=(counts.parameters - root) // config.num_hidden_layers,
        root_weights=root,
        width=width,
        vocab_size=config.vocab_size,
        row_tokens=training.context_tokens,
        rows=training.batch_tokens // training.context_tokens,
        chunk_tokens=training.loss_chunk_tokens,
        low=low,
        shared_bytes=shared,
        divided_bytes=divided,
        inner_width=config.intermediate_size,
        exchanged_values=exchanged + out,
    )


def rank_bytes(sizes: Sizes, layout: Layout) -> RankBytes:
    """Compute the memory of one rank at the peak of a step.

    That is in the loss, in the backward pass of the last layer, or in the update.
    """
    root_parts = layout.root_parts(sizes.vocab_size)
    layer, root = sizes.layer_weights / layout.tensor, sizes.root_weights / root_parts
    weights = sizes.layers * layer + root
    own = FP32 * weights / layout.parts
    tokens = layout.micro_rows * sizes.row_tokens // layout.context
    stream = FP32 * sizes.width * tokens
    kept = sizes.layer_bytes(layout) * tokens
    activations = sizes.layers * (stream if layout.recompute else kept)
    casts = sizes.low if sizes.low < FP32 else 0
    # Without a sum over ranks in the earlier parts of a step, their gradients are kept whole.
    earlier = FP32 * weights if layout.accumulation > 1 else 0.0
    gathered = FP32 * root if layout.ranks > 1 else casts * sizes.layers * layer
    gathered_layers, reduced = (2 * sizes.low * layer, (sizes.low + FP32) * layer) if layout.ranks > 1 else (0.0, 0.0)

    head = sizes.vocab_size * sizes.width / root_parts
    chunk = sizes.chunk_tokens or loss_chunk(tokens, sizes.vocab_size, "cuda")
    if chunk is None:  # logits, their logarithms and their gradient, and the weight in low precision
        logits = tokens * sizes.vocab_size * (2 * FP32 + casts) + casts * head
    else:
        logits = min(chunk, tokens) * sizes.vocab_size / root_parts * (FP32 + casts) + (2 * casts + FP32) * head
    in_layer = (2 * sizes.low * sizes.inner_width / layout.tensor + 2 * FP32 * sizes.width) * tokens
    moments: list[dict[str, float]] = [
        {
            "gradients": 0.0,
            "activations": activations + 3 * stream,  # of the last norm
            "logits": logits + 2 * sizes.low * sizes.width * tokens,
            "buffers": gathered + earlier,
        },
        {
            "gradients": 0.0,
            "activations": activations + (kept if layout.recompute else 0.0) + max(in_layer, reduced - kept),
            "logits": FP32 * head,  # the output layer's gradient
            "buffers": gathered + gathered_layers + earlier,
        },
        {"gradients": own, "activations": 0.0, "logits": 0.0, "buffers": 0.0},
    ]
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return RankBytes(
        weights=round(own), optimizer=round(2 * own), **{part: round(count) for part, count in peak.items()}
    )


def sent_bytes(sizes: Sizes, layout: Layout) -> dict[str, float]:
    """Compute the bytes that a rank sends in a step, with ring collectives, by purpose.

    "tensor" adds up what processes with different heads compute, "context" exchanges tokens for heads, "parts" gathers weights
    and adds up and divides their gradients, and "copies" adds up the gradients of copies.
    """
    layers = sizes.layers * sizes.layer_weights / layout.tensor
    root_parts = layout.root_parts(sizes.vocab_size)
    root = sizes.root_weights / root_parts
    tokens = layout.micro_rows * sizes.row_tokens / layout.context * layout.accumulation
    parts, copies = layout.parts, layout.copies
    gathered = layout.accumulation * (2 * sizes.low * layers + FP32 * root) * (parts - 1) / parts
    gradients = FP32 * (layers + root)
    again = 3 if layout.recompute else 2  # forward passes and the backward pass
    stream = 2 * sizes.width * tokens  # numbers that a rank sends, but for its own part, to add up hidden states
    summed = again * 2 * sizes.low * stream * sizes.layers * (layout.tensor - 1) / layout.tensor
    # The embeddings in fp32, and the gradient of what the output layer reads.
    summed += (FP32 + sizes.low) * stream * (root_parts - 1) / root_parts
    exchanged = sizes.low * sizes.exchanged_values / layout.tensor * tokens * sizes.layers
    return {
        "tensor": summed,
        "context": exchanged * again * (layout.context - 1) / layout.context,
        "parts": gathered + gradients * (parts - 1) / parts,
        "copies": 2 * gradients / parts * (copies - 1) / copies,
    }


def make_plan(sizes: Sizes, layout: Layout, cluster: Cluster, *, computing_seconds: float) -> Plan:
    """Plan a run in one layout.

    Args:
        sizes: Sizes of the model and its training.
        layout: How ranks divide the run.
        cluster: The GPUs.
        computing_seconds: Time of a step if nothing is sent.
    """
    sent, inner = sent_bytes(sizes, layout), layout.tensor * layout.context
    waiting = cluster.seconds(sent["tensor"], layout.tensor, 1)
    waiting += cluster.seconds(sent["context"], layout.context, layout.tensor)
    divided = layout.shard * inner if layout.shard > 1 else layout.tensor
    sending = cluster.seconds(sent["parts"], layout.parts, layout.tensor)
    sending += cluster.seconds(sent["copies"], layout.copies, divided)
    return Plan(
        layout=layout,
        rank_bytes=rank_bytes(sizes, layout),
        communicated_bytes=round(sum(sent.values())),
        waiting_seconds=waiting,
        sending_seconds=sending,
        step_seconds=max(computing_seconds + waiting, sending),
    )


def layouts(
    config: DiffTransformerConfig, training: TrainingConfig, gpus: int, machine_gpus: int = 8
) -> Iterator[Layout]:
    """Yield every division of a run among `gpus` ranks: heads stay whole, and each rank has the same number of rows.

    Args:
        config: Model configuration.
        training: Training configuration.
        gpus: Number of ranks.
        machine_gpus: GPUs of a machine, within which heads and tokens are divided.
    """
    heads = config.head_layout()
    rows = training.batch_tokens // training.context_tokens
    for tensor, context in itertools.product(_divisors(gpus), repeat=2):
        inner = tensor * context
        if gpus % inner or inner > machine_gpus or heads.query_groups % inner or heads.cache_heads % inner:
            continue
        if config.intermediate_size % tensor or training.context_tokens % context or rows % (gpus // inner):
            continue
        own_rows = rows // (gpus // inner)
        for shard in _divisors(gpus // inner):
            for micro_rows, recompute in itertools.product(_divisors(own_rows), (False, True)):
                yield Layout(
                    replicate=gpus // inner // shard,
                    shard=shard,
                    tensor=tensor,
                    context=context,
                    micro_rows=micro_rows,
                    accumulation=own_rows // micro_rows,
                    recompute=recompute,
                )


def fitting_plans(
    config: DiffTransformerConfig, training: TrainingConfig, cluster: Cluster, *, computing_seconds: float
) -> list[Plan]:
    """Return the best plan of each (replicate, shard, tensor, context) that fits, the one to take first.

    A layout without recomputing comes before one with it, then a shorter step, then fewer divisions of heads and tokens, then
    fewer bytes sent.

    Args:
        config: Model configuration.
        training: Training configuration.
        cluster: The GPUs.
        computing_seconds: Time of a step if nothing is sent.

    Raises:
        ConfigError: The batch cannot be divided among the GPUs, or no layout fits.
    """
    sizes, gpus, gpu_bytes = sizes_of(config, training), cluster.gpus, cluster.gpu_bytes
    best: dict[tuple[int, int, int, int], tuple[tuple[float, ...], Plan]] = {}
    least = math.inf
    for layout in layouts(config, training, gpus, cluster.machine_gpus):
        plan = make_plan(sizes, layout, cluster, computing_seconds=computing_seconds)
        least = min(least, plan.rank_bytes.total)
        if plan.rank_bytes.total > gpu_bytes:
            continue
        divided = layout.tensor * layout.context
        order = (layout.recompute, plan.step_seconds, divided, plan.communicated_bytes, layout.accumulation)
        degrees = (layout.replicate, layout.shard, layout.tensor, layout.context)
        if degrees not in best or order < best[degrees][0]:
            best[degrees] = order, plan
    if least == math.inf:
        raise ConfigError(
            f"--gpus {gpus}: a step has {sizes.rows} rows ({training.batch_tokens:,} tokens of {training.context_tokens:,}), "
            "which do not divide among them; take a divisor, or change training.batch_tokens"
        )
    if not best:
        raise ConfigError(
            f"no layout on {gpus} GPUs fits into {gpu_bytes / 2**30:.1f} GiB: the smallest takes {least / 2**30:.1f} GiB; "
            "take more GPUs or a smaller model"
        )
    return [plan for _, plan in sorted(best.values(), key=lambda ordered: ordered[0])]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

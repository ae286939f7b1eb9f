"""The mesh of a run: which process holds which weights and computes which tokens.

Weights are divided by PyTorch's FSDP2 (`fully_shard`) among the processes with different tokens, and by its tensor parallelism
among those with different heads. Vectors (gains, lambda) and the other parameters of attention beside its projections are whole
and in fp32 on every process; one sum after the backward pass completes their gradients.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...attention import Attention
from ...attention.base import REPLICATED
from ...data import check_context_stages
from ...errors import ConfigError
from ...model import DiffTransformerConfig, DiffTransformerForCausalLM
from ...model.masks import packed_starts, row_lengths
from ..config import ParallelConfig, TrainingConfig
from .processes import ALONE, Processes

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# The first word that is in a parameter's name says its part.
_PARTS = {
    "lambda": "lambdas",
    "self_attn": "attention",
    "mlp": "mlp",
    "norm": "norms",
    "embed": "embedding",
    "lm_head": "head",
}


class Mesh:
    """How the processes of a run divide rows, tokens, heads and weights.

    Args:
        processes: This process and the others.
        parallel: The degrees.

    Attributes:
        row_rank: Index of this process's rows within a batch.
        row_ranks: Number of parts that the rows of a batch divide into.

    Raises:
        ConfigError: The product of the degrees is not the number of processes.
    """

    def __init__(self, processes: Processes = ALONE, parallel: ParallelConfig | None = None) -> None:
        replicate, shard, context, tensor = (parallel or ParallelConfig()).degrees(processes.count)
        self.processes, self.context, self.tensor = processes, context, tensor
        self._replicate, self._shard = replicate, shard
        self.row_ranks = replicate * shard
        self.row_rank = processes.rank // (context * tensor)
        self.context_rank = processes.rank // tensor % context
        self._lays_rows_end_to_end = False
        self._weights: DeviceMesh | None = None
        self._context_group: dist.ProcessGroup | None = None

    def check(self, config: Any, training: TrainingConfig) -> None:
        """Check that a model and the rows of its training divide.

        Raises:
            ConfigError: Heads, the MLP, or rows do not.
        """
        parts, divisor = training.accumulation * self.row_ranks, "accumulation x data.replicate x data.shard"
        check_context_stages(training.context_stages, training.batch_tokens, parts=parts, divisor=divisor)
        degree = self.tensor * self.context
        if degree == 1:
            return
        if not isinstance(config, DiffTransformerConfig):
            raise ConfigError(
                f"parallel: tensor {self.tensor} x context {self.context} with model_type {config.model_type!r}: only "
                "model_type 'difftransformer' divides so; set both to 1"
            )
        if self.tensor > 1 and training.lora is not None:
            raise ConfigError(
                f"parallel.tensor={self.tensor} with training.lora: adapters are not divided; set tensor to 1"
            )
        layout = config.head_layout()
        for name, heads in (("query groups", layout.query_groups), ("key/value heads", layout.cache_heads)):
            if heads % degree:
                raise ConfigError(
                    f"parallel: tensor {self.tensor} x context {self.context} = {degree} does not divide the {heads} {name} of "
                    f"attention_type={config.attention_type!r}; heads are never split, so use degrees that divide them"
                )
        if config.intermediate_size % self.tensor:
            raise ConfigError(
                f"parallel.tensor={self.tensor} does not divide model.intermediate_size={config.intermediate_size}; set "
                f"model.multiple_of to {self.tensor}, which rounds it, or change the degree"
            )
        for _, length in training.context_stages:
            if length % self.context:
                raise ConfigError(
                    f"parallel.context={self.context} does not divide a row of {length} tokens (training.context_stages); "
                    "change one"
                )
            rows = training.batch_tokens // length
            if self.context > 1 and training.pack_documents and rows != parts:
                raise ConfigError(
                    f"parallel.context={self.context} with training.pack_documents takes one row at a time, and a step "
                    f"has {rows} rows of {length} tokens in {parts} parts ({divisor}); set training.accumulation to "
                    f"{rows // self.row_ranks}"
                )

    def _meet(self) -> None:
        """Make the groups of the processes. All of them take part."""
        if self.processes.count == 1 or self._weights is not None:
            return
        replicate, shard, context, device = self._replicate, self._shard, self.context, self.processes.device
        # Processes that share a row add up gradients just as processes with different rows do.
        copies, parts = (replicate, shard * context) if shard > 1 else (replicate * context, 1)
        self._weights = init_device_mesh(
            device, (copies, parts, self.tensor), mesh_dim_names=("copies", "parts", "tensor")
        )
        if context > 1:
            tokens = init_device_mesh(
                device, (self.row_ranks, context, self.tensor), mesh_dim_names=("rows", "context", "tensor")
            )
            self._context_group = tokens.get_group("context")

    def place(self, model: DiffTransformerForCausalLM, training: TrainingConfig) -> DiffTransformerForCausalLM:
        """Divide a whole model, whose matrices may be on the meta device: each process keeps its part of the weights."""
        layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
        self._lays_rows_end_to_end = isinstance(
            model, DiffTransformerForCausalLM
        )  # others may take no bounds of documents
        has_compiler = self.processes.device == "cuda" and find_spec("triton") is not None
        if training.compile is True or (training.compile == "auto" and has_compiler):
            for layer in layers:
                layer.compile()
        self._meet()
        if self._weights is None:
            return model
        self._summed = set(_partly_used(model))
        kept = [parameter for parameter in model.parameters() if parameter.dim() < 2 or parameter in self._summed]
        self._whole = [parameter for parameter in kept if parameter.requires_grad]
        if self.tensor > 1:
            _split_layers(model, self._weights["tensor"])
        if self._context_group is not None:
            for module in model.modules():
                if isinstance(module, Attention):
                    module.context_group = self._context_group
        low = torch.bfloat16 if training.precision == "bf16" else None
        mesh = self._weights["copies", "parts"] if self._weights.size(0) > 1 else self._weights["parts"]
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": set(kept)}
        for layer in layers:
            # Inputs stay in fp32, as on one process: autocast converts what it multiplies.
            policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(layer, mp_policy=policy, **options)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mp_policy=policy, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # every process's loss is already divided by the tokens of all
                module.set_force_sum_reduction_for_comms(True)
        return model

    def inputs(self, input_ids: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> dict[str, Any]:
        """Return what this process computes of rows, on its device: all of them, or its part of each with the positions.

        Args:
            input_ids: (B, T).
            targets: (B, T).
            position_ids: (B, T) positions that start at 0 in each packed document, in host memory, or None for rows of one
                document. Where processes share a row, B is 1. Models of this package get packed rows as one row.
        """
        rows, documents = {"input_ids": input_ids, "targets": targets}, {}
        if position_ids is not None:
            rows["position_ids"] = position_ids
            if self._context_group is not None or self._lays_rows_end_to_end:
                # Bounds of documents are found here, because a device would be waited for to count them.
                documents["cu_seq_lens_q"] = row_lengths(packed_starts(position_ids, None))
                rows = {name: tensor.reshape(1, -1) for name, tensor in rows.items()}
        elif self._context_group is not None:
            rows["position_ids"] = torch.arange(input_ids.shape[1]).unsqueeze(0)
        if self._context_group is not None:
            length = input_ids.shape[1] // self.context
            own = slice(self.context_rank * length, (self.context_rank + 1) * length)
            rows = {name: tensor[:, own] for name, tensor in rows.items()}
        return {name: _sent(tensor, self.processes.device) for name, tensor in (rows | documents).items()}

    def own_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return this process's part of rows that every process has, and which of them count, (rows, 1) bool.

        Every process gets the same number of rows: the last one is repeated until they divide, and counts once.
        """
        missing = -len(rows) % self.row_ranks
        counts = torch.arange(len(rows) + missing).unsqueeze(1) < len(rows)
        filled = torch.cat((rows, rows[-1:].expand(missing, *rows.shape[1:])))
        return filled.chunk(self.row_ranks)[self.row_rank], counts.chunk(self.row_ranks)[self.row_rank]

    def synchronise(self, model: nn.Module, *, now: bool) -> None:
        """Say whether the next backward pass adds up gradients, as the last of a step does."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)

    def forget_whole(self, model: nn.Module) -> None:
        """Free the weights that a forward pass without a backward pass has gathered; parameters are parts again."""
        if isinstance(model, FSDPModule):
            model.reshard()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of values over the tokens of all processes, in float64."""
        total = values.double()
        if self.processes.count > 1:
            dist.all_reduce(total)
        return total / self.tensor

    def clip_gradients(self, model: nn.Module, most: float) -> tuple[Tensor, list[str]]:
        """Complete the gradients and scale them to a norm of at most `most`.

        Returns:
            Their norm before that and the norms of the model's parts, and the names of the parts.
        """
        if self._weights is not None:
            self._sum_whole()
        parts: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parts.setdefault(part_of(name), []).append(parameter)
        norms = [_norm(by_mesh(parameters)) for parameters in parts.values()]
        if self._weights is None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        else:
            groups = by_mesh(p for p in model.parameters() if p.grad is not None)
            norm = _norm(groups)
            for group in groups:
                torch.nn.utils.clip_grads_with_norm_(group, most, norm)
        return torch.stack([norm, *norms]), list(parts)

    def _sum_whole(self) -> None:
        """Add up the gradients of the parameters that every process holds whole, in one collective."""
        grads = []
        for parameter in self._whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Processes that divide heads each have a part of the gradient of what all heads use, and all of the others.
            grads.append(parameter.grad if parameter in self._summed else parameter.grad / self.tensor)
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for parameter, total in zip(self._whole, flat.split([grad.numel() for grad in grads]), strict=True):
            parameter.grad = total.view_as(parameter)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters that one call of an optimiser can take: those divided over one mesh, and those that are whole."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def _sent(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor on a device, without waiting for that."""
    if device == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Every process that holds a part takes part in the call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide the projections of attention and the MLPs among the processes of a mesh, and the vocabulary if it divides.

    The plan is the one that transformers reads (`Attention.tensor_parallel`, `DiffTransformerConfig.base_model_tp_plan`).
    """
    layers = {f"model.{name}": how for name, how in model.config.base_model_tp_plan.items() if how != REPLICATED}
    parallelize_module(model, mesh, {name: STYLES[how]() for name, how in layers.items()})
    if model.config.vocab_size % mesh.size() == 0:
        embedding, head = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh, {"model.embed_tokens": embedding, "lm_head": head})
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight


def _norm(groups: list[list[nn.Parameter]]) -> Tensor:
    """Return the norm of the gradients of groups of `by_mesh`."""
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    return torch.linalg.vector_norm(torch.stack([whole(norm) for norm in norms]))


def part_of(name: str) -> str:
    """Return the part of a model, as metrics name it, that a parameter belongs to."""
    return next((part for word, part in _PARTS.items() if word in name), "other")


def _partly_used(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that all heads use: a process with some of the heads gets only part of their gradient."""
    for module in model.modules():
        if isinstance(module, Attention):
            for name, how in module.tensor_parallel(model.config).items():  # type: ignore[arg-type]
                if how == REPLICATED:
                    yield from module.get_submodule(name).parameters(recurse=False)

"""Tensor parallelism: the plan of an attention variant and of the model, as PyTorch's styles.

The plan is the one that transformers reads (`Attention.tensor_parallel`, `DiffTransformerConfig.base_model_tp_plan`).
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...attention.base import REPLICATED

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide the projections of attention and the MLPs among the processes of a mesh, and the vocabulary if it divides."""
    layers = {f"model.{name}": how for name, how in model.config.base_model_tp_plan.items() if how != REPLICATED}
    parallelize_module(model, mesh, {name: STYLES[how]() for name, how in layers.items()})
    if model.config.vocab_size % mesh.size() == 0:
        embedding, head = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh, {"model.embed_tokens": embedding, "lm_head": head})
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight

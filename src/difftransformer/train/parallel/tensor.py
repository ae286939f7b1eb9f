"""Tensor parallelism: the plan of an attention variant and of the model, as PyTorch's styles.

The plan is the one that transformers reads (`Attention.tensor_parallel`, `DiffTransformerConfig.base_model_tp_plan`).
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...attention.base import REPLICATED

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divide the projections of attention and the MLPs among the processes of a mesh."""
    plan = {name: STYLES[how]() for name, how in model.config.base_model_tp_plan.items() if how != REPLICATED}
    parallelize_module(model.model, mesh, plan)

"""Plain PyTorch as the backends of models that open without this package; see `code.py`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.problem import Call, Problem
from ..ops.reference import run as by_equations
from ..ops.sdpa import run as by_sdpa

# Up to this many queries the maps are small, and one call for both maps with padded heads takes longer.
FEW_QUERIES = 64


class Backend(NamedTuple):
    """One way to compute attention; see `difftransformer.ops.Backend`."""

    run: Callable[[Call], Tensor]
    norms: bool = False
    multiplies_all: bool = True


def backend_names() -> tuple[str, ...]:
    """Return the names that a configuration may have: all of the package's, though their kernels are not here."""
    return "reference", "cpu", "triton", "chunked", "sdpa", "cudnn"


def select_backend(problem: Problem, name: str = "auto", device: torch.device | None = None) -> Backend:
    """Return the equations where they are asked for or cost little, and scaled_dot_product_attention elsewhere."""
    few = problem.queries == 1 or (problem.op == "differential" and max(problem.queries, problem.keys) <= FEW_QUERIES)
    if name == "reference" or 0 in (problem.queries, problem.keys, problem.batch) or (name == "auto" and few):
        return Backend(by_equations)
    return Backend(by_sdpa)

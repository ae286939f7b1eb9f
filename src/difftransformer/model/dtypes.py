"""Names of floating-point types, as commands and results files write them."""

import torch

from ..typed import WeightsDtype

__all__ = ["DTYPES", "WeightsDtype"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

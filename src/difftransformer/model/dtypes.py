"""Names of floating-point types, as commands and results files write them."""

from typing import Literal

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WeightsDtype = Literal["auto", "fp32", "bf16", "fp16"]  # "auto" keeps the type that the weights were saved in

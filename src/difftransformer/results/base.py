"""What results of every kind share: where they were measured, and the words that fields may hold."""

from dataclasses import dataclass
from typing import Literal

Cities = Literal["seen", "unseen"]
Form = Literal["signed", "absolute", "positive"]
Segment = Literal["first", "before", "answer", "after", "query"]
Dtype = Literal["fp32", "bf16", "fp16"]
WeightsDtype = Literal["auto", "fp32", "bf16", "fp16"]  # "auto" keeps the type that the weights were saved in
Mode = Literal["forward", "backward", "forward+backward", "decode"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a result was measured."""

    difftransformer: str
    python: str
    torch: str
    transformers: str
    platform: str
    processor: str
    device: str
    threads: int

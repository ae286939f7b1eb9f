"""What results of every kind share: where they were measured, and the words that fields may hold."""

from dataclasses import dataclass
from typing import Literal

Cities = Literal["seen", "unseen"]
Form = Literal["signed", "absolute", "positive"]
Segment = Literal["first", "before", "answer", "after", "query"]
Dtype = Literal["fp32", "bf16", "fp16"]
Mode = Literal["forward", "forward+backward", "decode"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a result was measured.

    Attributes:
        commit: Commit of the package's source, ending in "-dirty" if files had been changed since.
        compiler: What built the CPU kernels that were used.
        instruction_set: Of the CPU kernels, such as "avx512_bf16"; without them, of PyTorch's own kernels.

    These three are "" where they are unknown: in files of earlier releases, and the commit of an installed wheel.
    """

    difftransformer: str
    python: str
    torch: str
    transformers: str
    platform: str
    processor: str
    device: str
    threads: int
    commit: str = ""
    compiler: str = ""
    instruction_set: str = ""

    @property
    def where(self) -> str:
        """Device, processor and code in a few words."""
        sets = [self.instruction_set] if self.instruction_set else []
        machine = ", ".join([self.processor, *sets, "1 thread" if self.threads == 1 else f"{self.threads} threads"])
        dirty = " with changes" if self.commit.endswith("-dirty") else ""
        commit = f" (commit {self.commit[:12]}{dirty})" if self.commit else ""
        return f"{self.device} ({machine}) by difftransformer {self.difftransformer}{commit}"


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A mean over seeds. `standard_error` is None with one seed."""

    mean: float
    standard_error: float | None
    seeds: int


IntervalMethod = Literal[
    "student-t over seeds",
    "sign flip over seeds",
    "welch over seeds",
    "fieller over seeds",
    "studentised over items",
    "mid-p over items",
    "none",
]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """A minus B on the same seeds or items, with an interval of `confidence`; `interval_method` says how it was made.

    `p_value` tests for no difference, and `p_holm` is corrected for the number of `comparisons` on the page; None where
    there is no interval, or a difference stands alone.
    """

    mean: float
    low: float | None
    high: float | None
    confidence: float
    interval_method: IntervalMethod
    p_value: float | None = None
    p_holm: float | None = None
    comparisons: int | None = None

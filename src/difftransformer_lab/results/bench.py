"""Results of benchmarks: one row for each implementation on each piece of work."""

from dataclasses import dataclass, field
from typing import Any

from .base import Dtype, Environment


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and quartiles of the time of one call over interleaved rounds: wall time, or on a GPU time on the device."""

    median_seconds: float
    low_seconds: float
    high_seconds: float
    rounds: int


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One implementation on one piece of work. Rows that agree in all else but the implementation were timed in turns.

    Attributes:
        part: "attention", "models", "generation", "memory", or the name of a script in `benchmarks/`.
        work: What was done, such as "forward", "decode" or "training step".
        dtype: Data type of the numbers; in a training step "bf16" and "fp16" mean autocast.
        shape: The sizes, such as {"length_tokens": 512, "heads": 8, "head_dim": 64} or {"model": "5M", "batch": 4}.
        implementation: Who did it.
        timing: Its time; None where time was not measured.
        figures: What else was measured, by a name with its unit, such as {"peak_bytes": 1024}.
        left_out: Why the implementation was not measured, or None.
    """

    part: str
    work: str
    dtype: Dtype
    shape: dict[str, Any]
    implementation: str
    timing: Timing | None = None
    figures: dict[str, float] = field(default_factory=dict)
    left_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The result of one benchmark.

    `foreign_cpu_share` is the share of the machine's CPU time that other processes took meanwhile, or None if unknown.
    Threads that wait in a loop slow down by more than that share: above a few per cent the times mean little.
    """

    command: str
    created: str
    environment: Environment
    foreign_cpu_share: float | None
    rows: list[BenchRow]

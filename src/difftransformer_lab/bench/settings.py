"""What a benchmark measures and for how long."""

from dataclasses import dataclass
from typing import Literal

from difftransformer.errors import ConfigError

from ..results import Dtype, Mode

Size = Literal["0.5M", "5M", "20M", "125M", "135M", "350M"]
Work = Literal["training step", "prefill", "decoding"]
MIN_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure and for how long.

    Attributes:
        device: cpu or cuda.
        dtypes: Data types; by default fp32 and bf16, on cuda bf16.
        modes: Passes of attention; all by default.
        lengths: Sequence lengths of attention in tokens; by default 512, 2048 and 8192, on cuda 2048, 8192 and 32768.
        head_dims: Widths of a map; by default 32, 64 and 128, on cuda 64 and 128.
        backends: Backends of differential attention; by default our kernel and "chunked".
        works: Works of models; all by default.
        sizes: Sizes of models; by default 0.5M, 5M and 20M, on cuda 125M and 350M.
        repeats: Largest number of timed rounds, at least 3.
        seconds: No round begins after this time, but at least 3 are timed.
        threads: CPU threads; all by default.
    """

    device: str = "cpu"
    dtypes: list[Dtype] | None = None
    modes: list[Mode] | None = None
    lengths: list[int] | None = None
    head_dims: list[int] | None = None
    backends: list[str] | None = None
    works: list[Work] | None = None
    sizes: list[Size] | None = None
    repeats: int = 30
    seconds: float = 8.0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.repeats < MIN_ROUNDS:
            raise ConfigError(f"--repeats {self.repeats}: give at least {MIN_ROUNDS}")
        for flag, numbers in (("--lengths", self.lengths), ("--head-dims", self.head_dims)):
            if numbers is not None and min(numbers, default=0) < 1:
                raise ConfigError(f"{flag} {numbers}: give whole numbers of at least 1")
        if self.dtypes is None:
            object.__setattr__(self, "dtypes", ["fp32", "bf16"] if self.device == "cpu" else ["bf16"])

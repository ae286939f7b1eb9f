"""How large each evaluation of a study is: what a recipe says under `evaluation`."""

from dataclasses import dataclass, field

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NllConfig:
    """Validation loss.

    Attributes:
        windows: Windows of the trained context that are read; fewer if the validation text is shorter.
        position_buckets: Parts of the context whose losses are reported apart.
    """

    windows: int = 64
    position_buckets: int = 8

    def __post_init__(self) -> None:
        if self.windows < 1 or self.position_buckets < 1:
            raise ConfigError(
                f"windows={self.windows}, position_buckets={self.position_buckets}: give at least 1 of each"
            )


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """Multi-needle retrieval (arXiv:2410.05258 section 3.3).

    Attributes:
        lengths_tokens: Prompt lengths; none means the trained context.
        needles: (needles in the context, needles asked for) pairs; the paper has (1, 1), (2, 2), (4, 2) and (6, 2).
        depths: Places of the answer, 0 (start of the context) to 1 (its end).
        documents: Documents in a cell for seen cities; as many again for unseen ones.
        digits: Digits of a number.
        seed: Of texts, cities and numbers; the same documents for every model.
    """

    lengths_tokens: list[int] = field(default_factory=list)
    needles: list[tuple[int, int]] = field(default_factory=lambda: [(1, 1), (2, 1), (4, 1)])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    documents: int = 20
    digits: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths_tokens):
            raise ConfigError(f"lengths_tokens={self.lengths_tokens}: give lengths of at least 1 token")
        if not self.needles:
            raise ConfigError("needles=[]: give at least one [needles, asked] pair")
        for needles, asked in self.needles:
            if not 1 <= asked <= needles:
                raise ConfigError(f"needles={[needles, asked]}: ask for at least 1 and at most all of the needles")
        _check_documents(self)


@dataclass(frozen=True, kw_only=True)
class AllocationConfig:
    """Attention allocation (arXiv:2410.05258 section 3.3, Figure 1 and Table 3).

    Attributes:
        length_tokens: Prompt length; None means the trained context.
        needles: Needles in the context; one is asked for.
        depths: Places of the answer.
        documents: Documents at each depth.
        digits: Digits of a number.
        seed: Of texts, cities and numbers.
    """

    length_tokens: int | None = None
    needles: int = 4
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    documents: int = 20
    digits: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length_tokens is not None and self.length_tokens < 1:
            raise ConfigError(f"length_tokens={self.length_tokens}: give at least 1, or null for the trained context")
        if self.needles < 1:
            raise ConfigError(f"needles={self.needles}: give at least 1")
        _check_documents(self)


def _check_documents(config: NeedleConfig | AllocationConfig) -> None:
    if not config.depths or any(not 0 <= depth <= 1 for depth in config.depths):
        raise ConfigError(f"depths={config.depths}: give shares of the context, from 0 to 1")
    if config.documents < 1 or not 1 <= config.digits <= 9:
        raise ConfigError(
            f"documents={config.documents}, digits={config.digits}: give at least 1 document and 1 to 9 digits"
        )
    if config.seed < 0:
        raise ConfigError(f"seed={config.seed}: give 0 or more")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Which evaluations are run; None leaves one out."""

    nll: NllConfig | None = field(default_factory=NllConfig)
    needle: NeedleConfig | None = None
    allocation: AllocationConfig | None = None
    batch_tokens: int = 16_384

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ConfigError(f"batch_tokens={self.batch_tokens}: give at least 1")

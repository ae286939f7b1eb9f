"""What the variants share whose signal heads subtract the maps of few noise heads."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import QK_NORM_EPS, AttentionConfig, HeadLayout, Option
from .differential import Differential, DifferentialOptions
from .head_norm import HEAD_NORM_EPS

SIGNAL_HEADS_PER_NOISE_HEAD = (4, 3)  # among the best ratios of arXiv:2510.06949; Motif-2-12.7B and Motif 3 have 4


@dataclass(frozen=True, kw_only=True)
class SharedNoiseLayout(HeadLayout):
    """Heads of which H / N consecutive ones share a second map.

    Rows of q_proj are N groups of H / N first queries and the second query that they share.

    Attributes:
        num_noise_heads: N, second maps of a layer; H is a multiple of it.
    """

    num_noise_heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        noise = self.num_noise_heads
        if noise < 1 or self.num_heads % noise:
            raise ConfigError(
                f"num_noise_heads={noise} does not divide num_heads={self.num_heads}; every noise head serves the same number "
                "of heads"
            )

    @property
    def query_groups(self) -> int:
        """Number of noise heads, each in a group with the heads that share it."""
        return self.num_noise_heads

    @property
    def query_width(self) -> int:
        """Width of one group's queries."""
        return (self.heads_per_second_map + 1) * self.head_dim

    @property
    def heads_per_second_map(self) -> int:
        """Number of heads that share one noise head."""
        return self.num_heads // self.num_noise_heads


class SharedNoise(Differential):
    """Base of the variants with noise heads. A configuration's num_attention_heads is H + N.

    Args:
        embed_dim: M, width of the hidden states.
        num_heads: H, signal heads.
        num_noise_heads: N, noise heads; H is a multiple of it. None means a fourth of H, or a third where 4 does not divide.
        num_key_value_heads: G; None leaves it to the variant.
        head_dim: D; None means embed_dim / (H + N).
        value_head_dim: E; None leaves it to the variant.
        layer_index: Index of the layer in the model, from 0.
        head_norm_eps: eps of the headwise norm.
        backend: The op's backend, or "auto".
        options: Choices that differ from the defaults.
        qk_norm: Whether queries and keys, those of noise heads included, are normalised, as in Qwen3.
        qk_norm_eps: eps of these norms.
        **more: Arguments of the variant's `heads`.

    Raises:
        ConfigError: heads that do not divide into whole groups, or an option that the variant does not have.
    """

    layout: SharedNoiseLayout
    config_options: ClassVar[dict[str, Option]] = Differential.config_options | {"num_noise_heads": Option(int | None)}
    can_upcycle: ClassVar[bool] = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_noise_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        layer_index: int = 0,
        head_norm_eps: float = HEAD_NORM_EPS,
        backend: str = "auto",
        options: DifferentialOptions | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = QK_NORM_EPS,
        **more: Any,
    ) -> None:
        noise = _noise_of_signal(num_heads) if num_noise_heads is None else num_noise_heads
        layout = self.heads(
            num_heads, noise, num_key_value_heads, head_dim or embed_dim // (num_heads + noise), value_head_dim, **more
        )
        chosen = self.allowed((options or DifferentialOptions()).over(self.defaults))
        base: dict[str, Any] = {"backend": backend, "qk_norm": qk_norm, "qk_norm_eps": qk_norm_eps}
        self._build(embed_dim, layout, chosen, layer_index=layer_index, head_norm_eps=head_norm_eps, **base)

    @classmethod
    @abstractmethod
    def heads(
        cls, signal: int, noise: int, groups: int | None, head_dim: int, value_head_dim: int | None
    ) -> SharedNoiseLayout:
        """Return the variant's layout of H signal heads, N noise heads and G key/value heads."""

    @classmethod
    def allowed(cls, options: DifferentialOptions) -> DifferentialOptions:
        """Return the options.

        Raises:
            ConfigError: the variant does not have one of them.
        """
        if options.shared_key != cls.defaults.shared_key:
            own = "read the keys of their group" if cls.defaults.shared_key else "have keys of their own"
            raise ConfigError(
                f"shared_key={options.shared_key}: noise heads of attention_type={cls.name!r} {own}; use "
                f"{cls.defaults.shared_key}"
            )
        return options

    @classmethod
    def arguments_of(cls, config: AttentionConfig, layer_index: int) -> dict[str, Any]:
        """Pass the number of noise heads too."""
        return super().arguments_of(config, layer_index) | {"num_noise_heads": cls.heads_of(config)[1]}

    @classmethod
    def heads_of(cls, config: AttentionConfig) -> tuple[int, int]:
        """Return the numbers of signal and noise heads.

        Raises:
            ConfigError: the heads do not divide.
        """
        total, noise = config.num_attention_heads, cls.option(config, "num_noise_heads")
        signal = cls.option(config, "num_differential_heads")
        if signal:
            return signal, _noise_of_signal(signal) if noise is None else noise
        if noise is not None:
            if noise >= total or (total - noise) % noise:
                raise ConfigError(
                    f"num_noise_heads={noise} leaves {total - noise} of num_attention_heads={total} for the signal; give a "
                    "number of which a multiple is left"
                )
            return total - noise, noise
        for ratio in SIGNAL_HEADS_PER_NOISE_HEAD:
            if total % (ratio + 1) == 0:
                noise = total // (ratio + 1)
                return total - noise, noise
        raise ConfigError(
            f"num_attention_heads={total}: attention_type={cls.name!r} makes one of five heads, or of four, a noise head; "
            "use a multiple of 5 or 4, or set num_noise_heads"
        )

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        return f"noise_heads={self.layout.num_noise_heads}, {super().extra_repr()}"


def paired(grouped: Tensor, width: int) -> Tensor:
    """Convert (B, groups, L, (r + 1) * width), r signal parts and one noise part, to (B, r * groups, L, 2 * width)."""
    shared = grouped.shape[-1] // width - 1
    if shared == 1:
        return grouped
    parts = grouped.unflatten(-1, (shared + 1, width)).transpose(2, 3)
    return torch.cat((parts[:, :, :-1], parts[:, :, -1:].expand(-1, -1, shared, -1, -1)), -1).flatten(1, 2)


def _noise_of_signal(signal: int) -> int:
    for ratio in SIGNAL_HEADS_PER_NOISE_HEAD:
        if signal % ratio == 0:
            return signal // ratio
    raise ConfigError(
        f"num_heads={signal} is a multiple of neither 4 nor 3 signal heads a noise head; set num_noise_heads"
    )

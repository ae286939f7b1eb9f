"""Base of the variants where many signal heads subtract the maps of few noise heads."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import AttentionConfig, HeadLayout, Option, head_width
from .differential import Differential, DifferentialOptions

SIGNAL_HEADS_PER_NOISE_HEAD = (4, 3)  # among the best ratios of arXiv:2510.06949; Motif-2-12.7B and Motif 3 have 4


@dataclass(frozen=True, kw_only=True)
class SharedNoiseLayout(HeadLayout):
    """Heads where every H / N consecutive ones share a second map.

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

    Takes the arguments of `GroupedDifferentialAttention`. Each variant documents what None means.
    """

    layout: SharedNoiseLayout
    layout_class: ClassVar[Any] = SharedNoiseLayout
    config_options: ClassVar[dict[str, Option]] = Differential.config_options | {"num_noise_heads": Option(int | None)}
    can_upcycle: ClassVar[bool] = True

    @classmethod
    def heads(  # type: ignore[override]
        cls,
        options: DifferentialOptions,
        embed_dim: int,
        num_heads: int,
        groups: int | None,
        *,
        head_dim: int | None,
        value_head_dim: int | None,
        num_noise_heads: int | None = None,
    ) -> SharedNoiseLayout:
        """Return the layout of H signal heads, N noise heads and G key/value heads (by default H, or N where maps share keys).

        Raises:
            ConfigError: the variant does not have one of the options.
        """
        shared = bool(cls.defaults.shared_key)
        if options.shared_key != shared:
            own = "read the keys of their group" if shared else "have keys of their own"
            raise ConfigError(
                f"shared_key={options.shared_key}: noise heads of attention_type={cls.name!r} {own}; use {shared}"
            )
        noise = _noise_of_signal(num_heads) if num_noise_heads is None else num_noise_heads
        head_dim = head_dim or head_width(embed_dim, num_heads, num_noise_heads=noise)
        return cls.layout_class(
            num_heads=num_heads,
            num_key_value_heads=(noise if shared else num_heads) if groups is None else groups,
            head_dim=head_dim,
            query_maps=2,
            key_maps=1 if shared else 2,
            value_head_dim=value_head_dim or cls.twin_heads * head_dim,
            num_noise_heads=noise,
        )

    @classmethod
    def layout_of(cls, config: AttentionConfig) -> SharedNoiseLayout:
        """Divide the Transformer's heads into signal and noise heads, and its keys among them.

        Raises:
            ConfigError: heads, or keys, that do not divide.
        """
        signal, noise = cls.heads_of(config)
        groups = cls.option(config, "num_differential_key_value_heads") or cls.groups_of(config, signal, noise)
        sizes = {"head_dim": config.head_dim, "value_head_dim": cls.option(config, "value_head_dim")}
        options = cls.options_of(config)
        return cls.heads(options, config.hidden_size, signal, groups, **sizes, num_noise_heads=noise)

    @classmethod
    @abstractmethod
    def groups_of(cls, config: AttentionConfig, signal: int, noise: int) -> int:
        """Return G where a configuration does not set it.

        Raises:
            ConfigError: the keys do not divide.
        """

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

"""Grouped differential attention: many signal heads, and few noise heads that they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import AttentionConfig, PlainLayer
from .differential import V1, DifferentialOptions
from .shared_noise import SIGNAL_HEADS_PER_NOISE_HEAD, SharedNoise, SharedNoiseLayout, paired


@dataclass(frozen=True, kw_only=True)
class GroupedLayout(SharedNoiseLayout):
    """Noise heads with keys of their own.

    Rows of k_proj and v_proj, and the cache, are min(G, N) groups of the first keys, one second key, and the values.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        noise = self.num_noise_heads
        if noise % self.num_key_value_heads and self.num_key_value_heads % noise:
            raise ConfigError(
                f"num_key_value_heads={self.num_key_value_heads} with num_noise_heads={noise}: give a multiple or a divisor "
                "of it, so that heads share keys in whole groups"
            )

    @property
    def cache_heads(self) -> int:
        """Number of groups of key/value heads that share the second key."""
        return min(self.num_key_value_heads, self.num_noise_heads)

    @property
    def key_width(self) -> int:
        """Width of one group's keys."""
        return (self.num_key_value_heads // self.cache_heads + 1) * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of one group's values."""
        return self.num_key_value_heads // self.cache_heads * self.value_head_dim


class GroupedDifferentialAttention(SharedNoise):
    """Grouped differential attention, causal unless forward gets is_causal=False (arXiv:2510.06949, Motif-2-12.7B's layout).

    head_h = (softmax(Q1_h K1_g^T / sqrt(D)) - lambda softmax(Q2_j K2_j'^T / sqrt(D))) V_g, with
        h = 0 ... H - 1 signal heads, j = h // (H / N) the noise head that h shares with H / N - 1 others,
        g = h // (H / G) its key/value head, and j' = j // (N / min(G, N)) the noise head's key
    output = concat((1 - lambda_init) RMSNorm(head)) W_O

    lambda, the norm and the value of 2 D are as in DIFF V1. With N = H this is V1. Rows of q_proj are ordered (noise head,
    H / N signal queries and the noise query, D), and rows of k_proj (noise key, its signal keys and the noise key itself, D).

    A configuration's num_attention_heads is H + N and its num_key_value_heads is the number of keys, G + min(G, N), so W_Q and
    W_K have the shapes of the same-size Transformer. Values are wider, 2 D for every signal head: with n heads and k key/value
    heads in the Transformer, W_V and W_O together have (2 (H + G) - n - k) D M more numbers. value_head_dim =
    (n + k) D / (H + G) makes them equal where that is a whole number.

    The op forms one pair of maps for each head, so it forms the noise map again for every head that shares it. The noise query,
    T positions long, is copied to each of these heads. Where G divides N, as in Motif's models, keys and values go to the op as
    they are cached, without a copy. With more key/value heads than noise heads (without grouped keys, for example), each call
    copies K, V and the repeated noise keys, S positions long. The cache holds nothing twice.

    Args:
        embed_dim: M, width of the hidden states.
        num_heads: H, signal heads.
        num_noise_heads: N, noise heads; H is a multiple of it. None means a fourth of H, or a third where 4 does not divide.
        num_key_value_heads: G; None means H.
        head_dim: D, width of one map; None means embed_dim / (H + N).
        value_head_dim: E; None means 2 D.
        **others: As in `DifferentialAttention`. Noise heads have the norms of queries and keys too.

    Raises:
        ConfigError: The heads do not divide embed_dim or into whole groups, or the variant does not have an option.
    """

    layout: GroupedLayout
    layout_class: ClassVar[Any] = GroupedLayout
    name: ClassVar[str] = "grouped_diff"
    label: ClassVar[str] = "grouped DIFF"
    twin_heads: ClassVar[int] = 2
    defaults: ClassVar[DifferentialOptions] = V1

    @classmethod
    def groups_of(cls, config: AttentionConfig, signal: int, noise: int) -> int:
        """Return G such that the number of keys, G + min(G, N), equals the Transformer's."""
        keys = config.num_key_value_heads
        groups = keys - noise if keys > 2 * noise else keys // 2
        whole = groups + min(groups, noise) == keys and groups > 0 and signal % groups == 0
        if not whole or (noise % groups and groups % noise):
            raise ConfigError(
                f"num_key_value_heads={keys} does not divide into keys of {signal} signal and {noise} noise heads: "
                f"use {signal + noise}, or twice a divisor of {noise}, or set num_differential_key_value_heads"
            )
        return groups

    @classmethod
    def upcycled_options(cls, config: AttentionConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Keep every head as a signal head, and add the fewest noise heads that the keys and the known ratios allow.

        Lambda by token cannot start at 0, so the maps of a head must cancel: every head gets a noise head of its own.
        """
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        ratios = (
            (*SIGNAL_HEADS_PER_NOISE_HEAD, *range(2, heads + 1), 1) if chosen.get("lambda_form") != "token" else (1,)
        )
        noise = next(
            heads // ratio
            for ratio in ratios
            if heads % ratio == 0 and (heads // ratio % groups == 0 or groups % (heads // ratio) == 0)
        )
        return super().upcycled_options(config, chosen) | {"num_noise_heads": noise}

    @classmethod
    def upcycled(cls, name: str, shape: tuple[int, ...], plain: PlainLayer) -> Tensor:
        """Give each noise head the query and key of the first head that shares it. lambda is 0 at the start."""
        if name not in ("q_proj.weight", "k_proj.weight"):
            return super().upcycled(name, shape, plain)
        layout = cls.layout_of(plain.config)
        groups = layout.query_groups if name == "q_proj.weight" else layout.cache_heads
        heads = plain.read(name).unflatten(0, (groups, -1, layout.head_dim))
        return torch.cat((heads, heads[:, :1]), 1).flatten(0, 2)

    def op_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pair every signal head with a copy of its noise head: queries (B, H, T, 2 D) and keys (B, G, S, 2 D)."""
        layout = self.layout
        values = layout.value_width // layout.value_head_dim
        if values > 1:
            value = value.unflatten(-1, (values, -1)).transpose(2, 3).flatten(1, 2)
        return paired(query, layout.head_dim), paired(key, layout.head_dim), value

    def mimetic_key(self, query: Tensor) -> Tensor:
        layout = self.layout
        groups, cached, noise = layout.num_key_value_heads, layout.cache_heads, layout.query_groups
        rows = query.view(noise, -1, layout.head_dim, query.shape[-1])
        signal = rows[:, :-1].flatten(0, 1)[:: layout.num_heads // groups]
        keys = (signal.unflatten(0, (cached, -1)), rows[:: noise // cached, -1:])
        return torch.cat(keys, 1).flatten(0, 2)

"""The heads of ordinary grouped-query attention that compute all maps of a layer exactly, with every key and value cached once.

Servers have one attention: softmax(Q K^T s) V, with keys and values of one width and the same number of query heads for each
key/value head. A cached key/value head here holds the keys of both maps side by side, and the value. A query is placed where
its map's key lies, with zeros elsewhere, so that its product with the joint key is the product with that key alone:

    key       [  k1  |  k2  ]    or one key that both maps share
    value     [      v      ]
    query 1   [  q1  |  0   ]
    query 2   [  0   |  q2  ]

The narrower of keys and values is padded with zeros. DIFF V1 has keys of 2 D and values of 2 D, so its cache is not larger than
our own, and any attention kernel of width 2 D can serve it.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import HeadLayout, config_options
from ..errors import ConfigError
from ..families.diffllama import SHARED_FIELDS
from ..families.llama import HEAD_FIELDS
from ..model import DiffTransformerConfig

SERVED_FAMILY = "qwen3"  # which is this package's layout with norms on queries and keys
SERVED_TYPES = (
    "softmax", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex", "softmax_norm", "gate", "diff_gate",
)  # fmt: skip


@dataclass(frozen=True)
class ServedHeads:
    """One rank's heads.

    Dimensions: N tokens, G key/value heads, D width of one map, E width of a value, W width of a joint head.

    Attributes:
        layout: The model's heads, all ranks together.
        ranks: Number of tensor-parallel ranks.
    """

    layout: HeadLayout
    ranks: int = 1

    @classmethod
    def of(cls, config: DiffTransformerConfig, ranks: int = 1) -> Self:
        """Return the heads of a model.

        Raises:
            ConfigError: the model's attention is not served, or its heads do not divide among the ranks.
        """
        config = served_config(config)
        if config.attention_type not in SERVED_TYPES:
            raise ConfigError(
                f"vLLM: attention_type={config.attention_type!r} is not served; choose one of {', '.join(SERVED_TYPES)}"
            )
        layout = config.head_layout()
        if layout.cache_heads % ranks:
            raise ConfigError(
                f"vLLM: {layout.cache_heads} cached heads do not divide among {ranks} tensor-parallel ranks; use a divisor"
            )
        return cls(layout, ranks)

    @property
    def head_size(self) -> int:
        """W, the width of queries, keys and values."""
        return max(self.layout.key_maps * self.layout.head_dim, self.layout.value_head_dim)

    @property
    def key_value_heads(self) -> int:
        """G, the key/value heads of this rank."""
        return self.layout.num_key_value_heads // self.ranks

    @property
    def heads(self) -> int:
        """H, the heads that o_proj reads on this rank."""
        return self.layout.num_heads // self.ranks

    @property
    def second_heads(self) -> int:
        """The queries of the second map on this rank: one for each head, or for each group of heads that share it."""
        if self.layout.query_maps == 1:
            return 0
        return max(self.layout.query_groups // self.ranks, self.key_value_heads)

    @property
    def query_heads(self) -> int:
        """The query heads of this rank, H and those of the second map."""
        return self.heads + self.second_heads

    def arrange(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make joint heads of projections.

        Args:
            query: The rotated rows of q_proj, (N, query_groups * query_width).
            key: The rotated rows of k_proj, (N, cache_heads * key_width).
            value: The rows of v_proj, (N, G * E).

        Returns:
            Queries (N, query_heads * W), keys (N, G * W) and values (N, G * W). Queries of a key/value head are consecutive,
            those of the first map before those of the second.
        """
        tokens, groups, width = query.shape[0], self.key_value_heads, self.layout.head_dim
        sharing = self.layout.heads_per_second_map
        rows = query.view(tokens, -1, sharing + (self.layout.query_maps - 1), width)
        first, second = rows[:, :, :sharing], rows[:, :, sharing:]
        first = first.reshape(tokens, groups, -1, width)
        # Where key/value heads outnumber second maps, each of them gets the query and the key of the one that it shares.
        second = self._for_each_group(second).reshape(tokens, groups, self.second_heads // groups, width)
        keys = key.view(tokens, self.layout.cache_heads // self.ranks, -1, width)
        if self.layout.key_maps == 2:
            second = F.pad(second, (width, 0))
            own, shared = keys[:, :, :-1], self._for_each_group(keys[:, :, -1:])
            keys = torch.cat((own.reshape(tokens, groups, width), shared.reshape(tokens, groups, width)), -1)
        queries = torch.cat((self._padded(first), self._padded(second)), 2)
        values = value.view(tokens, groups, -1)
        return (
            queries.view(tokens, -1),
            self._padded(keys).reshape(tokens, -1),
            self._padded(values).reshape(tokens, -1),
        )

    def separate(self, attended: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the heads of the first map, (N, H, E), and the second map's product with the same values, if there is one."""
        groups = attended.view(attended.shape[0], self.key_value_heads, -1, self.head_size)
        groups = groups[..., : self.layout.value_head_dim]
        count = self.heads // self.key_value_heads
        first, second = groups[:, :, :count], groups[:, :, count:]
        if self.layout.query_maps == 1:
            return first.flatten(1, 2), None
        return first.flatten(1, 2), second.repeat_interleave(self.heads // self.second_heads, 2).flatten(1, 2)

    def _for_each_group(self, states: Tensor) -> Tensor:
        return states.repeat_interleave(max(1, self.key_value_heads // states.shape[1]), 1)

    def _padded(self, states: Tensor) -> Tensor:
        return F.pad(states, (0, self.head_size - states.shape[-1]))


def served_config(config: Any) -> DiffTransformerConfig:
    """Return the configuration of a model that vLLM serves as one of this package: itself, or that of a differential Qwen3.

    Raises:
        ConfigError: the model is of another family, or has biases or windows.
    """
    if isinstance(config, DiffTransformerConfig):
        return config
    family = config.family
    if family != SERVED_FAMILY:
        raise ConfigError(
            f"vLLM: family={family!r} is not served; serve it with transformers, or choose a model of this package or of "
            f"{SERVED_FAMILY}"
        )
    if config.attention_bias or "sliding_attention" in config.layer_types:
        raise ConfigError(
            f"vLLM: a {family} with attention_bias or sliding windows is not served; serve it with transformers"
        )
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, *HEAD_FIELDS, *config_options())}
    return DiffTransformerConfig(
        **fields,
        attention_type=config.attention_type,
        rope_parameters=config.rope_parameters,
        qk_norm=True,
        embedding_multiplier=1.0,
        architectures=config.architectures,
        dtype=config.dtype,
    )


def check_served(config: DiffTransformerConfig) -> None:
    """Check what vLLM's layers are built for.

    Raises:
        ConfigError: the model has another activation, or is not causal.
    """
    if config.hidden_act != "silu":
        raise ConfigError(f"vLLM: hidden_act={config.hidden_act!r} is not served; its gated layer uses silu")
    if not config.is_causal:
        raise ConfigError("vLLM: is_causal=False is not served; its decoder is causal")

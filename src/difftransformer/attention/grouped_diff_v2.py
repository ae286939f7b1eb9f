"""Grouped differential attention with lambda by token, shared keys and an output gate (Motif 3)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..errors import ConfigError
from .base import AttentionConfig, Option
from .differential import V2, DifferentialOptions
from .output_gate import OutputGate
from .shared_noise import SharedNoise, SharedNoiseLayout, paired


@dataclass(frozen=True, kw_only=True)
class SharedKeyLayout(SharedNoiseLayout):
    """Signal heads and noise heads that read the keys and values of their group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_noise_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_noise_heads={self.num_noise_heads}; "
                "a noise head and its signal heads read one key"
            )


class GroupedDifferentialAttentionV2(OutputGate, SharedNoise):
    """Grouped differential attention of Motif 3, causal unless forward gets is_causal=False (arXiv:2608.09119, its vLLM fork).

    head_h = (softmax(Q1_h K_g^T / sqrt(D)) - sigmoid(X w_h) softmax(Q2_j K_g^T / sqrt(D))) V_g, with
        h = 0 ... H - 1 signal heads, j = h // (H / N) the noise head that h shares with H / N - 1 others,
        and g = h // (H / G) the key/value head of both
    output = (sigmoid(X W_G) * concat(head)) W_O

    A noise head and its signal heads read one key and one value, so G divides N. lambda is one number for each token and
    signal head, and there is no headwise norm. With N = H and without the gate this is DIFF V2. Rows of q_proj are ordered
    (noise head, H / N signal queries and the noise query, D), and rows of lambda_proj and gate_proj by signal head.

    Motif 3 forms queries, keys and values from latent vectors (multi-head latent attention) and its gate from the queries'
    latent, with rotary embedding of a part of each head. Here all of them are projections of the hidden states, and whole
    heads are rotated, as in the other variants. Its initialisation is not published; weights start as in the other
    variants.

    A configuration's num_attention_heads is H + N, so W_Q has the size of the same-size Transformer's. G is its number of
    key/value heads where that divides N, else the greatest number that divides both. W_O and W_G have H D M numbers each.

    Args:
        output_gate: Whether to scale the heads by sigmoid(X W_G).

    Other arguments are as in `GroupedDifferentialAttention`, but num_key_value_heads None means N, and value_head_dim None
    means D.
    """

    layout: SharedKeyLayout
    layout_class: ClassVar[Any] = SharedKeyLayout
    name: ClassVar[str] = "grouped_diff_v2"
    label: ClassVar[str] = "grouped DIFF V2"
    config_options: ClassVar[dict[str, Option]] = SharedNoise.config_options | {"output_gate": Option(bool, True)}
    twin_heads: ClassVar[int] = 1
    defaults: ClassVar[DifferentialOptions] = V2

    @classmethod
    def groups_of(cls, config: AttentionConfig, signal: int, noise: int) -> int:
        """Return the greatest common divisor of the Transformer's keys and the noise heads."""
        return math.gcd(config.num_key_value_heads, noise)

    @classmethod
    def upcycled_options(cls, config: AttentionConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Give every head a noise head of its own, so that the maps of a head can cancel where lambda cannot start at 0."""
        return super().upcycled_options(config, chosen) | {"num_noise_heads": config.num_attention_heads}

    def op_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pair every signal query with a copy of its noise query: queries (B, H, T, 2 D)."""
        return paired(query, self.layout.head_dim), key, value

    def mimetic_key(self, query: Tensor) -> Tensor:
        layout = self.layout
        rows = query.view(layout.num_noise_heads, -1, layout.head_dim, query.shape[-1])
        return rows[:: layout.num_noise_heads // layout.num_key_value_heads, 0].flatten(0, 1)

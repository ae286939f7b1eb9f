"""Differential attention, V1 (arXiv:2410.05258): the difference of two softmax maps, normalised head by head."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops import attention_maps, normed_differential_attention
from ..ops.problem import LOW_PRECISION
from .base import Attention, AttentionConfig, HeadLayout, RMSNorm

LAMBDA_STD = 0.1  # of the four lambda vectors at the start (the paper's code)
HEAD_NORM_EPS = 1e-5  # of the headwise norm (the paper's code)


def lambda_init(layer_index: int) -> float:
    """0.8 - 0.6 exp(-0.3 layer_index), layers counted from 0 (arXiv:2410.05258 section 2.1, where l = layer_index + 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


class DifferentialAttention(Attention):
    """Multi-head differential attention (arXiv:2410.05258 eq. 1-3).

    head = (softmax(Q1 K1^T / sqrt(D)) - lambda softmax(Q2 K2^T / sqrt(D))) V
    output = concat((1 - lambda_init) RMSNorm(head)) W_O
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

    lambda is one number a layer, shared by the heads, and may leave (0, 1). Its four vectors stay in fp32 whatever the
    module is cast to: in bf16 their dot products would move in steps as large as what they learn. Rows of q_proj and
    k_proj are ordered (head, map, D). In grouped-query attention each map keeps its own key.

    Args:
        embed_dim: M, width of the hidden states.
        num_heads: Differential heads: half the heads of the same-size Transformer.
        num_key_value_heads: Differential key/value heads; None means num_heads.
        head_dim: D, width of one map; None means embed_dim / (2 num_heads).
        value_head_dim: E; None means 2 D, as in the paper.
        layer_index: Place in the model, from 0; sets lambda_init.
        head_norm_eps: eps of the headwise norm.
        backend: The op's backend, or "auto".
    """

    name: ClassVar[str] = "diff"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        layer_index: int = 0,
        head_norm_eps: float = HEAD_NORM_EPS,
        backend: str = "auto",
    ) -> None:
        head_dim = head_dim or embed_dim // (2 * num_heads)
        layout = HeadLayout(
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads or num_heads,
            head_dim=head_dim,
            query_maps=2,
            key_maps=2,
            value_head_dim=value_head_dim or 2 * head_dim,
        )
        super().__init__(embed_dim, layout, layer_index=layer_index, backend=backend)
        self.lambda_init = lambda_init(layer_index)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(head_dim, dtype=torch.float32)) for _ in range(4)
        )
        self.head_norm = RMSNorm(layout.value_head_dim, eps=head_norm_eps)
        self.init_own_parameters()

    @classmethod
    def layout_of(cls, config: AttentionConfig) -> HeadLayout:
        """Pairs of the twin's heads become differential heads, unless the configuration states their number.

        Raises:
            ConfigError: a head count is odd, or head_dim was already halved.
        """
        return HeadLayout(
            num_heads=config.num_differential_heads or _half(config, "num_attention_heads"),
            num_key_value_heads=config.num_differential_key_value_heads or _half(config, "num_key_value_heads"),
            head_dim=config.head_dim,
            query_maps=2,
            key_maps=2,
            value_head_dim=config.value_head_dim or 2 * config.head_dim,
        )

    @classmethod
    def from_config(cls, config: AttentionConfig, layer_index: int) -> Self:
        """Build the layer of a model."""
        layout = cls.layout_of(config)
        return cls(
            config.hidden_size,
            layout.num_heads,
            num_key_value_heads=layout.num_key_value_heads,
            head_dim=layout.head_dim,
            value_head_dim=layout.value_head_dim,
            layer_index=layer_index,
            head_norm_eps=config.head_norm_eps,
            backend=config.attn_backend,
        )

    @classmethod
    def own_parameters(cls, config: AttentionConfig) -> int:
        """Four lambda vectors of D and a gain of E (6 D with the paper's E = 2 D)."""
        layout = cls.layout_of(config)
        return 4 * layout.head_dim + layout.value_head_dim

    def init_own_parameters(self, normal_: Any = nn.init.normal_) -> None:
        """Draw the lambda vectors from N(0, LAMBDA_STD^2)."""
        for vector in self._lambda_vectors():
            normal_(vector, mean=0.0, std=LAMBDA_STD)

    def lam(self) -> Tensor:
        """The layer's lambda now (arXiv:2410.05258 eq. 2): a 0-dim tensor in fp32 (float64 in a float64 layer)."""
        q1, k1, q2, k2 = (v.float() if v.dtype in LOW_PRECISION else v for v in self._lambda_vectors())
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.lambda_init

    def attend(self, query_BHTX: Tensor, key_BGSX: Tensor, value_BGSE: Tensor, **restrictions: Any) -> Tensor:
        """(1 - lambda_init) RMSNorm((A1 - lambda A2) V)."""
        return normed_differential_attention(
            query_BHTX,
            key_BGSX,
            value_BGSE,
            self.lam(),
            self.head_norm.weight,
            eps=self.head_norm.eps,
            factor=1.0 - self.lambda_init,
            backend=self.backend,
            **restrictions,
        )

    def combined_map(self, query_BHTX: Tensor, key_BGSX: Tensor, **restrictions: Any) -> Tensor:
        """A1 - lambda A2."""
        first_BHTS, second_BHTS = attention_maps(query_BHTX, key_BGSX, **restrictions)
        return first_BHTS - self.lam() * second_BHTS

    def _lambda_vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to(bfloat16)` reaches parameters here; the lambdas follow to another device but are never narrowed below fp32.
        before = [vector.detach() for vector in self._lambda_vectors()]
        super()._apply(fn, recurse)
        for vector, kept in zip(self._lambda_vectors(), before, strict=True):
            if vector.dtype in LOW_PRECISION:
                vector.data = kept.to(vector.device, torch.float32)
                if vector.grad is not None:
                    vector.grad = vector.grad.to(torch.float32)
        return self


def _half(config: AttentionConfig, field: str) -> int:
    count = getattr(config, field)
    if count % 2:
        raise ConfigError(
            f"{field}={count} is odd: attention_type='diff' makes one differential head of two heads of the same-size "
            "Transformer; use an even number, or set num_differential_heads and num_differential_key_value_heads"
        )
    if 2 * config.head_dim * config.num_attention_heads == config.hidden_size:
        raise ConfigError(
            f"head_dim={config.head_dim} is half of hidden_size / num_attention_heads = "
            f"{config.hidden_size // config.num_attention_heads}: head_dim describes the same-size Transformer and is also "
            "the width of each differential map, so it must not be halved; set num_differential_heads to keep it"
        )
    return int(count // 2)

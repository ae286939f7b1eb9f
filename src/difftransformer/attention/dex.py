"""Differential extension (DEX): softmax attention where heads subtract a learned map of their own output."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .base import AttentionConfig, HeadLayout, Option, PlainLayer
from .softmax import SoftmaxAttention


class DifferentialExtension(SoftmaxAttention):
    """DEX, causal unless forward gets is_causal=False (arXiv:2505.16333, O' = O - lambda O W_D on chosen heads).

    It is made for pretrained models.

    head = softmax(Q K^T / sqrt(D)) V
    head' = head - lambda_h head W_h
    output = concat(head') W_O

    The scores are the Transformer's own, so there is one map at the same cost. A chosen head adds E^2 + 1 parameters.
    lambda_h starts at 0, where the layer equals the Transformer's bit for bit. W_h is drawn from N(0, 1 / E), so that lambda_h
    has a gradient from the first step. The paper anneals lambda over the first steps; here it is learned from 0, without a
    schedule.

    head' is linear in head: (I - lambda_h W_h) could be multiplied into W_O without changing the function.

    Args:
        embed_dim: M, width of the hidden states.
        num_heads: H.
        dex_heads: The heads that are extended, counted from 0; None means all. In a model's configuration, one list for
            each layer, all of one length.
        **options: As in `SoftmaxAttention`.

    Raises:
        ConfigError: a head does not exist or is listed twice.
    """

    name: ClassVar[str] = "dex"
    label: ClassVar[str] = "DEX"
    description: ClassVar[str] = "differential attention"
    tags: ClassVar[tuple[str, ...]] = ("differential-transformer", "arxiv:2410.05258")
    dex_index: Tensor | None
    config_options: ClassVar[dict[str, Option]] = {"dex_heads": Option(list[list[int]] | None)}

    def __init__(
        self, embed_dim: int, num_heads: int, *, dex_heads: Sequence[int] | None = None, **options: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.dex_heads = tuple(range(num_heads)) if dex_heads is None else tuple(sorted(dex_heads))
        _check_heads(self.dex_heads, num_heads)
        chosen, width = len(self.dex_heads), self.layout.value_head_dim
        self.dex_lambda = nn.Parameter(torch.empty(chosen))
        self.dex_proj = nn.Parameter(torch.empty(chosen, width, width))
        self.add_constants(dex_index=self.dex_heads if chosen < num_heads else None)
        self.init_own_parameters()

    @classmethod
    def layout_of(cls, config: AttentionConfig) -> HeadLayout:
        """Return the configuration's heads unchanged.

        Raises:
            ConfigError: dex_heads does not list equally many of the heads for each layer.
        """
        layers, layout = cls.option(config, "dex_heads"), super().layout_of(config)
        if layers is not None:
            if len(layers) != config.num_hidden_layers or len({len(set(heads)) for heads in layers}) != 1:
                raise ConfigError(
                    f"dex_heads={layers}: give a list of heads for each of the {config.num_hidden_layers} layers, "
                    "equally long"
                )
            for heads in layers:
                _check_heads(heads, layout.num_heads)
        return layout

    @classmethod
    def arguments_of(cls, config: AttentionConfig, layer_index: int) -> dict[str, Any]:
        """Pass entry `layer_index` of the configuration's dex_heads."""
        layers = cls.option(config, "dex_heads")
        return {"dex_heads": None if layers is None else layers[layer_index]}

    @classmethod
    def own_parameters(cls, config: AttentionConfig) -> int:
        """Count lambda and W of the chosen heads; every layer has equally many."""
        chosen, width = cls._chosen(config)
        return chosen * (width**2 + 1)

    @classmethod
    def own_flops_per_token(cls, config: AttentionConfig) -> int:
        """Count the products of the chosen heads with W."""
        chosen, width = cls._chosen(config)
        return 2 * chosen * width**2

    @classmethod
    def _chosen(cls, config: AttentionConfig) -> tuple[int, int]:
        """Return the number of chosen heads of each layer, and their width."""
        layout, layers = cls.layout_of(config), cls.option(config, "dex_heads")
        return layout.num_heads if layers is None else len(layers[0]), layout.value_head_dim

    @classmethod
    def upcycled(cls, name: str, shape: tuple[int, ...], plain: PlainLayer) -> Tensor:
        """Copy the Transformer's projections; lambda starts at 0."""
        if name == "dex_lambda":
            return plain.zeros(shape)
        if name == "dex_proj":
            drawn = plain.normal("self_attn.dex_proj", shape, plain.config.head_dim**-0.5)
            return drawn.to(plain.read("o_proj.weight").dtype)
        return plain.read(name)

    def init_own_parameters(self, normal_: Any = nn.init.normal_) -> None:
        """Set lambda to 0 and draw W from N(0, 1 / E)."""
        normal_(self.dex_lambda, mean=0.0, std=0.0)
        normal_(self.dex_proj, mean=0.0, std=self.layout.value_head_dim**-0.5)

    def lam(self) -> Tensor:
        """Return lambda of the chosen heads, (len(dex_heads),)."""
        return self.dex_lambda

    def finish(self, heads_BHTE: Tensor) -> Tensor:
        """Return O - lambda O W_D for the chosen heads and O for the rest, normalised if there is a headwise norm."""
        lam: Tensor = self.dex_lambda
        proj: Tensor = self.dex_proj
        index, part_BHTE = self.dex_index, heads_BHTE
        local = self.local_part(range(self.layout.num_heads), heads_BHTE.shape[1])
        if len(local) < self.layout.num_heads:
            own = slice(*(sum(head < edge for head in self.dex_heads) for edge in (local.start, local.stop)))
            lam, proj, index = lam[own], proj[own], None if index is None else index[own] - local.start
        if index is not None:
            part_BHTE = heads_BHTE.index_select(1, index)
        lam_H11, proj_HEE = lam.view(-1, 1, 1).to(part_BHTE.dtype), proj.to(part_BHTE.dtype)
        part_BHTE = part_BHTE - lam_H11 * (part_BHTE @ proj_HEE)
        return super().finish(part_BHTE if index is None else heads_BHTE.index_copy(1, index, part_BHTE))


def _check_heads(chosen: Sequence[int], heads: int) -> None:
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(heads)):
        raise ConfigError(f"dex_heads={list(chosen)}: name heads from 0 to {heads - 1}, each once")

"""An encoder layer that takes the place of nn.TransformerEncoderLayer."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, ShapeError
from ..ops.problem import bool_mask
from . import variant


class DifferentialEncoderLayer(nn.Module):
    """nn.TransformerEncoderLayer with differential attention, bidirectional unless forward gets a mask or is_causal=True.

    It can be a layer of nn.TransformerEncoder. nn.TransformerEncoder copies one layer, and DIFF V1's lambda_init depends on
    the depth, so replace the copies:

        encoder = nn.TransformerEncoder(DifferentialEncoderLayer(512, 8), 6, enable_nested_tensor=False)
        encoder.layers = nn.ModuleList(DifferentialEncoderLayer(512, 8, layer_index=index) for index in range(6))

    As in PyTorch's layer, the caller adds positions to the input. Attention has neither biases nor dropout on its maps.

    Args:
        d_model: M, width of the hidden states.
        nhead: Heads of the same-size Transformer; DIFF V1 makes one differential head of two.
        dim_feedforward: Inner width of the MLP.
        dropout: Dropout on the outputs of attention and inside and after the MLP.
        activation: "relu", "gelu" or a function.
        layer_norm_eps: eps of the norms.
        batch_first: Whether inputs are (B, T, M) instead of (T, B, M).
        norm_first: Whether the norms precede attention and MLP instead of following them.
        bias: Whether the MLP and the norms have biases.
        attention_type: A name in `attention.VARIANTS`.
        layer_index: Index of the layer in the model, from 0.
        backend: The op's backend, or "auto".
        qk_norm: Whether queries and keys are normalised, with eps layer_norm_eps.
        **options: Options of the attention type, as in a model's configuration.

    Raises:
        ConfigError: The heads do not divide d_model, or the attention type cannot have them, has no such option or not such a
            value of it, or the activation is unknown.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        attention_type: str = "diff",
        layer_index: int = 0,
        backend: str = "auto",
        qk_norm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if nhead < 1 or d_model % nhead:
            raise ConfigError(f"d_model={d_model} is not a multiple of nhead={nhead}; change one of them")
        if isinstance(activation, str) and activation not in ("relu", "gelu"):
            raise ConfigError(f"activation={activation!r} is unknown; give 'relu', 'gelu' or a function")
        attention = variant(attention_type)
        for name, value in options.items():
            if name not in attention.config_options:
                raise ConfigError(f"{name}={value!r} is not an option of attention_type={attention_type!r}; drop it")
        if isinstance(options.get("dex_heads"), list) and len(options["dex_heads"]) == 1:
            options["dex_heads"] *= layer_index + 1
        heads: dict[str, Any] = {
            "num_attention_heads": nhead,
            "num_key_value_heads": nhead,
            "head_dim": d_model // nhead,
        }
        norms = {"qk_norm": qk_norm, "rms_norm_eps": layer_norm_eps}
        config = SimpleNamespace(
            **{"hidden_size": d_model, "num_hidden_layers": layer_index + 1, "attn_backend": backend}
            | heads
            | norms
            | options
        )
        try:
            self.self_attn = attention.from_config(cast(Any, config), layer_index)
        except TypeError as error:  # of an option that is no number, say
            raise ConfigError(f"{options}: no values for attention_type={attention_type!r} ({error})") from None
        self.self_attn.batch_first = batch_first  # nn.TransformerEncoder reads it here
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation = getattr(F, activation) if isinstance(activation, str) else activation
        self.batch_first, self.norm_first = batch_first, norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Compute the layer.

        Args:
            src: (T, B, M), or (B, T, M) with batch_first.
            src_mask: (T, T) as in PyTorch's layer: True = may not attend, or 0 and -inf.
            src_key_padding_mask: (B, T), True for padding, or -inf there and 0 elsewhere.
            is_causal: Whether attention is causal; src_mask is then taken to be the causal mask and not read.

        Returns:
            The shape of src.

        Raises:
            ShapeError: src does not have three dimensions, or a mask has another shape or adds biases.
        """
        if src.dim() != 3:
            raise ShapeError(f"src has shape {tuple(src.shape)}; it must have 3 dimensions, of which one is the batch")
        allowed = None
        if src_mask is not None and not is_causal:
            if src_mask.dim() != 2:
                raise ShapeError(
                    f"src_mask has shape {tuple(src_mask.shape)}; it must be (T, T), the same for all heads"
                )
            allowed = _allowed(src_mask, "src_mask")
        if src_key_padding_mask is not None:
            if src_key_padding_mask.dim() != 2:
                raise ShapeError(
                    f"src_key_padding_mask has shape {tuple(src_key_padding_mask.shape)}; it must be (B, T)"
                )
            real = _allowed(src_key_padding_mask, "src_key_padding_mask")[:, None, None, :]
            allowed = real if allowed is None else real & allowed

        def attend(x: Tensor) -> Tensor:
            rows = x if self.batch_first else x.transpose(0, 1)
            rows, _ = self.self_attn(rows, is_causal=is_causal, attn_mask=allowed)
            return self.dropout(rows if self.batch_first else rows.transpose(0, 1))

        def mlp(x: Tensor) -> Tensor:
            return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(x)))))

        if self.norm_first:
            src = src + attend(self.norm1(src))
            return src + mlp(self.norm2(src))
        src = self.norm1(src + attend(src))
        return self.norm2(src + mlp(src))


def _allowed(mask: Tensor, name: str) -> Tensor:
    """Return PyTorch's mask in the op's form, True = may attend."""
    return ~mask if mask.dtype == torch.bool else bool_mask(mask, name)

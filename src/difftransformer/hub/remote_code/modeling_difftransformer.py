"""The Differential Transformer (arXiv:2410.05258) in one file that needs torch and transformers (5.17 or newer) alone.

Attention runs on scaled_dot_product_attention ("sdpa"), once for each map, or on plain matrix products ("eager"), which
can return the maps. The package `difftransformer` opens the same folder with fused kernels, and trains such models.

Dimensions in comments: B batch, T queries, S keys, H heads, G key/value heads, N second maps, D width of a map, E width of a
value, M width of the model.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import can_return_tuple

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
LOW_PRECISION = (torch.float16, torch.bfloat16)
SIGNAL_HEADS_PER_NOISE_HEAD = (4, 3)
ATTENTION_TYPES = ("softmax", "dex", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2")
V2 = ("diff_v2", "grouped_diff_v2")


class DiffTransformerConfig(PreTrainedConfig):
    """Configuration of a decoder, or of a bidirectional encoder, in Llama's field names.

    `num_attention_heads`, `num_key_value_heads` and `head_dim` describe the Transformer of the same size. The attention types
    derive their own heads from these (see `Heads`), unless the fields below set them.

    Args:
        attention_type: "softmax", "diff" (DIFF V1), "diff_v2", "grouped_diff" (arXiv:2510.06949),
            "grouped_diff_v2" (Motif 3, arXiv:2608.09119) or "dex" (arXiv:2505.16333).
        is_causal: False makes a bidirectional encoder.
        qk_norm: Whether each map's queries and keys are normalised before they are rotated.
        num_differential_heads, num_differential_key_value_heads, value_head_dim: Heads of a differential layer and the width of
            a value; None derives them.
        num_noise_heads: Second maps of a grouped layer; None means a fourth of the signal heads, or a third.
        lambda_form: "layer", "head", "scalar", "token" or "constant"; None means "token" in both V2 types and "layer"
            elsewhere.
        lambda_init: Constant term of lambda, and 1 minus the factor after the norm; None means 0.8 - 0.6 exp(-0.3 layer),
            layers counted from 0.
        lambda_value: Constant term of lambda alone; None means lambda_init.
        head_norm: Norm of each head: "gain", "plain" or "none"; None means "none" in both V2 types and "gain" elsewhere.
        head_scale: Factor of each head alone; None means 1 - lambda_init after a norm, and 1 without one.
        softmax_head_norm: Norm of each head of "softmax".
        shared_key: Whether both maps read one key; None means True in both V2 types and False elsewhere.
        output_gate: Whether heads of "grouped_diff_v2" have a gate.
        dex_heads: Extended heads of each layer of "dex"; None means all.
        initialization: "fan_in" or "normal", the distributions of matrices that are not in the files (see `_init_matrix`).
            Files that do not state it mean "normal".
        embedding_multiplier: Factor of the embeddings before the first layer, also of `inputs_embeds`; None means
            sqrt(hidden_size) with "fan_in" and 1 with "normal".
        depth_scaled_residual: Whether o_proj and down_proj start divided by sqrt(2 num_hidden_layers).
        mimetic_attention: Whether attention started as a lookup of like tokens, which this file cannot draw.
        attn_backend: Not used here; the package `difftransformer` reads it.
    """

    model_type = "difftransformer"
    keys_to_ignore_at_inference = ["past_key_values"]

    attention_type: str = "diff"
    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = None  # type: ignore[assignment]  # filled in below, like the next two
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    is_causal: bool = True
    initialization: str = "fan_in"
    initializer_range: float = 0.02
    embedding_multiplier: float = None  # type: ignore[assignment]
    depth_scaled_residual: bool = False
    mimetic_attention: bool = False
    tie_word_embeddings: bool = True
    use_cache: bool = True
    attn_backend: str = "auto"
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    num_differential_heads: int | None = None
    num_differential_key_value_heads: int | None = None
    value_head_dim: int | None = None
    num_noise_heads: int | None = None
    lambda_form: str | None = None
    lambda_init: float | None = None
    lambda_value: float | None = None
    head_norm: str | None = None
    head_scale: float | None = None
    softmax_head_norm: str = "none"
    head_norm_eps: float = 1e-5
    shared_key: bool | None = None
    output_gate: bool = True
    dex_heads: list[list[int]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = round(8 * self.hidden_size / 3)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is None and "rope_theta" not in kwargs:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        if self.initialization == "mimetic":  # the name of early versions
            self.initialization, self.mimetic_attention = "normal", True
        if self.embedding_multiplier is None:
            self.embedding_multiplier = self.hidden_size**0.5 if self.initialization == "fan_in" else 1.0
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict({"initialization": "normal", **config_dict}, **kwargs)


def widened(x: Tensor) -> Tensor:
    """Return low precision in fp32, and the rest as it is."""
    return x.float() if x.dtype in LOW_PRECISION else x


@dataclass(frozen=True)
class Heads:
    """How the projections of a layer divide into heads.

    Rows of q_proj are N groups of H / N queries of the first map and, with a second map, the query that these heads share. Rows
    of k_proj are `cached` groups of first keys and, with keys of their own for both maps, one second key. DIFF V1 has N = H.
    """

    heads: int  # H
    key_value_heads: int  # G
    second_maps: int  # N; H where there is only one map
    head_dim: int  # D
    value_dim: int  # E
    is_differential: bool
    shared_key: bool  # whether all maps of a head read one key

    @classmethod
    def of(cls, config: DiffTransformerConfig) -> "Heads":
        """Derive the heads of an attention type from those of the Transformer of the same size."""
        kind, total, keys = config.attention_type, config.num_attention_heads, config.num_key_value_heads
        width = config.head_dim
        if kind in ("softmax", "dex"):
            return cls(total, keys, total, width, width, False, True)
        if kind not in ATTENTION_TYPES:
            raise ValueError(f"attention_type={kind!r}: this file has {', '.join(ATTENTION_TYPES)}")
        share = 1 if kind in V2 else 2  # heads of the Transformer that make one
        heads, groups = config.num_differential_heads, config.num_differential_key_value_heads
        noise = None
        if kind.startswith("grouped"):
            noise = config.num_noise_heads
            if heads is None:
                if noise is None:
                    noise = next(total // (r + 1) for r in SIGNAL_HEADS_PER_NOISE_HEAD if total % (r + 1) == 0)
                heads = total - noise
            elif noise is None:
                noise = next(heads // r for r in SIGNAL_HEADS_PER_NOISE_HEAD if heads % r == 0)
            if groups is None and kind in V2:
                groups = math.gcd(keys, noise)
            elif groups is None:  # so that G + min(G, N) keys are as many as the Transformer has
                groups = keys - noise if keys > 2 * noise else keys // 2
        heads, groups = heads or total // share, groups or keys // share
        shared = kind in V2 if config.shared_key is None else config.shared_key
        value = config.value_head_dim or share * width
        return cls(heads, groups, noise or heads, width, value, True, shared)

    @property
    def cached(self) -> int:
        """Number of heads of the cached tensors."""
        return min(self.key_value_heads, self.second_maps)

    @property
    def query_rows(self) -> int:
        """Queries in one of the N groups."""
        return self.heads // self.second_maps + self.is_differential

    @property
    def key_rows(self) -> int:
        """Keys in one of the cached groups."""
        return self.key_value_heads // self.cached + (not self.shared_key)


class KeepsFloat32(nn.Module):
    """A module whose `kept` parameters and buffers stay in fp32 when the model is cast to low precision."""

    kept: tuple[str, ...] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = {name: getattr(self, name).detach() for name in self.kept}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = getattr(self, name)
            if moved.dtype in LOW_PRECISION:
                moved.data = tensor.to(moved.device, torch.float32)
        return self


class RotaryEmbedding(KeepsFloat32, LlamaRotaryEmbedding):
    """Cosine and sine, (B, T, D) in fp32, for the width of one map."""

    kept = ("inv_freq", "original_inv_freq")

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(torch.empty(0, device=position_ids.device), position_ids)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_(i + D/2)) of (B, T, heads, D) by its angle, in fp32."""
    wide = widened(x)
    cos, sin = cos.unsqueeze(2).to(wide.dtype), sin.unsqueeze(2).to(wide.dtype)
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32; without `gain` there is no weight."""

    def __init__(self, size: int, eps: float, gain: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        wide = widened(x)
        weight = None if self.weight is None else self.weight.to(wide.dtype)
        return F.rms_norm(wide, x.shape[-1:], weight, self.eps).to(x.dtype)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scaling Q K^T) V, (B, T, H, E), and the map, (B, H, T, S); both in fp32 or wider."""
    shared = query.shape[1] // key.shape[1]
    query, key, value = (widened(x) for x in (query, key, value))
    scores = query @ key.repeat_interleave(shared, 1).mT * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ value.repeat_interleave(shared, 1)).transpose(1, 2), weights


class Attention(KeepsFloat32):
    """Multi-head attention of all types.

    softmax              head = A1 V
    dex                  head = A1 V, minus lambda A1 V W on the extended heads
    diff, grouped_diff   head = (1 - lambda_init) RMSNorm((A1 - lambda A2) V)
    diff_v2              head = (A1 - lambda A2) V
    grouped_diff_v2      the same, and sigmoid(X W_G) scales the heads unless output_gate is False

    with A = softmax(Q K^T / sqrt(D)), and lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init of the layer, or sigmoid(X w) of a
    token and head, or lambda_init plus a learned number (arXiv:2410.05258 eq. 1-3, arXiv:2510.06949, arXiv:2505.16333).
    """

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, config.is_causal
        self.heads = heads = Heads.of(config)
        self.num_key_value_groups = heads.heads // heads.key_value_heads  # transformers' attention functions read it
        width, D = config.hidden_size, heads.head_dim
        self.q_proj = nn.Linear(width, heads.second_maps * heads.query_rows * D, bias=False)
        self.k_proj = nn.Linear(width, heads.cached * heads.key_rows * D, bias=False)
        self.v_proj = nn.Linear(width, heads.key_value_heads * heads.value_dim, bias=False)
        self.o_proj = nn.Linear(heads.heads * heads.value_dim, width, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.head_norm: nn.Module | None = None
        self.head_scale = 1.0
        if heads.is_differential:
            self._add_lambda()
            if config.attention_type == "grouped_diff_v2" and config.output_gate:
                self.gate_proj = nn.Linear(width, heads.heads * heads.value_dim, bias=False)
        elif config.attention_type == "dex":
            chosen = range(heads.heads) if config.dex_heads is None else config.dex_heads[layer_idx]
            self.dex_heads = sorted(chosen)
            self.dex_lambda = nn.Parameter(torch.zeros(len(self.dex_heads)))
            self.dex_proj = nn.Parameter(torch.empty(len(self.dex_heads), heads.value_dim, heads.value_dim))
        else:
            self._add_norm(config.softmax_head_norm)

    def _add_norm(self, kind: str) -> None:
        if kind != "none":
            self.head_norm = RMSNorm(self.heads.value_dim, self.config.head_norm_eps, gain=kind == "gain")

    def _add_lambda(self) -> None:
        config, heads = self.config, self.heads
        is_v2 = config.attention_type in V2
        self.lambda_form = config.lambda_form or ("token" if is_v2 else "layer")
        head_norm = config.head_norm or ("none" if is_v2 else "gain")
        by_depth = 0.8 - 0.6 * math.exp(-0.3 * self.layer_idx)
        lambda_init = by_depth if config.lambda_init is None else config.lambda_init
        self.lambda_value = lambda_init if config.lambda_value is None else config.lambda_value
        self._add_norm(head_norm)
        if config.head_scale is not None:
            self.head_scale = config.head_scale
        elif head_norm != "none":
            self.head_scale = 1 - lambda_init
        if self.lambda_form in ("layer", "head"):
            shape = (heads.head_dim,) if self.lambda_form == "layer" else (heads.heads, heads.head_dim)
            for name in LAMBDA_VECTORS:
                setattr(self, name, nn.Parameter(torch.empty(shape, dtype=torch.float32)))
            self.kept = LAMBDA_VECTORS
        elif self.lambda_form == "scalar":
            self.lambda_offset = nn.Parameter(torch.empty(1, dtype=torch.float32))
            self.kept = ("lambda_offset",)
        elif self.lambda_form == "token":
            self.lambda_proj = nn.Linear(config.hidden_size, heads.heads, bias=False)

    def init_weights(self) -> None:
        """Initialise the parameters that are neither projections nor norms."""
        for name in self.kept:
            init.normal_(getattr(self, name), mean=0.0, std=0.0 if name == "lambda_offset" else 0.1)
        if self.config.attention_type == "dex":
            init.zeros_(self.dex_lambda)
            init.normal_(self.dex_proj, mean=0.0, std=self.heads.value_dim**-0.5)

    def lam(self, hidden: Tensor) -> Tensor:
        """Return lambda in fp32 or wider, with four dimensions that broadcast to (B, T, H, 1)."""
        if self.lambda_form == "constant":
            return torch.full((1, 1, 1, 1), self.lambda_value, dtype=widened(hidden).dtype, device=hidden.device)
        if self.lambda_form == "token":
            return widened(self.lambda_proj(hidden)).sigmoid().unsqueeze(-1)
        if self.lambda_form == "scalar":
            return (widened(self.lambda_offset) + self.lambda_value).view(1, 1, 1, 1)
        q1, k1, q2, k2 = (widened(getattr(self, name)) for name in LAMBDA_VECTORS)
        lam = (q1 * k1).sum(-1).exp() - (q2 * k2).sum(-1).exp() + self.lambda_value
        return lam.view(1, 1, -1, 1)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, T, M) to (B, T, M), and return the map (B, H, T, S), or A1 - lambda A2, where "eager" forms it."""
        heads, (batch, length, _), width = self.heads, hidden.shape, self.heads.head_dim
        query = self.q_norm(self.q_proj(hidden).view(batch, length, -1, width))
        key = self.k_norm(self.k_proj(hidden).view(batch, length, -1, width))
        query, key = (rotate(x, *position_embeddings) for x in (query, key))
        key = key.view(batch, length, heads.cached, -1).transpose(1, 2)
        value = self.v_proj(hidden).view(batch, length, heads.cached, -1).transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        # (B, groups, heads of a group, positions, width); what follows the first map's heads belongs to the second.
        query = query.view(batch, length, heads.second_maps, -1, width).permute(0, 2, 3, 1, 4)
        key = key.unflatten(-1, (-1, width)).transpose(2, 3)
        value = value.unflatten(-1, (-1, heads.value_dim)).transpose(2, 3).flatten(1, 2)
        queries, keys = heads.heads // heads.second_maps, heads.key_value_heads // heads.cached
        first_query, first_key = query[:, :, :queries].flatten(1, 2), key[:, :, :keys].flatten(1, 2)
        attend = partial(
            ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention),
            self,
            value=value,
            attention_mask=attention_mask,
            scaling=width**-0.5,
        )
        out, weights = attend(first_query, first_key)
        if heads.is_differential:
            second_query = query[:, :, queries:].expand(-1, -1, queries, -1, -1).flatten(1, 2)
            second_key = first_key
            if not heads.shared_key:
                second_key = key[:, :, keys:].expand(-1, -1, keys, -1, -1).flatten(1, 2)
            second, second_weights = attend(second_query, second_key)
            lam = self.lam(hidden)
            out = widened(out) - lam * widened(second)
            if weights is not None:
                weights = weights - lam.transpose(1, 2) * second_weights
        elif self.config.attention_type == "dex":
            chosen = out[:, :, self.dex_heads]
            change = torch.einsum("bthe,hef->bthf", chosen, self.dex_proj.to(out.dtype))
            change = change * self.dex_lambda.to(out.dtype).view(-1, 1)
            out = out.index_add(2, torch.tensor(self.dex_heads, device=out.device), -change)
        if self.head_norm is not None:
            out = self.head_norm(out)
        if self.head_scale != 1:
            out = out * self.head_scale
        out = out.to(hidden.dtype).flatten(2)
        if hasattr(self, "gate_proj"):
            out = out * self.gate_proj(hidden).sigmoid()
        return self.o_proj(out), weights


class SwiGLU(nn.Module):
    """(act(x W_gate) * x W_up) W_down."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each added to the residual stream after a norm."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, **attention: Any) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.self_attn(self.input_layernorm(hidden), **attention)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), weights


class DiffTransformerPreTrainedModel(PreTrainedModel):
    """Base of the models: initialisation, and what transformers may do with them."""

    config: DiffTransformerConfig
    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = [*LAMBDA_VECTORS, "lambda_offset"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Attention):
            module.init_weights()
        elif isinstance(module, (nn.Linear, nn.Embedding)) and not getattr(module.weight, "_is_hf_initialized", False):
            self._init_matrix(module)

    def _init_matrix(self, module: nn.Linear | nn.Embedding) -> None:
        """Turn a draw from N(0, initializer_range^2) into the start of the configuration.

        With "fan_in", linear layers are from U(-1/sqrt(d_in), 1/sqrt(d_in)) and embeddings and the output layer from N(0, 1/M).

        Raises:
            ValueError: The start is mimetic.
        """
        config, weight, layers = self.config, module.weight, self.base_model.layers
        if config.mimetic_attention and any(module is part for layer in layers for part in layer.self_attn.children()):
            raise ValueError(
                "mimetic_attention=True: this file opens such models and cannot start one; use the package difftransformer"
            )
        if config.initialization == "fan_in":
            is_resized = all(module is not part for part in self.modules())
            if isinstance(module, nn.Embedding) or module is self.get_output_embeddings() or is_resized:
                weight.mul_(config.hidden_size**-0.5 / config.initializer_range)  # a padding token's row stays 0
            else:
                bound = weight.shape[1] ** -0.5
                init.uniform_(weight, -bound, bound)
        ends = (end for layer in layers for end in (layer.self_attn.o_proj, layer.mlp.down_proj))
        if config.depth_scaled_residual and any(module is end for end in ends):
            weight.div_(math.sqrt(2 * config.num_hidden_layers))


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """The model without an output layer: a decoder, or a bidirectional encoder where config.is_causal is False."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states; the arguments are LlamaModel's. Maps need attn_implementation="eager"."""
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        need_maps = config.output_attentions if output_attentions is None else output_attentions
        if need_maps and config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True with attn_implementation={config._attn_implementation!r}: only 'eager' computes the "
                "maps; call model.set_attn_implementation('eager')"
            )
        need_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if config.embedding_multiplier != 1:
            hidden = hidden * config.embedding_multiplier
        if self.training and self.gradient_checkpointing:
            past_key_values, use_cache = None, False
        if use_cache is None:
            use_cache = config.use_cache and config.is_causal and not self.training
        if not config.is_causal and (use_cache or past_key_values is not None):
            raise ValueError("is_causal=False: an encoder has no cache; pass use_cache=False")

        # Packed documents are recognised where position ids restart and there is neither a mask nor a cache.
        make_mask = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
        mask = make_mask(config, hidden, attention_mask, past_key_values, position_ids=position_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + seen).unsqueeze(0)
        position_embeddings = self.rotary_emb(position_ids)

        all_hidden, all_maps = [], []
        for layer in self.layers:
            all_hidden.append(hidden)
            hidden, weights = layer(
                hidden,
                position_embeddings=position_embeddings,
                attention_mask=mask,
                past_key_values=past_key_values,
            )
            all_maps.append(weights)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*all_hidden, hidden) if need_hidden else None,
            attentions=tuple(all_maps) if need_maps else None,
        )


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):
    """The language model; `forward` and `generate` behave like those of LlamaForCausalLM."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DiffTransformerConfig) -> None:
        if not config.is_causal:
            raise ValueError("is_causal=False: an encoder generates no text; use DiffTransformerForMaskedLM")
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss of the next tokens if `labels`, shifted inside, are given."""
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache, **kwargs
        )
        hidden = outputs.last_hidden_state
        if not isinstance(logits_to_keep, int):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _get_static_cache_init_shape(self) -> None:
        """Allocate a static cache at its first update: the configuration's heads are those of the plain Transformer."""
        return None


class DiffTransformerForMaskedLM(DiffTransformerPreTrainedModel):
    """The encoder with the output layer that predicts masked tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DiffTransformerConfig) -> None:
        if config.is_causal:
            raise ValueError("is_causal=True: a masked token must see the tokens after it; set is_causal=False")
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute logits, and the loss if `labels` (-100 where nothing is masked) are given."""
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class DiffTransformerForSequenceClassification(GenericForSequenceClassification, DiffTransformerPreTrainedModel):
    """A linear layer on the hidden state of each row's last token that is not padding."""


class DiffTransformerForTokenClassification(GenericForTokenClassification, DiffTransformerPreTrainedModel):
    """A linear layer on the hidden state of every token."""


class DiffTransformerForQuestionAnswering(GenericForQuestionAnswering, DiffTransformerPreTrainedModel):
    """Logits of the first and the last token of an answer."""


# The heads above make their model by AutoModel, and saving copies this file for classes that are registered. Trainer shifts
# smoothed labels by the table of names. `transformers serve` looks for the class in the module that it knows as `transformers`.
AutoModel.register(DiffTransformerConfig, DiffTransformerModel, exist_ok=True)
for _auto_class, _model_class in (
    ("AutoModel", DiffTransformerModel),
    ("AutoModelForCausalLM", DiffTransformerForCausalLM),
    ("AutoModelForMaskedLM", DiffTransformerForMaskedLM),
    ("AutoModelForSequenceClassification", DiffTransformerForSequenceClassification),
    ("AutoModelForTokenClassification", DiffTransformerForTokenClassification),
    ("AutoModelForQuestionAnswering", DiffTransformerForQuestionAnswering),
):
    _model_class.register_for_auto_class(_auto_class)
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DiffTransformerConfig.model_type] = DiffTransformerForCausalLM.__name__
_server = sys.modules.get("transformers.cli.serving.model_manager")
if _server is not None:
    _server.transformers.DiffTransformerForCausalLM = DiffTransformerForCausalLM

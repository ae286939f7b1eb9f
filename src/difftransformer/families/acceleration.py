"""Run the attention of transformers' DiffLlama on this package's operator, in place.

The attention layers get another class with a forward that calls `normed_differential_attention` once, where DiffLlama calls
softmax attention twice, each time with repeated values. Parameters, state dict and cache stay the same.

DiffLlama pairs heads by halves: differential head i has the maps i and H + i; key group g has the keys g and G + g and the
value [V_g; V_(G + g)]. The operator takes each pair side by side in the last dimension. The rotation writes queries in that
order, and keys if there is no cache. Values and cached keys are copied into it, because no strides can express it with more
than one group.

Dimensions: B batch, T new positions, S key positions, H differential heads, G their key/value groups, D width of one map.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from ..attention.constants import Constants
from ..errors import ConfigError
from ..ops import apply_rotary, normed_differential_attention
from ..ops.problem import LOW_PRECISION

Module = TypeVar("Module", bound=nn.Module)

# Arguments of transformers' attention functions that the operator does not support.
NOT_IN_THE_OP = ("position_bias", "softcap", "s_aux", "head_mask", "cache")
# Values of attn_implementation with masks that the operator can read: bool or None ("sdpa"), and additive ("eager").
ATTN_IMPLEMENTATIONS = ("sdpa", "eager")


def accelerate(model: Module) -> Module:
    """Compute the attention of a DiffLlama with this package's operator, until `restore(model)`.

    Outputs, gradients, state dict and caches stay the same: up to rounding in fp32, and closer to fp32 in low precision.
    Generation, training, `save_pretrained`, copies and `torch.compile` work as before. Calls that the operator does not
    support run the model's own code: attention maps (`output_attentions`), masks that add a bias, dropout of attention
    weights, and any attn_implementation that is set later. Positions that may attend to nothing, such as left padding, give
    zeros, as with "sdpa"; DiffLlama's "eager" gives them a mean over all keys.

    Args:
        model: DiffLlama of transformers with attn_implementation "sdpa" or "eager", or a module that contains one. It is
            changed in place; one that is accelerated already stays so.

    Returns:
        The model.

    Raises:
        ConfigError: The module contains no DiffLlama, or one with attention layers or an attn_implementation that are not
            supported. The model is left unchanged.
    """
    layers = _layers_of(model)
    if not layers:
        raise ConfigError(
            f"accelerate: {type(model).__name__} holds no DiffLlama; pass a DiffLlamaForCausalLM (a DiffTransformer model uses "
            "the attention operator already, and softmax attention of other models stays transformers' own)"
        )
    for name, layer in layers:
        _check_layer(name, layer)
    for _, layer in layers:
        if type(layer) is DiffLlamaAttention:
            layer.__class__ = AcceleratedDiffLlamaAttention
            init = layer.lambda_init
            layer.add_constants(layer.q_proj.weight, lambda_value=init, head_scale=1 - init)
    return model


def restore(model: Module) -> Module:
    """Undo `accelerate`. A model that was not accelerated stays unchanged.

    Args:
        model: The accelerated model, or a copy of it.

    Returns:
        The model.
    """
    for _, layer in _layers_of(model):
        if type(layer) is AcceleratedDiffLlamaAttention:
            layer.__class__ = DiffLlamaAttention
            for name in layer.__dict__.pop("_numbers"):
                delattr(layer, name)
    return model


def _layers_of(model: nn.Module) -> list[tuple[str, Any]]:
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return [(name, module) for name, module in modules if isinstance(module, DiffLlamaAttention)]


def _check_layer(name: str, layer: DiffLlamaAttention) -> None:
    if type(layer) not in (DiffLlamaAttention, AcceleratedDiffLlamaAttention) or "forward" in vars(layer):
        raise ConfigError(
            f"accelerate: layer {name} is a {type(layer).__name__} whose forward was replaced; accelerate the model before "
            "adding hooks, sharding or other changes to its attention layers"
        )
    implementation = layer.config._attn_implementation
    if implementation not in ATTN_IMPLEMENTATIONS:
        raise ConfigError(
            f"accelerate: layer {name} has attn_implementation={implementation!r}, whose masks only its own kernels can read; "
            "call model.set_attn_implementation('sdpa') first"
        )


class AcceleratedDiffLlamaAttention(Constants, DiffLlamaAttention):
    """DiffLlama's attention layer with one call of the operator. `accelerate` makes it.

    Attributes:
        backend: Backend of the operator.
    """

    __getattr__: Any  # what DiffLlama's class sets
    backend: str = "auto"

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, T, M) to (B, T, M), and return None in place of the maps. Unsupported calls run DiffLlama's forward."""
        if not self._is_supported(attention_mask, kwargs):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        batch, length = hidden_states.shape[:2]
        # DiffLlama's tables hold every angle twice.
        cos_BTF, sin_BTF = (table.chunk(2, -1)[0] for table in position_embeddings)
        rotation_of_pairs = cos_BTF.unsqueeze(-2), sin_BTF.unsqueeze(-2)
        query, key, value = (
            projection(hidden_states).view(batch, length, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query_BHTX = apply_rotary(_by_pairs(query), *rotation_of_pairs).flatten(3).transpose(1, 2)
        is_causal = attention_mask is None and length > 1 and self._no_mask_is_causal(kwargs)
        if past_key_values is None:
            key_BGSX = apply_rotary(_by_pairs(key), *rotation_of_pairs).flatten(3).transpose(1, 2)
            value_BGSX = _by_pairs(value).flatten(3).transpose(1, 2)
        else:
            key = apply_rotary(key, cos_BTF, sin_BTF).transpose(1, 2)
            key, value = past_key_values.update(key, value.transpose(1, 2), self.layer_idx)
            if is_causal:
                # Without a mask the cache was empty, so the later slots of a static cache are not filled yet.
                key, value = key[:, :, :length], value[:, :, :length]
            key_BGSX, value_BGSX = (
                _by_pairs(cached.transpose(1, 2)).transpose(1, 2).flatten(3) for cached in (key, value)
            )
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = ~_is_forbidding(mask)
        if mask is not None and length == key_BGSX.shape[2] and _is_causal(mask):
            is_causal = True  # so that kernels skip what the mask forbids
        norm = self.groupnorm
        heads_BHTX = normed_differential_attention(
            query_BHTX,
            key_BGSX.to(query.dtype),  # under autocast, DiffLlama's own forward caches fp32
            value_BGSX.to(query.dtype),
            self._lam(query.dtype),
            None,
            eps=torch.finfo(query.dtype).eps if norm.eps is None else norm.eps,
            factor=self.constant("head_scale", query),
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scaling,
            backend=self.backend,
        )
        return self.o_proj(heads_BHTX.transpose(1, 2).flatten(2)), None

    def _is_supported(self, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
        if self.config._attn_implementation not in ATTN_IMPLEMENTATIONS:
            return False
        if kwargs.get("output_attentions", self.config.output_attentions):
            return False
        if any(kwargs.get(name) is not None for name in NOT_IN_THE_OP):
            return False
        return mask is None or _only_allows_and_forbids(mask)

    def _no_mask_is_causal(self, kwargs: dict[str, Any]) -> bool:
        """Whether attention without a mask is causal: under "sdpa" unless the caller passes is_causal, under "eager" never."""
        given = kwargs.get("is_causal")
        return self.config._attn_implementation == "sdpa" and bool(self.is_causal if given is None else given)

    def _lam(self, dtype: torch.dtype) -> Tensor:
        """Return lambda (arXiv:2410.05258 eq. 2), rounded as DiffLlama rounds it, except that it is never below fp32."""
        vectors = (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        q1, k1, q2, k2 = (vector.float() if vector.dtype in LOW_PRECISION else vector for vector in vectors)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        first, second = (
            torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(wide) for q, k in ((q1, k1), (q2, k2))
        )
        return first - second + self.constant("lambda_value", first)


def _by_pairs(x_BTXD: Tensor) -> Tensor:
    """View (B, T, 2 N, D), whose heads are paired by halves, as (B, T, N, 2, D)."""
    return x_BTXD.unflatten(2, (2, -1)).transpose(2, 3)


def _only_allows_and_forbids(mask: Tensor) -> bool:
    """Whether a mask only allows or forbids keys, equally for both maps. Additive masks are read, so they cannot be traced."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    if mask.dtype == torch.bool:
        return True
    if not mask.is_floating_point() or torch.compiler.is_compiling():
        return False
    return bool(((mask == 0) | _is_forbidding(mask)).all())


def _is_forbidding(mask: Tensor) -> Tensor:
    """Where an additive mask excludes a key. transformers writes the lowest number of the dtype there, others -inf."""
    return mask <= torch.finfo(mask.dtype).min / 2


def _is_causal(mask: Tensor) -> bool:
    """Whether no query may attend to a later key. Read only on the CPU outside torch.compile; False elsewhere."""
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not bool(mask.triu(1).any())

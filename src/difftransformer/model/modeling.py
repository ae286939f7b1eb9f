"""The language model: a Llama-style decoder whose attention is chosen by one word. Read this file first.

    hidden = embed_tokens(ids)
    for each layer:
        hidden = hidden + self_attn(input_layernorm(hidden))              # attention/: softmax, diff, ...
        hidden = hidden + mlp(post_attention_layernorm(hidden))           # SwiGLU
    logits = lm_head(norm(hidden))

(arXiv:2410.05258 section 2.2.) A DIFF model and its Transformer twin are the same classes with another
`config.attention_type`, so that nothing but attention differs between them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import can_return_tuple

from ..attention import Attention, RMSNorm
from ..errors import ConfigError, ShapeError
from ..ops.problem import LOW_PRECISION
from .card import inherited_training, model_card, write_card
from .config import DiffTransformerConfig
from .restrictions import attention_restrictions, packed_starts

# transformers' attn_implementation -> our backend. None leaves the choice to config.attn_backend.
ATTN_IMPLEMENTATIONS: dict[str, str | None] = {
    "difftransformer": None,
    "eager": "reference",
    "sdpa": "sdpa",
    "flash_attention_2": "flash",
    "flex_attention": "flex",
}


class RotaryEmbedding(LlamaRotaryEmbedding):  # type: ignore[misc]
    """transformers' rotary tables for one map's width. The frequencies stay in fp32: in bf16 long positions would blur."""

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, (B, T, D / 2) each in fp32: one value for each pair of features."""
        fp32 = torch.empty(0, device=position_ids.device, dtype=torch.float32)
        cos, sin = super().forward(fp32, position_ids)
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, kept in before.items():
            moved = getattr(self, name)
            if moved.dtype in LOW_PRECISION:
                setattr(self, name, kept.to(moved.device, torch.float32))
        return self


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down (arXiv:2410.05258 section 2.2)."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, M) to (B, T, M)."""
        gated: Tensor = self.activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(gated)


class DecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """One layer: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: DiffTransformerConfig, layer_index: int) -> None:
        super().__init__()
        self.self_attn = config.attention.from_config(config, layer_index)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, *, past_key_values: Cache | None = None, need_map: bool = False, **attention: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, M) to (B, T, M), and the layer's attention map if it is asked for."""
        attended, attention_map = self.self_attn(
            self.input_layernorm(hidden), cache=past_key_values, need_map=need_map, **attention
        )
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), attention_map


class DiffTransformerPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What transformers needs to know of both models."""

    config: DiffTransformerConfig
    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config: DiffTransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._keep_in_fp32_modules_strict = list(config.attention.fp32_parameters)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Attention):
            module.init_own_parameters(init.normal_)
            if self.config.initialization == "mimetic":
                module.init_mimetic(init.normal_, init.copy_)

    def _initialize_weights(self, module: nn.Module, *_: Any) -> None:
        # For classes outside transformers the base skips modules without parameters of their own; an attention layer may
        # have none, and still has its projections to start. The functions of `init` leave loaded weights alone.
        super()._initialize_weights(module)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        # transformers would pass no mask at all for a name that it does not know; here every name has its backend.
        name = attn_implementation or "difftransformer"
        if name not in ATTN_IMPLEMENTATIONS:
            raise ConfigError(
                f"attn_implementation={name!r} is not supported; choose one of {', '.join(ATTN_IMPLEMENTATIONS)}"
            )
        backend = ATTN_IMPLEMENTATIONS[name] or self.config.attn_backend
        for module in self.modules():
            if isinstance(module, Attention):
                module.backend = backend
        return name

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        """As transformers' own, with a model card (README.md) unless a person's is there.

        Adapters and a push to a hub get the cards that PEFT and transformers write.
        """
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        adapters, pushed = getattr(self, "_hf_peft_config_loaded", False), options.get("push_to_hub", False)
        folder = Path(save_directory)
        if is_main_process and folder.is_dir() and not adapters and not pushed:
            training = inherited_training(Path(self.name_or_path)) if self.name_or_path else None
            name, architecture = folder.resolve().name, type(self).__name__
            write_card(folder, model_card(self.config, name=name, architecture=architecture, training=training))

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @staticmethod
    def create_masks_for_generate(
        *,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> Tensor | None:
        """The 2-D mask itself, as wide as the static cache so that its shape does not change from step to step."""
        if attention_mask is None or past_key_values is None or bool(attention_mask.all()):
            return None
        keys, offset = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)
        return nn.functional.pad(attention_mask, (0, max(0, keys + offset - attention_mask.shape[1])), value=1)


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """The decoder without its output layer."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()
        self._check_and_adjust_attn_implementation(config._attn_implementation)

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
        cu_seq_lens_q: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of every token.

        Args:
            input_ids: (B, T) token ids; or pass inputs_embeds.
            attention_mask: (B, past + T), 0 for padding on either side; or a bool mask that broadcasts to (B, H, T, S)
                and stands for every restriction, causality included.
            position_ids: (B, T). Where they do not go on by one, a new packed document starts that sees nothing before it.
            past_key_values: A cache of transformers; new keys and values are appended.
            inputs_embeds: (B, T, M) in place of input_ids.
            use_cache: Make a DynamicCache if none is given; the default is config.use_cache, and False in training.
            output_attentions: Also return every layer's map, (B, H, T, S) in fp32 (A1 - lambda A2 for "diff"); needs
                attn_implementation="eager".
            output_hidden_states: Also return the input of every layer and the final hidden states.
            cu_seq_lens_q: (N + 1,) cumulative lengths of documents packed in a single row.

        Raises:
            ShapeError: not exactly one of input_ids and inputs_embeds, or a mask that does not fit.
            ConfigError: maps are asked of an implementation that does not form them.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("pass exactly one of input_ids and inputs_embeds")
        need_maps = self.config.output_attentions if output_attentions is None else output_attentions
        if need_maps and self.config._attn_implementation != "eager":
            raise ConfigError(
                f"output_attentions=True with attn_implementation={self.config._attn_implementation!r}: only 'eager' forms "
                "the maps; call model.set_attn_implementation('eager')"
            )
        need_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = hidden.shape[:2]
        checkpointing = self.training and self.gradient_checkpointing
        if checkpointing:
            past_key_values, use_cache = None, False
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        starts = None
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        places = torch.arange(length, device=hidden.device) + seen
        if position_ids is None:
            position_ids = places.unsqueeze(0)
        elif length > 1 and cu_seq_lens_q is None:
            mask = None
            if attention_mask is not None and attention_mask.dim() == 2 and len(attention_mask) == batch:
                # Not its last columns: for a static cache the mask is as wide as the cache. A mask too narrow is refused below.
                mask = attention_mask[:, places.clamp(max=attention_mask.shape[1] - 1)]
            starts = packed_starts(position_ids.expand(batch, length), mask)
            if not torch.compiler.is_compiling() and not bool(starts.any()):
                starts = None
        # Rows of packed documents without a cache or padding are laid end to end: one row, no T x S mask.
        flatten = (
            starts is not None
            and past_key_values is None
            and attention_mask is None
            and not need_maps
            and not torch.compiler.is_compiling()
        )
        if flatten and starts is not None:
            starts[:, 0] = True
            hidden, starts = hidden.reshape(1, batch * length, -1), starts.reshape(1, -1)
            position_ids = position_ids.expand(batch, length).reshape(1, -1)
        restrictions = attention_restrictions(
            batch=hidden.shape[0],
            length=hidden.shape[1],
            device=hidden.device,
            attention_mask=attention_mask,
            starts=starts,
            cu_seqlens=cu_seq_lens_q,
            cache=past_key_values,
            window=self.config.sliding_window,
        )
        position_embeddings = self.rotary_emb(position_ids)

        all_hidden, all_maps = [], []
        for layer in self.layers:
            if need_hidden:
                all_hidden.append(hidden.view(batch, length, -1))
            hidden, attention_map = layer(
                hidden,
                past_key_values=past_key_values,
                need_map=need_maps,
                restrictions=restrictions,
                position_embeddings=position_embeddings,
            )
            if need_maps:
                all_maps.append(attention_map)
        hidden = self.norm(hidden).view(batch, length, -1)
        if need_hidden:
            all_hidden.append(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(all_hidden) if need_hidden else None,
            attentions=tuple(all_maps) if need_maps else None,
        )


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The language model. `forward` and `generate` behave as LlamaForCausalLM's."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self._check_and_adjust_attn_implementation(config._attn_implementation)

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
        """Logits of the next token, and the loss if labels are given.

        Args:
            input_ids: As in `DiffTransformerModel.forward`, like the arguments that are not listed here.
            attention_mask: See there.
            position_ids: See there.
            past_key_values: See there.
            inputs_embeds: See there.
            labels: (B, T) token ids, shifted inside; -100 is ignored. The loss is the mean in nats a token, or the sum
                over `num_items_in_batch` where that is given.
            use_cache: See there.
            logits_to_keep: Compute logits of this many last positions only (0 = all), or of the positions given.
            **kwargs: output_attentions, output_hidden_states, cu_seq_lens_q, num_items_in_batch, return_dict.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
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
        # For chunked prefill transformers would allocate the plain Transformer's heads. None leaves it to the first update.
        return None


AutoModel.register(DiffTransformerConfig, DiffTransformerModel, exist_ok=True)
AutoModelForCausalLM.register(DiffTransformerConfig, DiffTransformerForCausalLM, exist_ok=True)

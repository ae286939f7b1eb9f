"""The language model: a Llama-style decoder whose attention is chosen by one word. Read this file first.

Other output layers, and the encoder's, are in heads.py.

    hidden = embed_tokens(ids) * embedding_multiplier
    for each layer:
        hidden = hidden + self_attn(input_layernorm(hidden))              # attention/: softmax, diff, ...
        hidden = hidden + mlp(post_attention_layernorm(hidden))           # SwiGLU
    logits = lm_head(norm(hidden))

(arXiv:2410.05258 section 2.2.) A DIFF model and its Transformer twin are the same classes with another
`config.attention_type`, so that they differ in attention alone.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..attention import Attention, RMSNorm
from ..errors import ConfigError, ShapeError, on_one_line
from ..ops.problem import LOW_PRECISION
from ..typed import short
from .caches import PagedModel, PagedRow, cache_of_layer, dynamic_cache, regroup
from .config import DiffTransformerConfig
from .initialization import new_seed
from .masks import arrange_rows
from .nll import chunked_loss
from .pretrained import DiffTransformerPreTrainedModel
from .transformers_errors import FOREIGN_FAULTS

logger = logging.get_logger(__name__)


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down (arXiv:2410.05258 section 2.2)."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, T, M) to (B, T, M)."""
        gated: Tensor = self.activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(gated)


class DecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """One decoder layer: attention and MLP, each applied to the normalised residual stream."""

    def __init__(self, config: DiffTransformerConfig, layer_index: int) -> None:
        super().__init__()
        self.self_attn = config.attention.from_config(config, layer_index)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, *, past_key_values: Cache | None = None, need_map: bool = False, **attention: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, T, M) to (B, T, M). Also return the attention map if need_map is True, else None."""
        attended, attention_map = self.self_attn(
            self.input_layernorm(hidden), cache=past_key_values, need_map=need_map, **attention
        )
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), attention_map


class RotaryEmbedding(LlamaRotaryEmbedding):  # type: ignore[misc]
    """transformers' rotary tables for the width of one map. Frequencies stay in fp32: bf16 cannot tell far positions apart."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        try:
            super().__init__(config, *arguments, **options)
        except FOREIGN_FAULTS as error:
            raise ConfigError(
                f"rope_parameters={short(config.rope_parameters)}: transformers makes no rotary embedding of these "
                f"({type(error).__name__}: {on_one_line(error)})"
            ) from error
        if 2 * len(self.inv_freq) != config.head_dim:
            raise ConfigError(
                f"rope_parameters={short(config.rope_parameters)}: these turn {2 * len(self.inv_freq)} of {config.head_dim} "
                "features; leave partial_rotary_factor out"
            )

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, (B, T, D / 2) each: one value for each pair of features, in fp32 whatever hidden's dtype."""
        cos, sin = super().forward(hidden.new_empty(0, dtype=torch.float32), position_ids)
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


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """The model without an output layer: a decoder, or a bidirectional encoder where config.is_causal is False."""

    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": OutputRecorder(Attention, index=1)}

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self._seed = new_seed()  # before the modules, whose constructors draw too
        self.layout = config.head_layout()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()
        self._check_and_adjust_attn_implementation(config._attn_implementation)

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | list[int] | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **keywords: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of every token.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, past + T), 0 for padding on either side; or a mask that broadcasts to (B, H, T, S), bool
                (True = may attend) or additive (0 or -inf), and replaces every other restriction, causality included.
            position_ids: (B, T). A new packed document starts wherever they fall, or 0 follows 0; it sees nothing before its
                start. They may jump forward. Cached tokens belong to the first document of a row.
            past_key_values: Cache of transformers, to which new keys and values are appended.
            inputs_embeds: (B, T, M) embeddings in place of input_ids.
            use_cache: Whether to make a DynamicCache if none is given. Defaults to config.use_cache, and to False in
                training and without causality.
            output_attentions: Whether to return every layer's map, (B, H, T, S) in fp32 (A1 - lambda A2 for "diff"). Outputs
                are then computed from these maps, whatever the attn_implementation.
            output_hidden_states: Whether to return the input of every layer and the final hidden states, or the indices of
                those to return.
            cu_seq_lens_q: (N + 1,) cumulative lengths of documents packed in a single row.
            **keywords: What transformers' continuous batching passes beside these: its cache and places in it.

        Raises:
            ShapeError: Both or neither of input_ids and inputs_embeds are given, or a mask does not fit.
            ConfigError: A cache is requested from an encoder, or earlier tokens are passed beside gradient checkpointing.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("pass exactly one of input_ids and inputs_embeds")
        need_maps = self.config.output_attentions if output_attentions is None else output_attentions
        need_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.embedding_multiplier != 1:
            hidden = hidden * self.config.embedding_multiplier
        batch, length = hidden.shape[:2]
        # With a cache it may be wider, when a prompt comes in chunks or slots of the cache are still empty.
        width = attention_mask.shape[1] if attention_mask is not None and attention_mask.dim() == 2 else length
        if past_key_values is None and width > length:
            raise ShapeError(
                f"attention_mask covers {width} tokens, and {length} are given without past_key_values; pass the cache of the "
                f"others, or a mask of width {length}"
            )
        checkpointing = self.training and self.gradient_checkpointing
        if checkpointing:
            if past_key_values is not None and past_key_values.get_seq_length():
                raise ConfigError(
                    "past_key_values with gradient checkpointing: layers are computed twice, and would add their keys twice; "
                    "turn it off (gradient_checkpointing_disable) or pass no past"
                )
            if use_cache or past_key_values is not None:
                logger.warning_once(
                    "Caching is incompatible with gradient checkpointing in DecoderLayer. Setting `use_cache=False`, "
                    "`past_key_values=None`. Tokens that are generated one by one then see none before them: call eval() first"
                )
            past_key_values, use_cache = None, False
        if use_cache is None:
            use_cache = self.config.use_cache and self.config.is_causal and not self.training
        if not self.config.is_causal and (use_cache or past_key_values is not None):
            raise ConfigError(
                "is_causal=False: a bidirectional encoder neither has a cache nor generates text; use a causal model, or "
                "pass use_cache=False to encode"
            )
        if use_cache and past_key_values is None:
            past_key_values = dynamic_cache(self.config)
        if past_key_values is not None:
            regroup(past_key_values, self.layout)

        paged = PagedRow.of(self.layout, keywords)
        if paged is None:
            rows, positions, restrictions = arrange_rows(
                hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cu_seqlens=cu_seq_lens_q,
                cache=past_key_values,
                window=self.config.sliding_window,
                is_causal=self.config.is_causal,
                keep_rows=bool(need_maps or need_hidden),
            )
        else:
            assert position_ids is not None  # continuous batching passes both
            assert attention_mask is not None
            rows, positions, past_key_values = hidden, position_ids, paged
            restrictions = paged.restrictions(attention_mask)
        position_embeddings = self.rotary_emb(hidden, positions)

        for index, layer in enumerate(
            self.layers[: self.config.num_hidden_layers]
        ):  # fewer while assistant_early_exit drafts
            rows, _ = layer(
                rows,
                past_key_values=cache_of_layer(past_key_values, index),
                position_embeddings=position_embeddings,
                need_map=need_maps,
                restrictions=restrictions,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(rows).view(batch, length, self.config.hidden_size),
            past_key_values=past_key_values if use_cache else None,
        )


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The language model. `forward` and `generate` behave as in LlamaForCausalLM.

    Attributes:
        loss_chunk_tokens: None, or the number of tokens whose logits are in memory at a time when `labels` are given in
            training. The output's logits are then None (see `forward`).

    Raises:
        ConfigError: config.is_causal is False.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: DiffTransformerConfig) -> None:
        if not config.is_causal:
            raise ConfigError(
                "is_causal=False: a language model that generates text must not see later tokens; use a causal model, or "
                "DiffTransformerForMaskedLM"
            )
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self._check_and_adjust_attn_implementation(config._attn_implementation)

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> Any:
        """Make transformers' manager of requests; `generate_batch` and `transformers serve` call this."""
        original = self.config._attn_implementation
        if original == "difftransformer":
            self.set_attn_implementation("sdpa")  # for which transformers prepares the mask of all requests
        manager = super().init_continuous_batching(*arguments, **options)
        if not isinstance(manager.model, PagedModel):
            manager.model = PagedModel(self, self.config)
        manager._original_attn_impl = original  # restored when the manager stops
        return manager

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
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the next token, and the loss if labels are given.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache: See `DiffTransformerModel`.
            labels: (B, T) token ids, shifted inside; -100 is ignored. The loss is the mean in nats per token, or the sum
                divided by `num_items_in_batch` if that is given.
            logits_to_keep: Number of last positions to compute logits for (0 = all), or the indices of positions.
            skip_logits: Whether the output has no logits where labels and loss_chunk_tokens are given. None means in training
                alone.
            **kwargs: output_attentions, output_hidden_states, cu_seq_lens_q, num_items_in_batch, shift_labels (labels that are
                shifted already), return_dict.
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
        logits = loss = None
        skips = self.training if skip_logits is None else skip_logits
        if labels is None or not (skips and self.has_loss_in_chunks()):
            logits = self.lm_head(hidden)
        else:
            assert self.loss_chunk_tokens is not None  # by has_loss_in_chunks
            loss = chunked_loss(hidden, self.lm_head.weight, labels, chunk_tokens=self.loss_chunk_tokens, **kwargs)
        if labels is not None and logits is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

"""Our language model made of vLLM's layers, with its paged cache.

`heads.py` says how ordinary attention computes both maps; they are subtracted afterwards in fp32.

Dimensions: N tokens of all requests, H heads of this rank, E width of a value, M width of the model.
"""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from ..attention import variant
from ..attention.dex import DifferentialExtension
from ..attention.differential import LAMBDA_OFFSET, LAMBDA_VECTORS, Differential
from ..attention.softmax import SoftmaxAttention
from ..model import DiffTransformerConfig
from .heads import ServedHeads, check_served, served_config


class ServedAttention(nn.Module):
    """An attention layer with this rank's heads."""

    chosen: Tensor
    places: Tensor

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: DiffTransformerConfig = vllm_config.model_config.hf_config
        quant = vllm_config.quant_config
        check_served(config)
        self.heads = ServedHeads.of(config, get_tensor_model_parallel_world_size())
        layout, width = self.heads.layout, config.hidden_size

        def project(name: str, rows: int) -> nn.Module:
            return ColumnParallelLinear(width, rows, bias=False, quant_config=quant, prefix=f"{prefix}.{name}")

        # These are separate, because vLLM's joint layer needs queries, keys and values of one width.
        self.q_proj = project("q_proj", layout.query_groups * layout.query_width)
        self.k_proj = project("k_proj", layout.cache_heads * layout.key_width)
        self.v_proj = project("v_proj", layout.num_key_value_heads * layout.value_head_dim)
        self.o_proj = RowParallelLinear(
            layout.num_heads * layout.value_head_dim, width, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )
        self.gate_proj = project("gate_proj", layout.num_heads * layout.value_head_dim) if layout.output_gate else None
        self.q_norm = RMSNorm(layout.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(layout.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.rotary_emb = get_rope(
            layout.head_dim,
            max_position=config.max_position_embeddings,
            is_neox_style=True,  # half-split
            rope_parameters=config.rope_parameters,
        )
        self.attn = Attention(
            self.heads.query_heads,
            self.heads.head_size,
            layout.head_dim**-0.5,
            num_kv_heads=self.heads.key_value_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            per_layer_sliding_window=config.sliding_window,
            prefix=f"{prefix}.attn",
        )
        kind, layer_index = variant(config.attention_type), extract_layer_index(prefix)
        self.first_head = get_tensor_model_parallel_rank() * self.heads.heads
        self.head_norm, self.head_scale = None, 1.0
        if issubclass(kind, Differential):
            self.options = kind.options_of(config)
            self.lambda_value, self.head_scale = self.options.constants(layer_index)
            self._add_lambda(config, prefix)
            self._add_norm(config, self.options.head_norm)
        elif issubclass(kind, DifferentialExtension):
            chosen = kind.arguments_of(config, layer_index)["dex_heads"]
            self._add_extension(range(layout.num_heads) if chosen is None else sorted(chosen))
        elif issubclass(kind, SoftmaxAttention):
            self._add_norm(config, kind.norm_of(config))
            self.head_scale = kind.scale_of(config)

    def _add_norm(self, config: DiffTransformerConfig, kind: str | None) -> None:
        if kind != "none":
            width = self.heads.layout.value_head_dim
            self.head_norm = RMSNorm(width, eps=config.head_norm_eps, has_weight=kind == "gain")

    def _add_lambda(self, config: DiffTransformerConfig, prefix: str) -> None:
        options, layout = self.options, self.heads.layout
        if options.lambda_form in ("layer", "head"):
            shape = (layout.head_dim,) if options.lambda_form == "layer" else (layout.num_heads, layout.head_dim)
            for name in LAMBDA_VECTORS:
                setattr(self, name, nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False))
        elif options.lambda_form == "scalar":
            self.register_parameter(
                LAMBDA_OFFSET, nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)
            )
        elif options.lambda_form == "token":
            self.lambda_proj = ColumnParallelLinear(
                config.hidden_size, layout.num_heads, bias=False, prefix=f"{prefix}.lambda_proj"
            )

    def _add_extension(self, chosen: Iterable[int]) -> None:
        heads, width = list(chosen), self.heads.layout.value_head_dim
        self.dex_lambda = nn.Parameter(torch.empty(len(heads)), requires_grad=False)
        self.dex_proj = nn.Parameter(torch.empty(len(heads), width, width), requires_grad=False)
        # The chosen heads of this rank, and their places among all that are chosen.
        here = [place for place, head in enumerate(heads) if 0 <= head - self.first_head < self.heads.heads]
        indices = {"chosen": [heads[at] - self.first_head for at in here], "places": here}
        for name, numbers in indices.items():
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.long), persistent=False)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Map (N, M) to (N, M)."""
        query, key, value = (projection(hidden_states)[0] for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self._by_map(self.q_norm, query), self._by_map(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        heads, second = self.heads.separate(self.attn(*self.heads.arrange(query, key, value)))
        if second is not None:
            heads = self._subtract(heads, second, hidden_states)
        elif hasattr(self, "dex_proj"):
            heads = self._extend(heads)
        heads = self._normalise(heads)
        heads = heads.reshape(len(heads), -1)
        if self.gate_proj is not None:
            heads = heads * torch.sigmoid(self.gate_proj(hidden_states)[0])
        return self.o_proj(heads)[0]

    def _by_map(self, norm: nn.Module, rows: Tensor) -> Tensor:
        """Normalise each map's queries or keys of (N, maps * D)."""
        return norm(rows.view(len(rows), -1, self.heads.layout.head_dim)).view_as(rows)

    def _subtract(self, first: Tensor, second: Tensor, hidden_states: Tensor) -> Tensor:
        """Subtract lambda times the second map's heads (N, H, E) from the first's."""
        return (first.float() - self._lam(hidden_states) * second.float()).to(first.dtype)

    def _normalise(self, heads: Tensor) -> Tensor:
        """Normalise and scale heads (N, H, E)."""
        if self.head_norm is not None:
            heads = self.head_norm(heads.reshape(-1, heads.shape[-1])).view_as(heads)
        return heads if self.head_scale == 1 else heads * self.head_scale

    def _lam(self, hidden_states: Tensor) -> Tensor | float:
        """Return lambda in fp32, broadcastable to (N, H, E)."""
        form = self.options.lambda_form
        if form == "constant":
            return self.lambda_value
        if form == "token":
            return torch.sigmoid(self.lambda_proj(hidden_states)[0].float()).unsqueeze(-1)
        if form == "scalar":
            return getattr(self, LAMBDA_OFFSET) + self.lambda_value
        q1, k1, q2, k2 = (getattr(self, name) for name in LAMBDA_VECTORS)
        lam = torch.exp((q1 * k1).sum(-1)) - torch.exp((q2 * k2).sum(-1)) + self.lambda_value
        return lam[self.first_head : self.first_head + self.heads.heads].unsqueeze(-1) if form == "head" else lam

    def _extend(self, heads: Tensor) -> Tensor:
        """Subtract lambda O W_D from the chosen heads of (N, H, E)."""
        chosen = heads[:, self.chosen]
        mapped = torch.einsum("nhe,hef->nhf", chosen, self.dex_proj[self.places])
        return heads.index_copy(1, self.chosen, chosen - self.dex_lambda[self.places].unsqueeze(-1) * mapped)


class ServedMlp(nn.Module):
    """The SwiGLU layer."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        inner = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [inner, inner], bias=False, quant_config=quant, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            inner, config.hidden_size, bias=False, quant_config=quant, prefix=f"{prefix}.down_proj"
        )
        self.activation = SiluAndMul()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (N, M) to (N, M)."""
        return self.down_proj(self.activation(self.gate_up_proj(hidden_states)[0]))[0]


class ServedLayer(nn.Module):
    """A decoder layer. vLLM's norms add the residual themselves and return both."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = ServedAttention(vllm_config, f"{prefix}.self_attn")
        self.mlp = ServedMlp(vllm_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, which is not yet added to the residual stream, and that stream."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


@support_torch_compile
class ServedModel(nn.Module):
    """The decoder without its output layer."""

    # Our names -> vLLM's layer, and the place in it.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={".mlp.gate_proj": (".mlp.gate_up_proj", 0), ".mlp.up_proj": (".mlp.gate_up_proj", 1)}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        group, width, quant = get_pp_group(), config.hidden_size, vllm_config.quant_config
        self.embedding_multiplier = config.embedding_multiplier
        self.embed_tokens: nn.Module = PPMissingLayer()
        if group.is_first_rank or (config.tie_word_embeddings and group.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, width, quant_config=quant)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: ServedLayer(vllm_config, prefix), prefix=f"{prefix}.layers"
        )
        self.norm: nn.Module = RMSNorm(width, eps=config.rms_norm_eps) if group.is_last_rank else PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], width
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed token ids, (N,) to (N, M), without the multiplier, which `forward` applies."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states (N, M), or on all but the last pipeline rank the input of the next rank."""
        residual = None
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden_states, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        elif inputs_embeds is not None:
            hidden_states = inputs_embeds
        else:
            assert input_ids is not None
            hidden_states = self.embed_input_ids(input_ids)
        if residual is None and self.embedding_multiplier != 1:  # the first rank
            hidden_states = hidden_states * self.embedding_multiplier
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        return self.norm(hidden_states, residual)[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors by name and return the names of the filled parameters."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class DiffTransformerForCausalLM(nn.Module, SupportsPP, SupportsLoRA):  # type: ignore[misc]
    """The language model in the interface that vLLM calls; registered by `difftransformer.serving.register`.

    A differential Qwen3 is the same model with the variant's parameters in a module of their own.
    """

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".self_attn.differential.": ".self_attn."})
    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        vllm_config = vllm_config.with_hf_config(served_config(vllm_config.model_config.hf_config))
        self.config = vllm_config.model_config.hf_config
        self.model = ServedModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            head = ParallelLMHead(
                self.config.vocab_size,
                self.config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            tied = self.config.tie_word_embeddings
            self.lm_head = head.tie_weights(self.model.embed_tokens) if tied else head
            self.logits_processor = LogitsProcessor(self.config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed token ids, (N,) to (N, M)."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Run the decoder; see `ServedModel.forward`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits (N, vocabulary), or None on ranks that do not sample."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors by name and return the names of the filled parameters."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

"""Our language model made of vLLM's layers, with its paged cache, for the attention types "diff", "diff_v2" and "softmax".

vLLM's `Attention` is ordinary grouped-query attention whose keys and values are equally wide. One call of it computes both
maps exactly: softmax(Q K^T) V is computed for each part of V, and the maps are subtracted afterwards in fp32.

    keys      shared by the maps             own for each map
    kv heads  (group, part)                  (group, map, part)
    queries   (group, part, head, map)       (group, map, part, head)

"diff_v2" has a shared key and one part: 2 H query heads over G key/value heads, in the order of its rows. "diff" has a key
for each map and a value of 2 D, which makes two parts: 4 H query heads over 4 G key/value heads. Each key and each value is
cached twice, 8 D numbers a group and token where our own cache holds 4 D, and the scores are computed twice.

Dimensions: N tokens of all requests, H heads and G key/value heads of this rank, R = H / G, P parts of D in a value.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

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
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    extract_layer_index,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from ..attention import HeadLayout, variant
from ..attention.differential import LAMBDA_VECTORS, Differential, lambda_init
from ..errors import ConfigError
from ..model import DiffTransformerConfig

SERVED_TYPES = ("softmax", "diff", "diff_v2")
STACKED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}  # our names -> vLLM's layer, and the place in it


def check_served(config: DiffTransformerConfig, ranks: int) -> HeadLayout:
    """Check that vLLM can serve the model, and return the model's heads.

    Raises:
        ConfigError: vLLM's attention cannot express the model, or its heads do not divide among the ranks.
    """
    if config.attention_type not in SERVED_TYPES:
        raise ConfigError(
            f"vLLM: attention_type={config.attention_type!r} is not served; its attention can express {', '.join(SERVED_TYPES)}"
        )
    if config.hidden_act != "silu":
        raise ConfigError(f"vLLM: hidden_act={config.hidden_act!r} is not served; its gated layer uses silu")
    if not config.is_causal:
        raise ConfigError("vLLM: is_causal=False is not served; its decoder is causal")
    layout = config.head_layout()
    if layout.value_head_dim % layout.head_dim:
        raise ConfigError(
            f"vLLM: value_head_dim={layout.value_head_dim} is not a multiple of head_dim={layout.head_dim}, so values cannot "
            "be cached in parts as wide as the keys; generate with transformers"
        )
    if layout.num_key_value_heads % ranks:
        raise ConfigError(
            f"vLLM: {layout.num_key_value_heads} key/value heads do not divide among {ranks} tensor-parallel ranks; "
            "use a divisor"
        )
    return layout


class ServedAttention(nn.Module):
    """An attention layer with this rank's heads."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: DiffTransformerConfig = vllm_config.model_config.hf_config
        quant, ranks = vllm_config.quant_config, get_tensor_model_parallel_world_size()
        layout = check_served(config, ranks)
        self.heads, self.groups = layout.num_heads // ranks, layout.num_key_value_heads // ranks
        self.head_dim, self.maps, self.key_maps = layout.head_dim, layout.query_maps, layout.key_maps
        self.parts = layout.value_head_dim // layout.head_dim
        width, heads, groups = config.hidden_size, layout.num_heads, layout.num_key_value_heads

        def project(name: str, rows: int) -> nn.Module:
            return ColumnParallelLinear(width, rows, bias=False, quant_config=quant, prefix=f"{prefix}.{name}")

        # These are separate, because vLLM's joint layer needs keys and values of one width.
        self.q_proj = project("q_proj", heads * layout.query_width)
        self.k_proj = project("k_proj", groups * layout.key_width)
        self.v_proj = project("v_proj", groups * layout.value_head_dim)
        self.o_proj = RowParallelLinear(
            heads * layout.value_head_dim, width, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings,
            is_neox_style=True,  # half-split
            rope_parameters=config.rope_parameters,
        )
        self.attn = Attention(
            self.heads * self.maps * self.parts,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.groups * self.key_maps * self.parts,
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            per_layer_sliding_window=config.sliding_window,
            prefix=f"{prefix}.attn",
        )
        kind = variant(config.attention_type)
        if issubclass(kind, Differential):
            self.options = kind.options_of(config)
            start = self.options.lambda_init
            self.lambda_init = lambda_init(extract_layer_index(prefix)) if start is None else start
            self._add_own_parameters(config, layout, prefix)

    def _add_own_parameters(self, config: DiffTransformerConfig, layout: HeadLayout, prefix: str) -> None:
        options = self.options
        if options.lambda_form in ("layer", "head"):
            shape = (layout.head_dim,) if options.lambda_form == "layer" else (layout.num_heads, layout.head_dim)
            for name in LAMBDA_VECTORS:
                setattr(self, name, nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False))
        elif options.lambda_form == "token":
            self.lambda_proj = ColumnParallelLinear(
                config.hidden_size, layout.num_heads, bias=False, prefix=f"{prefix}.lambda_proj"
            )
        self.head_norm = None
        if options.head_norm != "none":
            self.head_norm = RMSNorm(
                layout.value_head_dim, eps=config.head_norm_eps, has_weight=options.head_norm == "gain"
            )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Map (N, M) to (N, M)."""
        tokens = hidden_states.shape[0]
        query, key, value = (projection(hidden_states)[0] for projection in (self.q_proj, self.k_proj, self.v_proj))
        query, key = self.rotary_emb(positions, query, key)
        groups, parts, maps, width = self.groups, self.parts, self.maps, self.head_dim
        query = query.view(tokens, groups, -1, maps, width)  # (N, G, R, maps, D)
        if self.key_maps == 2:
            query = query.transpose(2, 3).unsqueeze(3).expand(-1, -1, -1, parts, -1, -1)
        else:
            query = query.unsqueeze(2).expand(-1, -1, parts, -1, -1, -1)
        key = key.view(tokens, groups, self.key_maps, 1, width).expand(-1, -1, -1, parts, -1)
        value = value.view(tokens, groups, 1, parts, width).expand(-1, -1, self.key_maps, -1, -1)
        query, key, value = (states.reshape(tokens, -1) for states in (query, key, value))
        attended = self.attn(query, key, value)
        # Make it (N, G, R, maps, P, D), so that heads are in the order of o_proj's columns.
        if self.key_maps == 2:
            attended = attended.view(tokens, groups, maps, parts, -1, width).permute(0, 1, 4, 2, 3, 5)
        else:
            attended = attended.view(tokens, groups, parts, -1, maps, width).permute(0, 1, 3, 4, 2, 5)
        heads = attended.reshape(tokens, self.heads, maps, parts * width)
        heads = heads[:, :, 0] if maps == 1 else self._subtract(heads, hidden_states)
        return self.o_proj(heads.reshape(tokens, -1))[0]

    def _subtract(self, heads: Tensor, hidden_states: Tensor) -> Tensor:
        """Subtract lambda times the second map's heads from the first's, and normalise: (N, H, 2, E) to (N, H, E)."""
        first, second = heads.float().unbind(2)
        result = (first - self._lam(hidden_states) * second).to(heads.dtype)
        if self.head_norm is not None:
            normed = self.head_norm(result.reshape(-1, result.shape[-1])).view_as(result)
            result = normed * (1 - self.lambda_init)
        return result

    def _lam(self, hidden_states: Tensor) -> Tensor | float:
        """Return lambda in fp32, broadcastable to (N, H, E)."""
        form = self.options.lambda_form
        if form == "constant":
            return self.lambda_init
        if form == "token":
            return torch.sigmoid(self.lambda_proj(hidden_states)[0].float()).unsqueeze(-1)
        q1, k1, q2, k2 = (getattr(self, name) for name in LAMBDA_VECTORS)
        lam = torch.exp((q1 * k1).sum(-1)) - torch.exp((q2 * k2).sum(-1)) + self.lambda_init
        if form == "head":
            first = get_tensor_model_parallel_rank() * self.heads
            lam = lam[first : first + self.heads].unsqueeze(-1)
        return lam


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

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        group, width, quant = get_pp_group(), config.hidden_size, vllm_config.quant_config
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
        """Embed token ids, (N,) to (N, M)."""
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
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        return self.norm(hidden_states, residual)[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors by name and return the names of the filled parameters."""
        parameters, filled = dict(self.named_parameters()), set()
        for name, tensor in weights:
            shard: tuple[Any, ...] = ()
            for ours, (theirs, place) in STACKED.items():
                if f".{ours}." in name:
                    name, shard = name.replace(ours, theirs), (place,)
            if is_pp_missing_parameter(name, self):
                continue
            if name not in parameters:
                raise ConfigError(
                    f"vLLM: the checkpoint's model.{name} is not a tensor of this model; check config.json"
                )
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *shard)
            filled.add(name)
        return filled


class DiffTransformerForCausalLM(nn.Module, SupportsPP):  # type: ignore[misc]
    """The language model in the interface that vLLM calls; registered by `difftransformer.serving.register`."""

    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
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
        tied = ["lm_head."] if self.config.tie_word_embeddings else None
        return AutoWeightsLoader(self, skip_prefixes=tied).load_weights(weights)

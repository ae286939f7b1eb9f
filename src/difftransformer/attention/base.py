"""The base of the attention variants: a layer that projects, rotates, caches and attends, and the formulas of its size.

A variant is one file that subclasses `Attention`, and one line in the table of `difftransformer.attention`. Everything that
is particular to it stands in its file: its options, its `HeadLayout`, the parameters it adds to the four projections, how it
attends, its words on model cards and reports, and how it starts from a pretrained Transformer. This folder needs torch
alone, so that a layer can be used in any model.

Dimensions in tensor names: B batch, T query positions, S key positions, H heads, G key/value heads, D width of one map's
query, E value width, M model width.
"""

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ShapeError
from ..ops.attention import attend, maps
from ..ops.norms import rms_norm
from ..ops.problem import Restrictions
from ..ops.reference import weighted_values
from ..ops.rotary import apply_rotary
from ..ops.ulysses import heads_of_sequence, sequence_of_heads
from .keywords import check_arguments, check_keywords

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
QK_NORMS = ("q_norm", "k_norm")
QK_NORM_EPS = 1e-6  # eps of the norms of queries and keys (Qwen3's)
# transformers' name for a module that every tensor-parallel process holds whole, with summed gradients.
REPLICATED = "replicated_with_grad_allreduce"


class AttentionConfig(Protocol):
    """The fields of a configuration that every variant reads. The three head fields describe the same-size Transformer.

    rms_norm_eps is read only where qk_norm is True.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool
    rms_norm_eps: float
    attn_backend: str


@dataclass(frozen=True)
class Option:
    """A field that a variant adds to a model's configuration.

    Attributes:
        type: The field's type, such as `float | None`. Whole numbers are counts and must be at least 1.
        default: The field's value where a configuration does not set it.
    """

    type: Any
    default: Any = None


class KeyValueCache(Protocol):
    """Any object that appends keys and values of a layer and returns all of them, as transformers' caches do."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append (B, G, T, width) keys and values of one layer, and return everything cached for it."""
        ...


@dataclass(frozen=True)
class PlainLayer:
    """The attention layer of a pretrained Transformer that a variant's layer starts from.

    Attributes:
        config: Configuration of the new model.
        read: Returns the pretrained tensor of a name such as "q_proj.weight".
        normal: normal(key, shape, std) draws a tensor from N(0, std^2), the same for the same key.
    """

    config: AttentionConfig
    read: Callable[[str], Tensor]
    normal: Callable[[str, tuple[int, ...], float], Tensor]

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros in the dtype of the pretrained layer."""
        return torch.zeros(shape, dtype=self.read("o_proj.weight").dtype)

    def twice(self, name: str, heads: int) -> Tensor:
        """Return a projection with the rows of each head repeated: (head, D) becomes (head, map, D)."""
        return self.read(name).unflatten(0, (heads, 1, -1)).expand(-1, 2, -1, -1).flatten(0, 2)


def head_width(embed_dim: int, num_heads: int, maps: int = 1, *, num_noise_heads: int = 0) -> int:
    """Return the width of one map: embed_dim divided by the number of maps.

    Raises:
        ConfigError: embed_dim is not a multiple of that number.
    """
    parts = num_heads * maps + num_noise_heads
    if num_heads < 1 or num_noise_heads < 0 or embed_dim % parts:
        each = f", which have {maps} maps each" if maps > 1 else ""
        noise = f" and num_noise_heads={num_noise_heads}" if num_noise_heads else ""
        raise ConfigError(
            f"embed_dim={embed_dim} does not divide among num_heads={num_heads}{noise} heads{each}; change one of them or set "
            "head_dim"
        )
    return embed_dim // parts


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """How one layer's projections divide into heads. Variants that divide them otherwise subclass it.

    Attributes:
        num_heads: H, heads of the op.
        num_key_value_heads: G, key/value heads; H is a multiple of it.
        head_dim: D, width of one map's query and key.
        query_maps: Softmax maps of a head, 1 or 2; a head's query has query_maps * D values.
        key_maps: Keys of a head, 1 (shared by the maps) or 2.
        value_head_dim: E, width of a head's value and output.
        output_gate: Whether there is a gate_proj to scale the heads, with as many rows as o_proj has columns.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    query_maps: int
    key_maps: int
    value_head_dim: int
    output_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_key_value_heads", "head_dim", "value_head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1; give a positive number")
        if self.num_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_key_value_heads}; "
                "every key/value head serves the same number of heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs, so use an even head_dim")

    @property
    def query_groups(self) -> int:
        """Number of groups that q_proj's rows divide into."""
        return self.num_heads

    @property
    def query_width(self) -> int:
        """Width of one group's queries."""
        return self.query_maps * self.head_dim

    @property
    def cache_heads(self) -> int:
        """Number of heads of the cached tensors."""
        return self.num_key_value_heads

    @property
    def key_width(self) -> int:
        """Width of one cached head's keys."""
        return self.key_maps * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of one cached head's values."""
        return self.value_head_dim

    @property
    def heads_per_second_map(self) -> int:
        """Number of heads that share one second map. The op gets that map once for each of them."""
        return 1

    def projection_parameters(self, hidden_size: int) -> int:
        """Count the weights of q_proj, k_proj, v_proj, o_proj and gate_proj."""
        rows = self.query_groups * self.query_width + self.cached_values_per_token()
        return hidden_size * (rows + (1 + self.output_gate) * self.num_heads * self.value_head_dim)

    def cached_values_per_token(self) -> int:
        """Count the numbers that one layer's cache holds for a token."""
        return self.cache_heads * (self.key_width + self.value_width)

    def map_flops_per_pair(self) -> int:
        """Count the forward FLOPs (two for a multiply-add) of one (query, key) pair: all logits, and one product with V a head.

        A second map that heads share is counted for each of them, since the op forms it again.
        """
        return 2 * self.num_heads * (self.query_maps * self.head_dim + self.value_head_dim)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with an optional gain, computed in fp32.

    Args:
        dim: Size of the last dimension.
        eps: Added to the mean square.
        gain: Whether to learn a weight of size dim.
    """

    weight: nn.Parameter | None

    def __init__(self, dim: int, *, eps: float, gain: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        if gain:
            self.weight = nn.Parameter(torch.ones(dim))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x of shape (..., dim); same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        return f"{self.dim}, eps={self.eps}"


class Attention(nn.Module):
    """Base of the variants: projections without bias, rotary embedding, cache, and the call of the op.

    With QK norm, the query and the key of each map are RMSNorm(x) * g over their D numbers before they are rotated
    (arXiv:2505.09388 section 2, Qwen3). All queries of a layer share one gain of D numbers, and so do all of its keys.

    Args:
        embed_dim: M, width of the hidden states.
        layout: Heads and widths.
        layer_index: Index of the layer in the model, from 0 (the paper's l is layer_index + 1).
        backend: The op's backend, or "auto".
        qk_norm: Whether queries and keys are normalised.
        qk_norm_eps: eps of these norms.

    Attributes:
        q_norm, k_norm: The norms of queries and keys, or None.
        name: The value of `attention_type` that selects the variant.
        label: The variant's name in reports.
        description: The variant in a few words, for model cards.
        tags: Tags of a model card.
        config_options: Fields that the variant adds to a model's configuration.
        fp32_parameters: Names of parameters that stay in fp32 whatever dtype the model is loaded in (see `kept_in_fp32`).
            `difftransformer.train` treats them as vectors, whatever their shape: they have no weight decay.
        can_upcycle: Whether a layer can start as a pretrained Transformer's, computing the same function.
        context_group: Processes that divide each sequence among them, or None. Hidden states are then consecutive parts of
            the sequence, restrictions describe the whole, and each process attends with some of the heads.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    description: ClassVar[str] = "differential attention"
    tags: ClassVar[tuple[str, ...]] = ("differential-transformer", "arxiv:2410.05258")
    config_options: ClassVar[dict[str, Option]] = {}
    fp32_parameters: ClassVar[tuple[str, ...]] = ()
    can_upcycle: ClassVar[bool] = False
    context_group: "ProcessGroup | None" = None
    batch_first: bool = (
        False  # so that nn.TransformerEncoderLayer takes no fast path, which reads its own attention's weights
    )

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        """Refuse the arguments of other layers by name, with what this layer has instead."""
        check_arguments(cls, Attention, arguments)
        return super().__new__(cls)

    @classmethod
    def kept_in_fp32(cls) -> tuple[str, ...]:
        """Return `fp32_parameters`, or none of them under FSDP1, which flattens the parameters of a layer to one tensor.

        The environment variables of accelerate and transformers tell whether it is FSDP1. Computations with these parameters
        are in fp32 in any case.
        """
        fsdp, version = os.environ.get("ACCELERATE_USE_FSDP", ""), os.environ.get("FSDP_VERSION", "1")
        return () if fsdp.lower() == "true" and version == "1" else cls.fp32_parameters

    def __init__(
        self,
        embed_dim: int,
        layout: HeadLayout,
        *,
        layer_index: int,
        backend: str = "auto",
        qk_norm: bool = False,
        qk_norm_eps: float = QK_NORM_EPS,
    ) -> None:
        super().__init__()
        if layer_index < 0:
            raise ConfigError(
                f"layer_index={layer_index}: layers are counted from 0 (the paper's l is layer_index + 1)"
            )
        self.embed_dim, self.layout, self.layer_index, self.backend = embed_dim, layout, layer_index, backend
        self.q_proj = nn.Linear(embed_dim, layout.query_groups * layout.query_width, bias=False)
        self.k_proj = nn.Linear(embed_dim, layout.cache_heads * layout.key_width, bias=False)
        self.v_proj = nn.Linear(embed_dim, layout.num_key_value_heads * layout.value_head_dim, bias=False)
        self.o_proj = nn.Linear(layout.num_heads * layout.value_head_dim, embed_dim, bias=False)
        self.q_norm = RMSNorm(layout.head_dim, eps=qk_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(layout.head_dim, eps=qk_norm_eps) if qk_norm else None

    @classmethod
    @abstractmethod
    def layout_of(cls, config: AttentionConfig) -> HeadLayout:
        """Derive the variant's heads from a configuration that describes the plain Transformer.

        Raises:
            ConfigError: the variant cannot have these heads or options.
        """

    @classmethod
    def option(cls, config: AttentionConfig, name: str) -> Any:
        """Return the value of one of the variant's options in a configuration, or its default."""
        return getattr(config, name, cls.config_options[name].default)

    @classmethod
    def arguments_of(cls, config: AttentionConfig, layer_index: int) -> dict[str, Any]:
        """Return the constructor's arguments that `from_config` does not pass to every variant."""
        return {}

    @classmethod
    def from_config(cls, config: AttentionConfig, layer_index: int) -> Self:
        """Build the layer of a model."""
        layout = cls.layout_of(config)
        norms = {"qk_norm": True, "qk_norm_eps": config.rms_norm_eps} if config.qk_norm else {}
        return cast(Any, cls)(
            config.hidden_size,
            layout.num_heads,
            num_key_value_heads=layout.num_key_value_heads,
            head_dim=layout.head_dim,
            layer_index=layer_index,
            backend=config.attn_backend,
            **norms,
            **cls.arguments_of(config, layer_index),
        )

    @classmethod
    def parameters_of(cls, config: AttentionConfig) -> int:
        """Count by formula the parameters of a layer: its projections, its norms of queries and keys, and its own."""
        layout = cls.layout_of(config)
        norms = len(QK_NORMS) * layout.head_dim if config.qk_norm else 0
        return layout.projection_parameters(config.hidden_size) + norms + cls.own_parameters(config)

    @classmethod
    def own_parameters(cls, config: AttentionConfig) -> int:
        """Count by formula a layer's parameters other than its projections and its norms of queries and keys."""
        return 0

    @classmethod
    def own_flops_per_token(cls, config: AttentionConfig) -> int:
        """Count by formula the FLOPs of a token in matrix products with these parameters, lambda's left out."""
        return 0

    @classmethod
    def tensor_parallel(cls, config: AttentionConfig) -> dict[str, str]:
        """Return transformers' tensor-parallel plan of the layer, by module name ("" is the layer itself).

        Every process holds the projections of some of the heads. Parameters of the layer itself and the norms of queries and
        keys are replicated, and their gradients summed.
        """
        norms = dict.fromkeys(QK_NORMS, REPLICATED) if config.qk_norm else {}
        return {"": REPLICATED} | dict.fromkeys(PROJECTIONS[:3], "colwise") | {"o_proj": "rowwise"} | norms

    @classmethod
    def upcycled_options(cls, config: AttentionConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options, beside the chosen ones, that keep the function of a pretrained Transformer."""
        return {}

    @classmethod
    def upcycled(cls, name: str, shape: tuple[int, ...], plain: PlainLayer) -> Tensor:
        """Make the parameter `name` of a layer with the same function as a pretrained Transformer's layer."""
        return plain.read(name)

    def own_parameter_names(self) -> list[str]:
        """Return the names of the parameters that are not part of the four projections."""
        return [name for name, _ in self.named_parameters() if name.partition(".")[0] not in PROJECTIONS]

    def head_lam(self, hidden: Tensor) -> Tensor | float | None:
        """Return lambda for hidden states (B, T, M): a number or a tensor (), (H,) or (B, H, T); None without a second map.

        Probes and families of other models call this outside a forward, so it must depend on `hidden` and parameters alone.
        """
        return None

    def op_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert heads from the layout's form to the op's: (B, H, T, X), (B, G, S, X) and (B, G, S, E).

        In the layout's form they are (B, query_groups, T, query_width), (B, cache_heads, S, key_width) and (B, cache_heads,
        S, value_width).
        """
        return query, key, value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, lam: Tensor | float | None, restrictions: Restrictions
    ) -> Tensor:
        """Call the op and `finish`. Returns (B, H, T, E). Override it only to fuse `finish` with the op."""
        return self.finish(attend(query, key, value, lam, restrictions, backend=self.backend))

    def finish(self, heads: Tensor) -> Tensor:
        """Process the heads (B, H, T, E) between the op and the output projection; same shape."""
        return heads

    def with_own_value(self, heads: Tensor, value: Tensor | None) -> Tensor:
        """Change finished heads (B, H, T, E) by each token's own value (B, G, T, E), None in cross-attention."""
        return heads

    def head_gate(self, hidden: Tensor) -> Tensor | None:
        """Return factors of all heads (B, T, H E) from the hidden states (B, T, M), or None without a gate."""
        return None

    def combined_map(
        self, query: Tensor, key: Tensor, lam: Tensor | float | None, restrictions: Restrictions
    ) -> Tensor:
        """Return the weights that multiply V, (B, H, T, S) in fp32, for analysis: the map, or A1 - lambda A2."""
        first_BHTS, *second_BHTS = maps(query, key, restrictions, count=self.layout.query_maps)
        if lam is None or not second_BHTS:
            return first_BHTS
        if isinstance(lam, Tensor) and lam.dim():
            lam = lam.unsqueeze(-1) if lam.dim() == 3 else lam.view(-1, 1, 1)
        return first_BHTS - lam * second_BHTS[0]

    def local_part(self, of_heads: Tensor | range, local_heads: int) -> Any:
        """Select this process's heads from numbers by head.

        A process has all heads unless processes divide the projections (tensor parallelism) or the sequence among them.
        """
        if local_heads == self.layout.num_heads:
            return of_heads
        mesh = getattr(self.q_proj.weight, "device_mesh", None)  # torchao's tensors have none
        if mesh is not None:
            place = mesh.get_local_rank()
        elif self.context_group is None:
            place = torch.distributed.get_rank() % (self.layout.num_heads // local_heads)
        else:
            place = 0
        if self.context_group is not None:
            place = place * self.context_group.size() + self.context_group.rank()
        return of_heads[place * local_heads : (place + 1) * local_heads]

    def lam(self) -> Tensor | None:
        """Return the current lambda, one number or one for each head; None without lambda or with one for each token."""
        return None

    def init_own_parameters(self, normal_: Any = nn.init.normal_) -> None:
        """Initialise the parameters other than projections and norms. `normal_(tensor, mean, std)` fills in place."""

    def mimetic_output(self, value: Tensor) -> Tensor:
        """Return o_proj's weight of a mimetic start (arXiv:2305.09828): the transpose of v_proj's, so that W_O W_V is positive.

        Such a layer looks for tokens like its own and copies them. From random weights, a small model spends most of a short
        training on finding either. The weights are not tied afterwards. Q and V are drawn from N(0, 1 / M).
        """
        layout = self.layout
        groups = layout.num_key_value_heads
        shared = layout.num_heads // groups
        value = value.view(groups, 1, layout.value_head_dim, -1).expand(-1, shared, -1, -1)
        return value.reshape(-1, value.shape[-1]).T

    def mimetic_key(self, query: Tensor) -> Tensor:
        """Return k_proj's weight of a mimetic start: q_proj's rows of the first head that reads each key, in k_proj's order.

        W_Q^T W_K is then positive.
        """
        layout = self.layout
        shared = layout.num_heads // layout.num_key_value_heads
        query = query.view(layout.num_key_value_heads, shared, layout.query_maps, layout.head_dim, -1)
        return query[:, 0, : layout.key_maps].reshape(-1, query.shape[-1])

    def forward(
        self,
        hidden: Tensor | None = None,
        *theirs: Tensor,
        context: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        context_position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: KeyValueCache | None = None,
        need_map: bool = False,
        restrictions: Restrictions | None = None,
        is_causal: bool = True,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from hidden to itself, or to `context`: causally, unless is_causal=False.

        Args:
            hidden: (B, T, M).
            *theirs: Refused: the key and value of nn.MultiheadAttention.
            context: (B, S, M) for cross-attention (pass is_causal=False); None attends to `hidden`.
            position_embeddings: Cosine and sine, (B or 1, T, D / 2) each, from `ops.rotary_tables`; None for no rotation.
            context_position_embeddings: The same for `context`; None leaves its keys unrotated.
            cache: Keys and values of earlier positions; the new ones are appended.
            need_map: Whether to return the combined attention map too. The output is then computed from this map, with
                O(T * S) memory, so that gradients flow through it.
            restrictions: The keys that each query may attend to. None takes them from the following arguments.
            is_causal: Whether attention is causal, bottom-right aligned.
            **keywords: attn_mask, window, kv_start, kv_lengths and cu_seqlens, as in `differential_attention`. In a bool
                attn_mask, True means may attend, unlike in nn.MultiheadAttention. kv_lengths needs a cache, a context or
                is_causal=False.

        Returns:
            The output (B, T, M), and the map (B, H, T, S) in fp32 or None.

        Raises:
            ShapeError: the last dimension of hidden or context is not M, or rotary tables are not of the shape above.
            ConfigError: a keyword is unknown, hidden is missing, or kv_lengths is given without one of these. For keywords of
                nn.MultiheadAttention, the message names ours.
        """
        if theirs:
            raise ConfigError(
                f"{type(self).__name__} takes the hidden states alone by position; pass context=... in place of key and value, "
                "and in place of an nn.TransformerEncoderLayer use DifferentialEncoderLayer"
            )
        if restrictions is None:
            check_keywords(type(self), Restrictions._fields, keywords)
            if is_causal and cache is None and context is None and keywords.get("kv_lengths") is not None:
                raise ConfigError(
                    "kv_lengths in causal attention to `hidden` itself would align the last query with the last of these keys; "
                    "leave it out, since no position sees the padding behind it, or pass is_causal=False"
                )
            restrictions = Restrictions(is_causal=is_causal, **keywords)
        elif keywords:
            raise ConfigError(f"{', '.join(keywords)} and restrictions were given together; pass one of the two")
        if hidden is None:
            raise ConfigError(f"{type(self).__name__} got no hidden states; pass them first")
        source = hidden if context is None else context
        for name, states in (("hidden", hidden), ("context", source)):
            if states.dim() != 3 or states.shape[-1] != self.embed_dim:
                raise ShapeError(
                    f"{name} has shape {tuple(states.shape)}, expected (batch, length, {self.embed_dim}); "
                    "pass hidden states of this layer's width"
                )
        layout = self.layout
        query, key = self.q_proj(hidden), self.k_proj(source)
        if query.shape[-1] % layout.query_width or key.shape[-1] % layout.key_width:
            raise ShapeError(
                f"this process holds {query.shape[-1]} features of queries and {key.shape[-1]} of keys, not whole heads of "
                f"{layout.query_width} and {layout.key_width}: split {layout.query_groups} and {layout.cache_heads} heads "
                "among a number of processes that divides both"
            )
        query, key = _divided(query, layout.head_dim), _divided(key, layout.head_dim)
        value_BGSE = _divided(self.v_proj(source), layout.value_width).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        key_rotation = position_embeddings if context is None else context_position_embeddings
        if position_embeddings is not None:
            query = apply_rotary(query, *position_embeddings)
        if key_rotation is not None:
            key = apply_rotary(key, *key_rotation)
        query_BHTX = _divided(query, layout.query_width).transpose(1, 2)
        key_BGSX = _divided(key, layout.key_width).transpose(1, 2)
        own_value = None if context is not None else value_BGSE
        if cache is not None:
            key_BGSX, value_BGSE = cache.update(key_BGSX, value_BGSE, self.layer_index)
        lam = self.head_lam(hidden)
        if self.context_group is not None:
            query_BHTX, key_BGSX, value_BGSE = (
                heads_of_sequence(heads, self.context_group) for heads in (query_BHTX, key_BGSX, value_BGSE)
            )
            if isinstance(lam, Tensor) and lam.dim() == 3:
                lam = heads_of_sequence(lam.unsqueeze(-1), self.context_group).squeeze(-1)
        query_BHTX, key_BGSX, value_BGSE = self.op_heads(query_BHTX, key_BGSX, value_BGSE)
        if isinstance(lam, Tensor) and lam.dim() == 1:
            lam = self.local_part(lam, query_BHTX.shape[1])
        map_BHTS = None
        if need_map:
            map_BHTS = self.combined_map(query_BHTX, key_BGSX, lam, restrictions)
            heads_BHTE = self.finish(weighted_values(map_BHTS, value_BGSE))
        else:
            heads_BHTE = self.attend(query_BHTX, key_BGSX, value_BGSE, lam, restrictions)
        if self.context_group is not None:
            heads_BHTE = sequence_of_heads(heads_BHTE, self.context_group)
        heads_BTF = self.with_own_value(heads_BHTE, own_value).transpose(1, 2).flatten(2)
        gate_BTF = self.head_gate(hidden)
        return self.o_proj(heads_BTF if gate_BTF is None else heads_BTF * gate_BTF), map_BHTS

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        layout = self.layout
        return (
            f"heads={layout.num_heads}, key_value_heads={layout.num_key_value_heads}, head_dim={layout.head_dim}, "
            f"value_head_dim={layout.value_head_dim}, layer_index={self.layer_index}"
        )


def _divided(features: Tensor, width: int) -> Tensor:
    """View features (B, T, heads * width) as (B, T, heads, width)."""
    batch, length, *rest = features.shape
    return features.view(batch, length, math.prod(rest) // width, width)  # -1 would fail without tokens

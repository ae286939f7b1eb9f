"""Language models of other families made differential: which families there are, their configurations, classes and counts.

A model of this package has Llama's layout. A model with more than that (biases, norms on queries and keys, fused
projections, norms after a layer, layers without rotation) keeps its own class, and only its attention changes.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from ..attention import Attention, HeadLayout, config_options, variant
from ..attention.base import PROJECTIONS, QK_NORMS, RMSNorm
from ..errors import ConfigError
from ..model.caches import PagedModel
from ..model.config import with_heads_of_cache
from ..model.counts import BACKWARD_AND_FORWARD, Counts, mean_keys
from ..model.nll import chunked_loss
from ..model.pretrained import ATTN_IMPLEMENTATIONS, CardedModel, known_implementation
from ..model.registration import TABLES, register_models
from ..ops import backend_names
from ..typed import build
from .conversion import Shape, shapes_of
from .differential_layer import IMPLEMENTATION, DifferentialLayer, make_differential
from .table import FAMILIES

ATTENTION_LAYERS = "layers.*.self_attn"  # in a tensor-parallel plan
# Options of a family, with the value that leaves the loss that of the output layer's product, as None does.
ON_LOGITS: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "lm_head_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "output_router_logits": False,
    "z_loss_coefficient": 0,
}
# Arguments of its forward with which the loss is more than that.
NEEDS_LOGITS = {"logits_to_keep", "output_router_logits"}


class DifferentialFields:
    """The base that stands before a family's configuration class.

    Attributes:
        family: The family's `model_type`, such as "qwen2".
        attention_type: A name in `attention.VARIANTS`.
        attn_backend: Backend of the attention op.

    The options of all variants (`attention.config_options()`) are fields too.
    """

    family: str
    attention_type: str
    attn_backend: str
    num_hidden_layers: int
    _output_attentions: bool
    base_model_tp_plan: dict[str, str] | None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, option in config_options().items():
            setattr(
                self, name, build(option.type, kwargs.pop(name, option.default), source="", key=name, error=ConfigError)
            )
        if self.attn_backend not in ("auto", *backend_names()):
            raise ConfigError(
                f"attn_backend={self.attn_backend!r} is unknown; choose one of auto, {', '.join(backend_names())}"
            )
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.head_layout()  # raises an error for impossible heads before anything is built
        self.base_model_tp_plan = self._tensor_parallel(self.base_model_tp_plan or {})

    @property
    def attention(self) -> type[Attention]:
        """The class of the attention variant."""
        return variant(self.attention_type)

    @property
    def per_layer_config(self) -> list[Any]:
        """This configuration with the heads and width of the cache, for each layer; transformers allocates caches from it."""
        if torch.compiler.is_compiling():  # copies of dataclasses are not traced; caches that grow need no heads
            return [self] * self.num_hidden_layers
        return _LayerConfigs(self, PreTrainedConfig.per_layer_config.fget(self))

    @per_layer_config.setter
    def per_layer_config(self, given: Any) -> None:
        PreTrainedConfig.per_layer_config.fset(self, given)

    @property
    def output_attentions(self) -> bool:
        """Whether forward returns maps. Any attn_implementation does."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    def head_layout(self) -> HeadLayout:
        """Return the heads and widths of this attention type."""
        return self.attention.layout_of(self.attention_fields())

    def _tensor_parallel(self, plan: dict[str, str]) -> dict[str, str]:
        """Return the family's tensor-parallel plan, and that of the variant where the family divides heads among processes."""
        if plan.get(f"{ATTENTION_LAYERS}.q_proj") != "colwise":
            return plan
        own = self.attention.tensor_parallel(self.attention_fields()).items()
        parts = {f"differential.{name}".rstrip("."): how for name, how in own if name not in (*PROJECTIONS, *QK_NORMS)}
        return plan | {f"{ATTENTION_LAYERS}.{name}": how for name, how in parts.items()}

    def attention_fields(self) -> Any:
        """Return the part of a configuration that a variant reads."""
        return attention_fields(self, **{name: getattr(self, name) for name in config_options()})


class _LayerConfigs(list[Any]):
    """The configurations of a model's caches by layer, and of its rotations by the name of a layer type."""

    def __init__(self, config: Any, own: Any) -> None:
        super().__init__(with_heads_of_cache(layer, config.head_layout()) for layer in own)
        self._own = own

    def __getitem__(self, key: Any) -> Any:
        return self._own[key] if isinstance(key, str) else super().__getitem__(key)


def attention_fields(config: Any, **options: Any) -> Any:
    """Return the head fields of any family's configuration under the names that a variant reads, with its options."""
    heads = config.num_attention_heads
    return SimpleNamespace(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        qk_norm=False,  # a family that has such norms keeps its own
        attn_backend=getattr(config, "attn_backend", "auto"),
        **options,
    )


class _DifferentialModel(CardedModel):
    """What a differential model adds to a family's language model.

    Attributes:
        loss_chunk_tokens: See `DiffTransformerForCausalLM`. Models whose logits are scaled or soft-capped, or whose loss has
            other parts, compute all of them.
    """

    _asked_implementation: str = "difftransformer"  # by attn_implementation=
    _supports_flash_attn = False  # to which continuous batching would change
    config: Any
    _keep_in_fp32_modules_strict: Any

    def __init__(self, config: PreTrainedConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        fields = config.attention_fields()
        for layer in attention_layers(self):
            if isinstance(layer, DifferentialLayer):
                continue  # under a head, transformers has made a differential model already
            differential = config.attention.from_config(fields, layer.layer_idx)
            for own in differential.parameters(recurse=False):
                own._is_hf_initialized = not own.is_meta  # drawn already, and a seed gives them once
            make_differential(layer, differential)
        there = {name.rpartition(".")[2] for name, _ in self.named_parameters()}
        kept = set(self._keep_in_fp32_modules_strict or ()) | (set(config.attention.kept_in_fp32()) & there)
        self._keep_in_fp32_modules_strict = sorted(kept)
        self.post_init()
        self._check_and_adjust_attn_implementation(config._attn_implementation)

    def initialize_weights(self) -> None:
        """Draw the weights that no file has; an inner model's too, which transformers would draw as its family does."""
        inner = [module for module in self.modules() if isinstance(module, PreTrainedModel) and module is not self]
        for module in inner:
            module._init_weights = self._init_weights
        try:
            super().initialize_weights()
        finally:
            for module in inner:
                del module._init_weights

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: draws here heed what a file had, so that modules without weights can fill their buffers (Falcon-H1)."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RMSNorm):  # Gemma takes it for its own, whose gain is 1 + weight
            if module.weight is not None:
                init.ones_(module.weight)
            return
        super()._init_weights(module)
        if isinstance(module, Attention):
            module.init_own_parameters(init.normal_)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        # Any other name would compute plain attention over twice the heads. The configuration gets ours before there are
        # layers, so the model keeps the name that was asked for.
        if attn_implementation not in (None, IMPLEMENTATION):
            self._asked_implementation = known_implementation(attn_implementation)
        for module in self.modules():
            if isinstance(module, Attention):
                module.backend = ATTN_IMPLEMENTATIONS[self._asked_implementation] or self.config.attn_backend
        return IMPLEMENTATION

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> Any:
        """Make transformers' manager of requests; `generate_batch` and `transformers serve` call this."""
        self.config._attn_implementation = "sdpa"  # for which transformers prepares the mask of all requests
        try:
            manager = super().init_continuous_batching(*arguments, **options)
        finally:
            self.config._attn_implementation = IMPLEMENTATION
        if not isinstance(manager.model, PagedModel):
            manager.model = PagedModel(self, self.config)
            manager.model.config._attn_implementation = "sdpa"
        return manager

    def has_loss_in_chunks(self) -> bool:
        """Whether the loss of labels is computed in chunks; see `CardedModel`. The family's options may add to it too."""
        plain = all(getattr(self.config, name, None) in (None, value) for name, value in ON_LOGITS.items())
        return plain and super().has_loss_in_chunks()

    def _counts(self) -> Counts:
        return count_family(self.config)


class DifferentialFamilyConfig(PreTrainedConfig):  # type: ignore[misc]
    """What config.json of such a model names: its family, whose own configuration class then reads the rest.

    Args:
        family: The family's `model_type`, such as "qwen2".
    """

    model_type = "differential_family"
    family: str = ""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration of the family that the document names.

        Raises:
            ConfigError: the family is unknown.
        """
        return family_config(str(config_dict.get("family"))).from_dict(config_dict, **kwargs)


@cache
def family_config(family: str) -> type[Any]:
    """Return the configuration class of a family with differential attention.

    Its language model, a subclass of the family's own, is registered with transformers' Auto classes.

    Raises:
        ConfigError: there is no such family.
    """
    if family not in FAMILIES:
        raise ConfigError(f"family={family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    base = CONFIG_MAPPING[family]
    fields = {"family": family, "attention_type": "diff", "attn_backend": "auto"}
    names = {
        "__module__": __name__,
        "__doc__": f"Configuration of a differential {base.__name__.removesuffix('Config')}; see `DifferentialFields`.",
        "__annotations__": dict.fromkeys(fields, str),
        "model_type": DifferentialFamilyConfig.model_type,
        **fields,
    }
    config = type(f"Differential{base.__name__}", (DifferentialFields, base), names)
    tables = {auto: getattr(transformers, auto)._model_mapping for auto in TABLES}
    models = {auto: _differential(table[base], config, family) for auto, table in tables.items() if base in table}
    register_models(config, models, key=f"{DifferentialFamilyConfig.model_type} {family}")
    return config


def _differential(plain: Any, config: type[Any], family: str) -> type[Any]:
    """Return the subclass of a family's model whose attention is differential."""
    body: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{plain.__name__} with differential attention.",
        "config_class": config,
    }
    if plain.__name__.endswith("ForCausalLM"):
        body["forward"] = _with_chunked_loss(plain.forward)
    model = type(f"Differential{plain.__name__}", (_DifferentialModel, plain), body)
    names_in_files = get_checkpoint_conversion_mapping(family)
    if names_in_files is not None:
        register_checkpoint_conversion_mapping(model.__name__, names_in_files, overwrite=True)
    return model


def _with_chunked_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `forward` of a family's language model with `skip_logits`, as `DiffTransformerForCausalLM` has it."""

    @can_return_tuple
    @wraps(forward)
    def chunked(self: Any, *arguments: Any, **options: Any) -> Any:
        skips = options.pop("skip_logits", None)
        skips = self.training if skips is None else skips
        needs_logits = arguments or options.get("labels") is None or options.keys() & NEEDS_LOGITS
        if needs_logits or not (skips and self.has_loss_in_chunks()):
            return forward(self, *arguments, **options)
        of_loss = ("labels", "shift_labels", "num_items_in_batch", "z_loss")
        given = {name: options.pop(name) for name in of_loss if name in options}
        outputs = self.model(**options)
        loss = chunked_loss(
            outputs.last_hidden_state, self.lm_head.weight, chunk_tokens=self.loss_chunk_tokens, **given
        )
        return CausalLMOutputWithPast(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    return chunked


def attention_layers(model: nn.Module) -> list[Any]:
    """Return the attention layers of a model of transformers, first layer first."""
    return [
        module
        for name, module in model.named_modules()
        if name.endswith(".self_attn") or (name.endswith(".mixer") and hasattr(module, "o_proj"))
    ]


def shapes_in_files(model: PreTrainedModel) -> dict[str, Shape]:
    """Return the shape of every tensor of a model by its name in saved files, where each expert has tensors of its own."""
    return shapes_of(revert_weight_conversion(model, model.state_dict()))


def refused_features(config: PreTrainedConfig) -> list[str]:
    """Return in words what a family's options ask for and differential attention does not have, such as soft-capping."""
    features = []
    if getattr(config, "attn_logit_softcapping", None):
        features.append(f"soft-capped logits (attn_logit_softcapping={config.attn_logit_softcapping})")
    if getattr(config, "use_bidirectional_attention", False):
        features.append("bidirectional attention (use_bidirectional_attention)")
    return features


def count_family(config: Any, *, context_tokens: int | None = None) -> Counts:
    """Count what `model.count` counts. The model is built without memory for its weights.

    Args:
        config: Configuration of a family with differential attention.
        context_tokens: Length at which attention's FLOPs are counted; None means max_position_embeddings.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    context = context_tokens or config.max_position_embeddings
    layout, layers = config.head_layout(), attention_layers(model)
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    windows = [None if types and types[layer.layer_idx] == "full_attention" else window for layer in layers]
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    keys = sum(mean_keys(context, one) for one in windows)
    own = len(layers) * config.attention.own_flops_per_token(config.attention_fields())
    forward = 2 * linears + own + keys * layout.map_flops_per_pair()
    return Counts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_parameters=model.get_input_embeddings().weight.numel(),
        attention_parameters=sum(parameter.numel() for layer in layers for parameter in layer.parameters()),
        forward_flops_per_token=round(forward),
        train_flops_per_token=round(BACKWARD_AND_FORWARD * forward),
        kv_bytes_per_token=2 * len(layers) * layout.cached_values_per_token(),
        context_tokens=context,
    )


def __getattr__(name: str) -> Any:
    """Make the class of a family that a pickle names, such as `DifferentialQwen3Config`."""
    plain = name.removeprefix("Differential")
    for family in FAMILIES:
        if plain != name and plain in (CONFIG_MAPPING_NAMES[family], *(table.get(family) for table in TABLES.values())):
            config = family_config(family)
            return config if plain == CONFIG_MAPPING_NAMES[family] else getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


AutoConfig.register(DifferentialFamilyConfig.model_type, DifferentialFamilyConfig, exist_ok=True)

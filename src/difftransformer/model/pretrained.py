"""The base class of all models: how transformers initialises them, chooses their attention, saves and pads them."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from ..attention import Attention
from ..errors import ConfigError
from .card import save_card
from .config import DiffTransformerConfig, refuse_remote_code
from .counts import Counts
from .initialization import Make, Start, new_seed
from .weights import check_weights

logger = logging.get_logger(__name__)

# transformers' attn_implementation -> backend of the attention operator. None leaves the choice to config.attn_backend.
ATTN_IMPLEMENTATIONS: dict[str, str | None] = {
    "difftransformer": None,
    "eager": "reference",
    "paged|eager": "reference",  # transformers' name for it in continuous batching
    "sdpa": "sdpa",
}
# Training scripts pass these names to get fast kernels, so they choose the default.
FLASH_ATTENTION = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def known_implementation(name: str | None) -> str:
    """Return the key of `ATTN_IMPLEMENTATIONS` for a value of attn_implementation; None is the default.

    Raises:
        ConfigError: The value is not supported.
    """
    # transformers passes no mask at all for a name that it does not know, so every accepted name has a backend here.
    known = name or "difftransformer"
    if known not in ATTN_IMPLEMENTATIONS:
        known = known.removeprefix("paged|")  # the older names for continuous batching
    if known in FLASH_ATTENTION:
        logger.warning_once(f"attn_implementation={name!r}: the model's default kernels are used in its place")
        return "difftransformer"
    if known not in ATTN_IMPLEMENTATIONS:
        raise ConfigError(
            # transformers' words, which its own tests look for
            f'Specified `attn_implementation="{name}"` is not supported; leave it out for the default kernels '
            f"('difftransformer'), or choose one of {', '.join(ATTN_IMPLEMENTATIONS)}"
        )
    return known


class CardedModel(PreTrainedModel):  # type: ignore[misc]
    """What models of this package and differential models of other families have in common beside their attention."""

    loss_chunk_tokens: int | None = None
    opened_from: Path | None = None  # a folder

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any) -> Any:
        """Open a model as `PreTrainedModel.from_pretrained` does, from safetensors inside the folder alone.

        Raises:
            CheckpointError: The weights, or an adapter's, are pickles or lie outside the folder.
        """
        subfolder = options.get("subfolder", "")
        folder = Path(str(pretrained_model_name_or_path), subfolder)
        if options.get("gguf_file") is None:
            check_weights(folder, options.get("variant"))
        if adapter := (options.get("adapter_kwargs") or {}).get("_adapter_model_path"):  # as the Auto classes pass it
            check_weights(Path(str(adapter), subfolder))
        opened = super().from_pretrained(
            pretrained_model_name_or_path, *arguments, **{**options, "use_safetensors": True}
        )
        model = opened[0] if isinstance(opened, tuple) else opened
        model.opened_from = folder.resolve() if folder.is_dir() else None
        return opened

    def has_loss_in_chunks(self) -> bool:
        """Whether a language model computes the loss of labels from its output layer's weight, `loss_chunk_tokens` at a time.

        An adapter on the layer, or a bias, adds to the logits, so that all of them are computed.
        """
        head = getattr(self, "lm_head", None)
        return self.loss_chunk_tokens is not None and type(head) is nn.Linear and head.bias is None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Save the model as `PreTrainedModel.save_pretrained` does, and write a model card (README.md).

        A card that was edited by hand is kept. Adapters and pushes to the hub get the cards of PEFT and transformers.
        """
        super().save_pretrained(save_directory, is_main_process, state_dict, push_to_hub, *arguments, **options)
        if is_main_process:
            save_card(self, Path(save_directory), pushed=push_to_hub, counts=self._counts())

    def _counts(self) -> Counts | None:
        """Return the sizes on the card; None counts the parameters of a model of this package."""
        return None

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def _resolve_parallel_plans(self, distributed_config: Any) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        tensors, experts, sharded = super()._resolve_parallel_plans(distributed_config)
        return tensors, experts, with_parts_first(self, sharded)


class DiffTransformerPreTrainedModel(CardedModel):
    """Base class of `DiffTransformerModel` and of the models with an output layer."""

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
        self._seed: int | None = None  # of the base model, from which the models around it draw as well
        self._start: Start | None = None
        self.deferred: dict[str, Make] = {}

    def save_pretrained(self, *arguments: Any, **options: Any) -> None:
        """Save the model, and warn if a layer has other constants than the one at its place gets when the folder is opened."""
        layers = [module for module in self.modules() if isinstance(module, Attention)]
        if len(layers) == self.config.num_hidden_layers:
            self._warn_of_lost_constants(layers)
        super().save_pretrained(*arguments, **options)

    def _warn_of_lost_constants(self, layers: list[Attention]) -> None:
        with torch.device("meta"):
            opened = [self.config.attention.from_config(self.config, index) for index in range(len(layers))]
        for index, pair in enumerate(zip(layers, opened, strict=True)):
            now, then = (getattr(layer, "_numbers", {}) for layer in pair)
            if lost := [name for name in now if now[name] != then.get(name)]:
                warnings.warn(
                    f"layer {index} has {lost[0]}={now[lost[0]]}, and the saved folder opens with {then.get(lost[0])}, so "
                    "that it computes another function: weights do not hold constants; set them in the configuration, and "
                    "mind that lambda_init depends on a layer's place",
                    stacklevel=3,
                )
                return

    def post_init(self) -> None:
        """Finish the initialisation as `PreTrainedModel.post_init` does, with the parameters that stay in fp32."""
        there = {name.rpartition(".")[2] for name, _ in self.named_parameters()}
        self._keep_in_fp32_modules_strict = [name for name in self.config.attention.kept_in_fp32() if name in there]
        super().post_init()

    def initialize_weights(self) -> None:
        """Give every parameter that was not read from files its first value (see `initialization.Start`)."""
        models = [module for module in self.modules() if isinstance(module, DiffTransformerPreTrainedModel)]
        start = self._new_start()
        for model in models:
            model._start = start
        super().initialize_weights()
        for model in models:
            model._start = None

    def _new_start(self) -> Start:
        base = self.base_model
        if base._seed is None and not all(getattr(one, "_is_hf_initialized", False) for one in self.parameters()):
            base._seed = new_seed()  # files lack parameters
        return Start(self, base._seed or 0, base.deferred)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if self._start is None and module not in [*self.modules()]:
            # `resize_token_embeddings` makes a matrix with more rows.
            assert isinstance(module, (nn.Embedding, nn.Linear))
            Start(module, new_seed() or 0, {}).embedding(module.weight, config)
            return
        start = self._start or self._new_start()  # a model around this one starts its modules one by one
        if isinstance(module, nn.Embedding):
            start.embedding(module.weight, config, padding=module.padding_idx)
        elif isinstance(module, nn.Linear) and module is self.get_output_embeddings():
            start.embedding(module.weight, config)
        elif isinstance(module, nn.Linear):
            start.linear(module.weight, config)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, Attention):
            start.attention(module, config)
        elif config.small_first_logits and module is getattr(self.base_model, "norm", None):
            start.last_norm(module.weight, config)
        else:
            super()._init_weights(module)

    def _initialize_weights(self, module: nn.Module, *_: Any) -> None:
        # For classes outside transformers, the base class skips modules without parameters of their own. An attention layer
        # may have none, but its projections still need values. The functions of `init` leave loaded weights alone.
        super()._initialize_weights(module)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        name = known_implementation(attn_implementation)
        backend = ATTN_IMPLEMENTATIONS[name] or self.config.attn_backend
        for module in self.modules():
            if isinstance(module, Attention):
                module.backend = backend
        return name

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Refuse what transformers' method of this name does; see `refuse_remote_code`."""
        refuse_remote_code(cls, auto_class)

    @staticmethod
    def create_masks_for_generate(
        *,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> Tensor | None:
        """Return the 2-D mask, padded to the width of a static cache so that its shape is the same in every step."""
        if attention_mask is None or past_key_values is None or bool(attention_mask.all()):
            return None
        keys, offset = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)
        return nn.functional.pad(attention_mask, (0, max(0, keys + offset - attention_mask.shape[1])), value=1)


def with_parts_first(model: nn.Module, sharded: dict[str, str]) -> dict[str, str]:
    """Return an FSDP2 plan in which the submodules of an attention layer come before the layer.

    FSDP2 shards a layer's parameters together, in one dtype. Where vectors of the layer itself stay in fp32, transformers gives
    the layer a group of its own, from which its submodules must be taken first.
    """
    parts = {
        f"{name}.{part}": sharded[name]
        for name, module in model.named_modules()
        if name in sharded and isinstance(module, Attention)
        for part, child in module.named_children()
        if any(True for _ in child.parameters())
    }
    return parts | sharded

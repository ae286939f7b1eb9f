"""The model in torchtitan: its model specification, and the names of its weights in a Hugging Face folder.

An example to copy. Needs torchtitan 0.3. A configuration of torchtitan's trainer takes `model_spec(config)`.
Ranks may replicate and shard the weights (DDP, FSDP2, HSDP).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.protocols import BaseModel, ModelSpec, StateDictAdapter

from difftransformer.errors import ConfigError
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM, count

PREFIX = "model."
BACKEND = "partial_dtensor"
"""`parallelism.spmd_backend` of torchtitan; the others check the types of all operations."""
_TIED, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class TitanDiffTransformer(BaseModel):
    """`DiffTransformerForCausalLM` behind the interface of torchtitan's models.

    Attributes:
        model: The model. Its weights are `PREFIX` and their names in a Hugging Face folder.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Configuration of torchtitan, which holds one of `DiffTransformerConfig`.

        Attributes:
            fields: Fields of `DiffTransformerConfig`.
        """

        fields: dict[str, Any] = field(default_factory=dict)

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Check the trainer's configuration.

            Raises:
                ConfigError: Rows are longer than the model's positions, or ranks divide more than weights and rows.
            """
            longest = DiffTransformerConfig(**self.fields).max_position_embeddings
            if config.training.seq_len > longest:
                raise ConfigError(
                    f"training.seq_len={config.training.seq_len} is above max_position_embeddings={longest}; raise the latter"
                )
            if config.parallelism.spmd_backend != BACKEND:
                raise ConfigError(
                    f"spmd_backend={config.parallelism.spmd_backend!r}: only {BACKEND!r} is supported; set it"
                )
            for name in ("tensor", "context", "pipeline"):
                degree = getattr(config.parallelism, f"{name}_parallel_degree")
                if degree > 1:
                    raise ConfigError(
                        f"{name}_parallel_degree={degree}: only data_parallel degrees may be above 1 here; set it to 1"
                    )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the parameters and the FLOPs of a training step per token."""
            counts = count(DiffTransformerConfig(**self.fields), context_tokens=seq_len)
            return counts.parameters, counts.train_flops_per_token

    def __init__(self, config: "TitanDiffTransformer.Config") -> None:
        super().__init__()
        self.low_precision: torch.dtype | None = None
        self.model = DiffTransformerForCausalLM(DiffTransformerConfig(**config.fields))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: None = None) -> Tensor:
        """Return logits, (B, T, V).

        Args:
            tokens: (B, T).
            positions: (B, T) positions that start at 0 in each packed document.
            attention_masks: Not used: documents are recognised by their positions.
        """
        with torch.autocast(tokens.device.type, self.low_precision, enabled=self.low_precision is not None):
            logits: Tensor = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return logits

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Draw the weights, and compute what is not saved with them."""
        for module in self.model.modules():
            for value in (module, *module.parameters(recurse=False), *module.buffers(recurse=False)):
                value._is_hf_initialized = False
        self.model.init_weights()

    def verify_module_protocol(self) -> None:
        """Pass: the parts of the model are PyTorch modules."""


class TitanStateDictAdapter(StateDictAdapter):
    """Converts between weights in torchtitan's checkpoints and in a Hugging Face folder."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the weights by their names in a Hugging Face folder; tied weights once."""
        found = {name.removeprefix(PREFIX): value for name, value in state_dict.items()}
        if self._is_tied():
            found.pop(_TIED, None)
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the weights of a Hugging Face folder by their names in torchtitan."""
        given = {_TIED: hf_state_dict[_EMBEDDING]} | hf_state_dict if self._is_tied() else hf_state_dict
        return {PREFIX + name: value for name, value in given.items()}

    def _is_tied(self) -> bool:
        return bool(DiffTransformerConfig(**self.model_config.fields).tie_word_embeddings)


def parallelize(
    model: TitanDiffTransformer, *, parallel_dims: Any, training: Any, compile_config: Any, ac_config: Any, **_: Any
) -> TitanDiffTransformer:
    """Divide the weights among the ranks, layer by layer.

    Gradients are summed in fp32. Weights are gathered in fp32 and matrix products are in `mixed_precision_param`, so lambda
    stays in fp32. Any kind of activation checkpointing keeps the input of each layer alone.
    """
    if training.mixed_precision_param != "float32":
        model.low_precision = getattr(torch, training.mixed_precision_param)
    if ac_config is not None:
        model.model.gradient_checkpointing_enable()
    if compile_config.enable and "model" in compile_config.components:
        for layer in model.model.model.layers:
            layer.compile()
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*model.model.model.layers, model):
        fully_shard(part, mesh=parallel_dims.get_mesh(names), mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # torchtitan divides the loss by the tokens of all ranks
            module.set_force_sum_reduction_for_comms(True)
    return model


def model_spec(config: DiffTransformerConfig) -> ModelSpec:
    """Return torchtitan's specification of a model."""
    return ModelSpec(
        name="difftransformer",
        flavor=config.attention_type,
        model=TitanDiffTransformer.Config(fields=config.to_diff_dict()),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=TitanStateDictAdapter,
    )

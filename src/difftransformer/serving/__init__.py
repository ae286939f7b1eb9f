"""Models of this package in inference servers. Only the module vllm_model imports vLLM."""

MODEL_CLASS = "difftransformer.serving.vllm_model:DiffTransformerForCausalLM"


def register() -> None:
    """Register our models with vLLM (entry point `vllm.general_plugins`). vLLM calls this in each process, maybe twice."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    from ..families import FAMILIES, DifferentialFamilyConfig
    from ..model import DiffTransformerConfig  # their imports register them with AutoConfig
    from .heads import ServedHeads

    class HeadsConvertor(ModelArchConfigConvertorBase):  # type: ignore[misc]
        """What vLLM plans caches and kernels for: the configuration's own fields describe the same-size Transformer."""

        def get_total_num_attention_heads(self) -> int:
            return ServedHeads.of(self.hf_text_config).query_heads

        def get_total_num_kv_heads(self) -> int:
            return ServedHeads.of(self.hf_text_config).key_value_heads

        def get_head_size(self) -> int:
            return ServedHeads.of(self.hf_text_config).head_size

    # A family is named so that vLLM asks for its heads, and gets the reason where it is not served.
    families = (f"Differential{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]}" for family in FAMILIES)
    for architecture in (MODEL_CLASS.partition(":")[2], *families):
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, MODEL_CLASS)
    for config in (DiffTransformerConfig, DifferentialFamilyConfig):
        MODEL_ARCH_CONFIG_CONVERTORS[config.model_type] = HeadsConvertor


__all__ = ["MODEL_CLASS", "register"]

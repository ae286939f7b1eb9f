"""Models of this package in inference servers. Only the modules named vllm_* import vLLM."""

MODEL_CLASS = "difftransformer.serving.vllm_model:DiffTransformerForCausalLM"


def register() -> None:
    """Register our model with vLLM (entry point `vllm.general_plugins`). vLLM calls this in each process, maybe twice."""
    from vllm import ModelRegistry
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from ..model import DiffTransformerConfig  # its import registers it with AutoConfig
    from .vllm_config import HeadsConvertor

    architecture = MODEL_CLASS.partition(":")[2]
    if architecture not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, MODEL_CLASS)
    MODEL_ARCH_CONFIG_CONVERTORS[DiffTransformerConfig.model_type] = HeadsConvertor


__all__ = ["MODEL_CLASS", "register"]

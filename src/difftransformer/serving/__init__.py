"""Models of this package in inference servers. Only `vllm_model` imports vLLM, and vLLM loads it by name."""

MODEL_CLASS = "difftransformer.serving.vllm_model:DiffTransformerForCausalLM"


def register() -> None:
    """Register our model with vLLM (entry point `vllm.general_plugins`). vLLM calls this in each process, maybe twice."""
    from vllm import ModelRegistry

    from ..model import DiffTransformerConfig  # its import registers it with AutoConfig

    architecture = MODEL_CLASS.partition(":")[2]
    if architecture not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, MODEL_CLASS)


__all__ = ["MODEL_CLASS", "register"]

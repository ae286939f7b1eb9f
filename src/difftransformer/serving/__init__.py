"""Our models in inference servers. vLLM is imported only by `vllm_model`, which vLLM itself loads by name."""

MODEL_CLASS = "difftransformer.serving.vllm_model:DiffTransformerForCausalLM"


def register() -> None:
    """Tell vLLM of our model (entry point `vllm.general_plugins`); vLLM calls it in each of its processes, maybe twice."""
    from vllm import ModelRegistry

    from ..model import DiffTransformerConfig  # its import registers it with AutoConfig

    architecture = MODEL_CLASS.partition(":")[2]
    if architecture not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, MODEL_CLASS)


__all__ = ["MODEL_CLASS", "register"]

"""The language model, its configuration, sizes and counts. Names are resolved on first use, so that presets need no torch."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".acceleration": ("accelerate", "restore"),
        ".config": ("DiffTransformerConfig",),
        ".counts": ("Counts", "count", "weights_and_kv_bytes"),
        ".modeling": ("DiffTransformerForCausalLM", "DiffTransformerModel", "DiffTransformerPreTrainedModel"),
        ".presets": ("PRESETS", "Preset", "preset"),
    },
)

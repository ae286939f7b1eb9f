"""Evaluations: validation loss, multi-needle retrieval, attention allocation; tasks of lm-eval."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".lm_harness": ("run_harness",),
        ".language_model": ("CausalLanguageModel",),
        ".runner": ("run_task",),
        ".task": ("LanguageModel",),
        ".texts": ("Setting",),
    },
)

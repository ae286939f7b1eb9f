"""Evaluations: validation loss, multi-needle retrieval, attention allocation."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".allocation": ("evaluate_allocation",),
        ".base": ("AllocationConfig", "EvaluationConfig", "LanguageModel", "NeedleConfig", "NllConfig"),
        ".language_model": ("DecoderLanguageModel",),
        ".needle": ("evaluate_needle",),
        ".perplexity": ("evaluate_nll",),
        ".run": ("EvaluationResults", "check_evaluation", "evaluate"),
    },
)

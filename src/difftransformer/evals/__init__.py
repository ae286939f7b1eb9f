"""Evaluations: validation loss, multi-needle retrieval, attention allocation; tasks of lm-eval."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".allocation": ("evaluate_allocation",),
        ".config": ("AllocationConfig", "EvaluationConfig", "NeedleConfig", "NllConfig"),
        ".harness": ("run_harness",),
        ".language_model": ("CausalLanguageModel",),
        ".needle": ("evaluate_needle",),
        ".perplexity": ("evaluate_nll",),
        ".runner": ("run_task",),
        ".task": ("LanguageModel",),
        ".run": ("EvaluationResults", "check_evaluation", "evaluate"),
    },
)

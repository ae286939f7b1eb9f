"""Evaluations: validation loss, multi-needle retrieval, attention allocation; tasks of lm-eval."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".tasks.allocation": ("evaluate_allocation",),
        ".config": ("AllocationConfig", "EvaluationConfig", "NeedleConfig", "NllConfig"),
        ".lm_harness": ("run_harness",),
        ".language_model": ("CausalLanguageModel",),
        ".tasks.needle": ("evaluate_needle",),
        ".tasks.perplexity": ("evaluate_nll",),
        ".runner": ("run_task",),
        ".task": ("LanguageModel",),
        ".run": ("EvaluationResults", "check_evaluation", "evaluate"),
    },
)

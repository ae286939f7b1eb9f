"""Evaluations: tasks, the models that answer them, probes of a model's inside, judges, and the engine that runs a task."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".config": ("AllocationConfig", "EvaluationConfig", "NeedleConfig", "NllConfig"),
        ".engine": ("Task", "run_task"),
        ".models.causal": ("CausalLanguageModel",),
        ".registry": ("TaskKind", "register"),
        ".requests": ("LanguageModel",),
        ".run": ("EvaluationResults", "check_evaluation", "evaluate"),
        ".tasks.allocation": ("evaluate_allocation",),
        ".tasks.needle": ("evaluate_needle",),
        ".tasks.perplexity": ("evaluate_nll",),
    },
)

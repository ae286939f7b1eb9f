"""Evaluations: tasks, the models that answer them, probes of a model's inside, judges, and the engine that runs a task."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".engine": ("Task", "run_task"),
        ".models.causal": ("CausalLanguageModel",),
        ".registry": ("TaskKind", "register"),
        ".prompts.texts": ("Setting",),
        ".requests": ("LanguageModel",),
    },
)

"""Evaluations: tasks, the models that answer them, probes of a model's inside, and the engine that runs a task."""

from typing import TYPE_CHECKING

from difftransformer._lazy import lazy_names

if TYPE_CHECKING:
    from .engine import Task, run_task
    from .evaluate import TaskSpec, evaluate_task
    from .models.causal import CausalLanguageModel
    from .prompts.texts import TaskContext
    from .registry import TaskKind, register
    from .requests import LanguageModel

__getattr__, __dir__, __all__ = lazy_names(__name__)

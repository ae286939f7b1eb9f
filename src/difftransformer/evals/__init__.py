"""Evaluations: tasks, the models that answer them, probes of a model's inside, judges, and the engine that runs a task."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .config import AllocationConfig, EvaluationConfig, NeedleConfig, NllConfig
    from .engine import Task, run_task
    from .models.causal import CausalLanguageModel
    from .registry import TaskKind, register
    from .requests import LanguageModel
    from .run import EvaluationResults, check_evaluation, evaluate
    from .tasks.allocation import evaluate_allocation
    from .tasks.needle import evaluate_needle
    from .tasks.perplexity import evaluate_nll

__getattr__, __dir__, __all__ = lazy_names(__name__)

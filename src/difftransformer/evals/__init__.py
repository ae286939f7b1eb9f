"""Evaluations: validation loss, multi-needle retrieval, attention allocation; tasks of lm-eval."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .config import AllocationConfig, EvaluationConfig, NeedleConfig, NllConfig
    from .language_model import CausalLanguageModel
    from .lm_harness import run_harness
    from .run import EvaluationResults, check_evaluation, evaluate
    from .runner import run_task
    from .task import LanguageModel
    from .tasks.allocation import evaluate_allocation
    from .tasks.needle import evaluate_needle
    from .tasks.perplexity import evaluate_nll

__getattr__, __dir__, __all__ = lazy_names(__name__)

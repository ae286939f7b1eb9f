"""All evaluations of one model that a configuration asks for."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..data import Shards, validation_windows
from ..model import DiffTransformerForCausalLM
from ..results import AllocationResult, NeedleResult, NllResult
from .config import EvaluationConfig
from .models.causal import UNBOUNDED, CausalLanguageModel
from .tasks.allocation import allocation_questions, evaluate_allocation
from .tasks.needle import evaluate_needle, needle_cells
from .tasks.perplexity import evaluate_nll


@dataclass(frozen=True, kw_only=True)
class EvaluationResults:
    """What was measured; None where an evaluation was left out."""

    nll: NllResult | None
    needle: NeedleResult | None
    allocation: AllocationResult | None


def check_evaluation(shards: Shards, config: EvaluationConfig, *, context_tokens: int) -> None:
    """Draw one document of everything that an evaluation will ask, so that what cannot be is refused before training.

    Raises:
        ConfigError: too many needles for their digits.
        DataError: needles that do not fit into a length, or validation text shorter than the context.
    """
    if config.nll is not None:
        validation_windows(shards, context_tokens, config.nll.windows)
    if config.needle is not None:
        for _ in needle_cells(shards, replace(config.needle, documents=1), context_tokens=context_tokens):
            pass
    if config.allocation is not None:
        allocation_questions(shards, replace(config.allocation, documents=1), context_tokens=context_tokens)


def evaluate(
    model: DiffTransformerForCausalLM,
    shards: Shards,
    config: EvaluationConfig,
    *,
    context_tokens: int,
    say: Callable[[str], None] = lambda text: None,
) -> EvaluationResults:
    """Run the evaluations on a model.

    Args:
        model: On any device.
        shards: Validation text and tokenizer.
        config: Which evaluations.
        context_tokens: The trained context, for those that name no length.
        say: Told which evaluation is running.
    """
    # A recipe may ask beyond the trained context. Rows side by side: a study's models are small, and their prompts short.
    language_model = CausalLanguageModel(
        model, shards.tokenizer, context_tokens=UNBOUNDED, batch_tokens=config.batch_tokens, prefix_caching=False
    )
    nll = needle = allocation = None
    if config.nll is not None:
        say("validation loss")
        nll = evaluate_nll(language_model, shards, config.nll, context_tokens=context_tokens)
    if config.needle is not None:
        say("needle retrieval")
        needle = evaluate_needle(language_model, shards, config.needle, context_tokens=context_tokens)
    if config.allocation is not None:
        say("attention allocation")
        allocation = evaluate_allocation(language_model, shards, config.allocation, context_tokens=context_tokens)
    return EvaluationResults(nll=nll, needle=needle, allocation=allocation)

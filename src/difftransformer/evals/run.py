"""All evaluations of one model that a configuration asks for."""

from collections.abc import Callable
from dataclasses import dataclass

from ..data import Shards
from ..model import DiffTransformerForCausalLM
from ..results import AllocationResult, NeedleResult, NllResult
from .allocation import evaluate_allocation
from .base import EvaluationConfig
from .language_model import DecoderLanguageModel
from .needle import evaluate_needle
from .perplexity import evaluate_nll


@dataclass(frozen=True, kw_only=True)
class EvaluationResults:
    """What was measured; None where an evaluation was left out."""

    nll: NllResult | None
    needle: NeedleResult | None
    allocation: AllocationResult | None


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
    language_model = DecoderLanguageModel(model, batch_tokens=config.batch_tokens)
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

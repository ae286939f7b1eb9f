"""Multi-needle retrieval (arXiv:2410.05258 section 3.3): which magic number was a city's?

The paper states neither the haystack, the prompt of a base model, nor how two answers are scored. Here the haystack is
validation text, the prompt ends with the start of the needle's own sentence, and every needle asked for is one trial,
right when the greedy continuation starts with all its digits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..data import CITIES_SEEN, CITIES_UNSEEN, NeedleQuestion, Shards, evaluation_document
from ..results import Cities, NeedleCell, NeedleResult
from .base import LanguageModel, NeedleConfig

CITIES: dict[Cities, tuple[str, ...]] = {"seen": CITIES_SEEN, "unseen": CITIES_UNSEEN}


@dataclass(frozen=True, kw_only=True)
class CellQuestions:
    """The documents of one cell of the grid."""

    length_tokens: int
    depth: float
    needles: int
    asked: int
    cities: Cities
    questions: list[NeedleQuestion]


def needle_cells(shards: Shards, config: NeedleConfig, *, context_tokens: int) -> Iterator[CellQuestions]:
    """Every cell's documents: a function of the configuration's seed and the shards, so every model gets the same."""
    haystack = shards.tokens("validation")
    for length in config.lengths_tokens or [context_tokens]:
        for needles, asked in config.needles:
            for depth in config.depths:
                for cities, names in CITIES.items():
                    identity = [config.seed, length, needles, asked, round(depth * 1000), len(names)]
                    rng = np.random.default_rng(identity)
                    questions = [
                        evaluation_document(
                            rng,
                            shards.tokenizer,
                            haystack,
                            length_tokens=length,
                            depth=depth,
                            needles=needles,
                            asked=asked,
                            digits=config.digits,
                            cities=names,
                        )
                        for _ in range(config.documents)
                    ]
                    yield CellQuestions(
                        length_tokens=length,
                        depth=depth,
                        needles=needles,
                        asked=asked,
                        cities=cities,
                        questions=questions,
                    )


def evaluate_needle(model: LanguageModel, shards: Shards, config: NeedleConfig, *, context_tokens: int) -> NeedleResult:
    """The share of exact answers in every cell of needles x depth x cities.

    Args:
        model: The model.
        shards: Validation text and tokenizer.
        config: The grid.
        context_tokens: Length where the configuration names none.

    Raises:
        DataError: needles and question do not fit into the length.
    """
    # A space and one token for each digit, whatever the tokenizer merges.
    answer_tokens = config.digits + 1
    cells = []
    for cell in needle_cells(shards, config, context_tokens=context_tokens):
        prompts = torch.tensor([prompt for question in cell.questions for prompt in question.prompts])
        answers = [answer for question in cell.questions for answer in question.answers]
        continuations = model.continue_greedily(prompts, answer_tokens)
        texts = [shards.tokenizer.decode(ids) for ids in continuations.tolist()]
        cells.append(
            NeedleCell(
                length_tokens=cell.length_tokens,
                depth=cell.depth,
                needles=cell.needles,
                asked=cell.asked,
                cities=cell.cities,
                correct=sum(text.strip().startswith(answer) for text, answer in zip(texts, answers, strict=True)),
                trials=len(answers),
            )
        )
    return NeedleResult(digits=config.digits, chance=10.0**-config.digits, cells=cells)

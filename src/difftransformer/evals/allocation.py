"""Attention allocation (arXiv:2410.05258 Figure 1 and Table 3): where does the last prompt token look?

The paper gives its formula as an image only; its authors say that scores are averaged over heads and layers. A
differential map has negative weights, so a share can be meant in three ways, and all are reported. For each document the
weights of all heads and layers of the last prompt token are added up by segment, then divided by their total:

    signed      sum of w / sum of all w          (the total of a head is 1 - lambda)
    absolute    sum of |w| / sum of all |w|
    positive    sum of max(w, 0) / sum of all max(w, 0)

For softmax attention the three agree.
"""

import math
from typing import Any

import numpy as np

from ..data import CITIES_SEEN, NeedleQuestion, Shards, evaluation_document
from ..results import AllocationResult, AllocationShare, Form, Segment
from .config import AllocationConfig
from .segments import FORMS
from .task import LanguageModel, LastRow, answers_to

SEGMENTS: tuple[Segment, ...] = ("first", "before", "answer", "after", "query")


def segment_shares(sums: Any) -> dict[Form, list[float]]:
    """Shares of one document by form and segment, over all heads and layers.

    Args:
        sums: `segments.row_sums` of the last prompt token: [layer][head][form][segment].

    Returns:
        For each form, the shares in the order of SEGMENTS; they sum to 1.
    """
    columns = np.array([head for layer in sums for head in layer]).sum(0)
    return {form: (row / row.sum()).tolist() for form, row in zip(FORMS, columns, strict=True)}


def edges_of(question: NeedleQuestion) -> tuple[int, ...]:
    """Bounds of SEGMENTS in a question's first prompt."""
    start, end = question.spans[0]
    return 0, 1, max(1, start), end, question.query_starts[0], len(question.prompts[0])


def allocation_questions(
    shards: Shards, config: AllocationConfig, *, context_tokens: int
) -> dict[float, list[NeedleQuestion]]:
    """Depth -> documents: a function of the configuration's seed and the shards, so every model gets the same.

    Raises:
        DataError: needles and question do not fit into the length.
    """
    length = config.length_tokens or context_tokens
    haystack = shards.tokens("validation")
    questions = {}
    for depth in config.depths:
        rng = np.random.default_rng([config.seed, length, config.needles, round(depth * 1000)])
        questions[depth] = [
            evaluation_document(
                rng,
                shards.tokenizer,
                haystack,
                length_tokens=length,
                depth=depth,
                needles=config.needles,
                asked=1,
                digits=config.digits,
                cities=CITIES_SEEN,
            )
            for _ in range(config.documents)
        ]
    return questions


def evaluate_allocation(
    model: LanguageModel, shards: Shards, config: AllocationConfig, *, context_tokens: int
) -> AllocationResult:
    """Mean share of each segment over documents, with its standard error, at every depth of the answer.

    Args:
        model: The model.
        shards: Validation text and tokenizer.
        config: Needles, depths and documents.
        context_tokens: Length where the configuration names none.

    Raises:
        DataError: needles and question do not fit into the length.
    """
    shares: list[AllocationShare] = []
    for depth, questions in allocation_questions(shards, config, context_tokens=context_tokens).items():
        requests = [LastRow(tuple(question.prompts[0]), edges_of(question)) for question in questions]
        documents = [segment_shares(sums) for sums in answers_to(model, requests)]
        for form in FORMS:
            for index, segment in enumerate(SEGMENTS):
                values = np.array([document[form][index] for document in documents])
                error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
                shares.append(
                    AllocationShare(
                        depth=depth,
                        form=form,
                        segment=segment,
                        share=float(values.mean()),
                        standard_error=float(error),
                    )
                )
    return AllocationResult(
        length_tokens=config.length_tokens or context_tokens,
        needles=config.needles,
        documents=config.documents,
        shares=shares,
    )

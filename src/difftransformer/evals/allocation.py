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
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..data import CITIES_SEEN, NeedleQuestion, Shards, evaluation_document
from ..results import AllocationResult, AllocationShare, Form, Segment
from .base import AllocationConfig, LanguageModel

SEGMENTS: tuple[Segment, ...] = ("first", "before", "answer", "after", "query")
FORMS: tuple[Form, ...] = ("signed", "absolute", "positive")


def segment_shares(weights: Tensor, bounds: tuple[int, int, int]) -> dict[Form, list[float]]:
    """Shares of one row of weights by form and segment.

    Args:
        weights: (heads, T): all heads and layers, one query.
        bounds: Start and end of the answer's needle, and start of the question.

    Returns:
        For each form, the shares in the order of SEGMENTS; they sum to 1.
    """
    start, end, question = bounds
    edges = [0, 1, max(1, start), end, question, weights.shape[1]]
    forms: dict[Form, Tensor] = {"signed": weights, "absolute": weights.abs(), "positive": weights.clamp(min=0)}
    shares: dict[Form, list[float]] = {}
    for form, values in forms.items():
        columns = values.double().sum(0)
        total = columns.sum()
        shares[form] = [(columns[a:b].sum() / total).item() for a, b in pairwise(edges)]
    return shares


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
        rows = model.last_token_weights(torch.tensor([question.prompts[0] for question in questions]))
        documents = [
            segment_shares(row, (*question.spans[0], question.query_starts[0]))
            for row, question in zip(rows, questions, strict=True)
        ]
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

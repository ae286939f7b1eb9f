"""Answers during training: those that a model would give, greedily, to held-out questions, and the loss of the right ones."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import CITIES_SEEN, Shards, needle_document_tokens, needle_questions, validation_rows
from ..data.documents import IGNORED
from ..model import DiffTransformerForCausalLM
from .checkpoint import CheckpointState
from .config import TrainingConfig
from .parallel import Mesh
from .trainer import Callback, Trainer

LOGITS_AT_ONCE = 2**26


class Answers(NamedTuple):
    """Held-out rows whose targets are answers.

    Attributes:
        rows: (N, 3, T) inputs, targets and positions.
        whole: Whether the targets of a row are one answer; else each is one.
        at_once: Number of rows whose logits are in memory together.
    """

    rows: Tensor
    whole: bool
    at_once: int


class Accuracy(Callback):
    """Adds `answer_scores` to every validation."""

    def on_restore(self, trainer: Trainer, state: CheckpointState | None) -> None:
        """Take the answers, so that what they refuse is refused before training."""
        self._answers = held_out_answers(trainer.shards, trainer.config, trainer.mesh)

    def on_validation(self, trainer: Trainer, figures: dict[str, Any]) -> None:
        """Score the answers."""
        if self._answers is not None:
            scores = answer_scores(trainer.model, self._answers, trainer.config, trainer.mesh)
            figures["validation_accuracy"], figures["validation_answer_nll_nats"] = scores


def held_out_answers(shards: Shards, config: TrainingConfig, mesh: Mesh) -> Answers | None:
    """Return the answers that a run is asked for in held-out data.

    Of examples (synthetic tasks, rows with labels), every scored token of the run's validation rows is an answer. Of needle
    documents, an answer is a whole number, and there are `validation_windows` documents (see `needle_questions`).

    The result is None where not all data ask for answers, where a row has more than `LOGITS_AT_ONCE` logits, and for needle
    documents where processes divide the tokens of a row, or where the shortest document is longer than a row.

    Raises:
        DataError: See `needle_questions` and `validation_rows`.
    """
    context, documents = config.context_tokens, config.validation_windows
    at_once = LOGITS_AT_ONCE // (context * shards.tokenizer.vocab_size)
    if not at_once:
        return None
    if shards.manifest.content == "examples":
        return Answers(validation_rows(shards, context, documents), False, at_once)
    if config.retrieval is None or config.retrieval.share == 0 or mesh.context > 1:
        return None
    sizes = {"needles": 1, "asks": 1, "digits": config.retrieval.digits}
    if needle_document_tokens(shards.tokenizer, **sizes, cities=CITIES_SEEN) > context:
        return None
    questions = needle_questions(
        shards.tokenizer, shards.tokens("validation"), context_tokens=context, mix=config.retrieval, documents=documents
    )
    inputs, answers = map(torch.from_numpy, questions)
    return Answers(torch.stack([inputs, answers, torch.arange(context).expand_as(inputs)], 1), True, at_once)


@torch.no_grad()
def answer_scores(
    model: DiffTransformerForCausalLM, answers: Answers, config: TrainingConfig, mesh: Mesh
) -> tuple[float, float]:
    """Return the share of right answers, and the mean negative log-likelihood of the right answer in nats.

    A token is right if it has the highest logit given all before it, so an answer of several tokens is right if greedy decoding
    gives it. The log-likelihood of an answer is the sum over its tokens.
    """
    rows, whole, at_once = answers
    if mesh.context > 1 and config.pack_documents:
        at_once = 1  # `mesh.inputs` divides one packed row at a time
    held, counts = mesh.own_rows(rows)
    model.eval()
    device = mesh.processes.device
    right, asked, nll_nats = 0, 0, 0.0
    for part, weight in zip(held.split(at_once), counts.split(at_once), strict=True):
        ids, targets, positions = part.unbind(1)
        packed = positions if config.pack_documents and not whole else None
        arguments = mesh.inputs(ids, targets.where(weight, IGNORED), packed)
        targets = arguments.pop("targets")
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            logits = model(**arguments, use_cache=False).logits
        one_right, one_asked = _counted(logits.argmax(-1), targets, whole)
        right, asked = right + one_right, asked + one_asked
        is_asked = targets != IGNORED
        nll_nats += float(F.cross_entropy(logits[is_asked].float(), targets[is_asked], reduction="sum"))
    model.train()
    mesh.forget_whole(model)
    sums = torch.tensor([asked, right, nll_nats], dtype=torch.float64, device=device)
    asked_of_all, right_of_all, nll_of_all = mesh.sum(sums).tolist()
    return right_of_all / max(1.0, asked_of_all), nll_of_all / max(1.0, asked_of_all)


def _counted(predicted: Tensor, targets: Tensor, whole: bool) -> tuple[int, int]:
    """Return the numbers of right answers and of all answers; with `whole`, a row is one answer."""
    is_asked = targets != IGNORED
    is_right = predicted == targets
    if whole:
        is_right, is_asked = (is_right | ~is_asked).all(1), is_asked.any(1)
    return int((is_right & is_asked).sum()), int(is_asked.sum())

"""Requests that look inside a model: its attention maps, and the size of its logits and hidden states.

Only a model with a method `probe` answers them, such as `models.causal.CausalLanguageModel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from difftransformer.errors import EvaluationError

from ...results import Form
from ..engine import Task
from ..requests import Answers, Asked, Prompted

FORMS: tuple[Form, ...] = ("signed", "absolute", "positive")
"""Three ways to count an attention weight w of either sign: w, |w| and max(w, 0)."""

NEAR_ZERO = 1e-3
COUNTED = (f"|weights| below {NEAR_ZERO}", "negative weights")
"""What is counted beside these sums, each as a share of all weights of the row."""

BINS = 1 << 15
"""One bin for each nonnegative bf16 number: its 15 bits are the index of the bin."""


@dataclass(frozen=True)
class LastRow(Prompted):
    """Asks where the prompt's last token looks. The answer: `maps.row_sums` of its attention weights."""

    asks = ("last row, counted", "prompt", "edges")
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Maps(Prompted):
    """Asks for the attention maps of every head on a prompt. The answer: `maps.head_maps`, with maps of the chosen heads."""

    asks = ("maps", "prompt", "layers", "heads")
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Magnitudes(Asked):
    """Asks how large attention logits and hidden states are. The answer: `magnitudes.magnitudes` over several rows."""

    asks = ("magnitudes", "rows", "largest")
    rows: tuple[tuple[int, ...], ...]
    largest: int

    @property
    def shown_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def row_tokens(self) -> int:
        return max(map(len, self.rows))


Probe = LastRow | Maps | Magnitudes


class ProbeTask(Task):
    def answer(self, model: Any, requests: Sequence[Probe]) -> Answers:
        """Probe a model.

        Raises:
            EvaluationError: The model only answers requests.
        """
        if not hasattr(model, "probe"):
            raise EvaluationError(f"{type(model).__name__} answers requests only, no probes; choose another model")
        answers: Answers = model.probe(requests)
        return answers

"""Noisy recall, small enough to be learned in 20 seconds on one core: the task and three arms of the study `recall`.

A row holds pairs of a key and its value, with noise tokens between them (MAD, arXiv:2403.17844). Whenever a key comes again,
the model must say its value. Models have two layers, width 64 and equal parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from difftransformer.data.documents import IGNORED
from difftransformer.data.synthetic import NoisyRecall
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.train import ScheduleConfig
from difftransformer.train.optim import learning_rate

from ..explorer.capture import LayerMaps, capture

EVERY = 25
CURVE_ROWS = 125
"""Held-out rows that are answered while a model trains; all of them took a third of its time."""
rate_factor = partial(learning_rate, peak=1.0, steps=1200, schedule=ScheduleConfig(warmup_steps=50, floor=0.1))
"""The rate falls as in the study's runs of 1,200 steps, of which the demo makes the first."""
BATCH_TOKENS = 1984
TASK = NoisyRecall(
    length=62, noise_share=0.6, train_on="answers", examples=48_000, test_examples=500, train_lengths=[18, 32, 62]
)
MODEL: dict[str, Any] = {
    "vocab_size": TASK.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": TASK.length,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "initialization": "fan_in",
    "attn_backend": "reference",  # as fast on 62 tokens as kernels, which would have to be compiled
}
VALUES = slice((TASK.vocab_size - TASK.noise_vocab_size) // 2, TASK.vocab_size - TASK.noise_vocab_size)
LAZY = 0.38
"""Share of right answers of always naming the value that was most frequent so far (recipes/plans/noise.yaml)."""


@dataclass(frozen=True)
class Arm:
    """A model of the demo and its learning rate.

    Of 0.00125, 0.0025 and 0.005 it is the one with the highest lowest share of right answers after 300 steps of seeds 1000 to
    1002, and the lower one where two are level.
    """

    label: str
    settings: dict[str, Any]
    rate: float


ARMS = {
    "diff": Arm("DIFF", {"attention_type": "diff"}, 2.5e-3),
    "twin-norm": Arm("Transformer + DIFF's norm", {"attention_type": "softmax_norm"}, 2.5e-3),
    "twin": Arm("Transformer", {"attention_type": "softmax"}, 1.25e-3),
}


class Row(NamedTuple):
    """A held-out row whose last token is a key, and how a model reads it.

    Attributes:
        tokens: T token ids: keys, then values, then noise.
        answer: The value of the last key.
        found: Positions of that value behind the same key.
        given: What the model answers.
        head: The head of the last layer that gives `found` the largest share of its weights.
        share: That share: the weight on `found` over the sum of absolute weights of the last token.
        weights: (T, T) weights of that head, of DIFF those of the difference.
    """

    tokens: list[int]
    answer: int
    found: list[int]
    given: int
    head: int
    share: float
    weights: np.ndarray[Any, Any]


def build(arm: Arm, seed: int) -> DiffTransformerForCausalLM:
    """Build the model of an arm with weights from `seed`."""
    torch.manual_seed(seed)
    return DiffTransformerForCausalLM(DiffTransformerConfig(**(MODEL | arm.settings)))


def held_out(seed: int) -> tuple[Tensor, Tensor]:
    """Draw 500 rows and their targets, (500, 62) each, which are the same for all arms of a seed."""
    (part,) = TASK.parts(seed, training=False)
    inputs, targets = part.draw(np.random.default_rng([seed, 1]), part.examples)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def learn(model: DiffTransformerForCausalLM, rate: float, seed: int, steps: int) -> Iterator[tuple[int, float]]:
    """Train a model, and yield the step and the share of right answers now and then: of a few rows, at the end of all."""
    rng, parts, (rows, answers) = np.random.default_rng([seed, 0]), TASK.parts(seed, training=True), held_out(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = LambdaLR(optimizer, rate_factor)
    for step in range(1, steps + 1):
        part = parts[rng.integers(len(parts))]
        inputs, targets = map(torch.from_numpy, part.draw(rng, BATCH_TOKENS // part.at["length"]))
        logits = model(input_ids=inputs, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % EVERY == 0 or step == steps:
            asked = slice(None if step == steps else CURVE_ROWS)
            yield step, accuracy(model, rows[asked], answers[asked])


@torch.inference_mode()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the share of the targets that the model ranks first."""
    answers = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
    asked = targets != IGNORED
    return float((answers[asked] == targets[asked]).float().mean())


def read(model: DiffTransformerForCausalLM, seed: int) -> Row:
    """Let a model answer a held-out row, the first in which other values are more frequent than the right one."""
    inputs, targets = held_out(seed)
    for tokens, answer in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
        counts = np.bincount(tokens, minlength=TASK.vocab_size)
        if counts[VALUES].max() > counts[answer]:
            break
    found = [i + 1 for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        given = int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
    weights = _weights(capture(model, ids)[-1])
    shares = weights[:, -1, found].sum(-1) / np.abs(weights[:, -1]).sum(-1)
    head = int(shares.argmax())
    return Row(tokens, answer, found, given, head, float(shares[head]), weights[head])


def _weights(layer: LayerMaps) -> np.ndarray[Any, Any]:
    """Return the map of each head, (H, T, T); of a differential head A1 - lambda A2."""
    maps = np.zeros((len(layer.rows[0]), len(layer.rows), len(layer.rows)), np.float32)
    for t, row in enumerate(layer.rows):
        lam = 0 if layer.lam is None else layer.lam[:, min(t, layer.lam.shape[1] - 1), None]
        maps[:, t, : t + 1] = row[:, 0] - lam * row[:, -1]
    return maps

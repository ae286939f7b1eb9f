"""Compare a pretrained model with its conversion: the two must compute the same function."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from difftransformer.errors import DataError
from difftransformer.hub import open_model
from difftransformer.progress import report

from ..results import Drift

WINDOW_TOKENS = 512  # length of one forward pass


@torch.inference_mode()
def measure_drift(source: Path | str, target: Path | str, ids: Tensor, *, greedy_tokens: int = 64) -> Drift:
    """Run a pretrained model and its conversion on the same tokens in fp32, and measure how far they differ.

    Progress is reported (see `difftransformer.progress`) in forward passes.

    Args:
        ids: (N,) token ids of a text, N at least 2, read in windows of WINDOW_TOKENS.
        greedy_tokens: Number of tokens to continue the first half of the first window with, greedily.
    """
    if ids.numel() < 2:
        raise DataError(f"{ids.numel()} tokens of text: a comparison needs at least 2; give a longer text")
    theirs, ours = open_model(source, dtype="fp32"), open_model(target, dtype="fp32")
    windows = ids.split(WINDOW_TOKENS)
    total = 2 * (greedy_tokens + len(windows))
    passes = itertools.count(1)

    def run(model: PreTrainedModel, **inputs: Any) -> Any:
        outputs = model(**inputs)
        report(next(passes), total)
        return outputs

    prompt = ids[None, : max(1, min(WINDOW_TOKENS, ids.numel()) // 2)]
    first, second = (_greedy(partial(run, model), prompt, greedy_tokens) for model in (theirs, ours))
    # Kernels round differently. With the same arithmetic on both sides, any difference comes from the conversion.
    for model in (theirs, ours):
        model.set_attn_implementation("eager")
    largest = scale = divergence = 0.0
    for window in windows:
        a, b = (run(model, input_ids=window[None], use_cache=False).logits[0] for model in (theirs, ours))
        largest = max(largest, float((a - b).abs().max()))
        scale = max(scale, float(a.abs().max()))
        a, b = a.log_softmax(-1), b.log_softmax(-1)
        divergence += float((a.exp() * (a - b)).sum())
    same = int((first == second).long().cumprod(0).sum())
    return Drift(
        tokens=ids.numel(),
        largest_logit_difference=largest,
        largest_logit=scale,
        mean_kl_nats=divergence / ids.numel(),
        greedy_tokens=greedy_tokens,
        greedy_same_tokens=same,
    )


def _greedy(run: Callable[..., Any], prompt: Tensor, tokens: int) -> Tensor:
    """Return the most likely tokens, one after another. An end of text does not stop them."""
    cache, inputs, made = None, prompt, [prompt.new_empty(0)]
    for _ in range(tokens):
        outputs = run(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, inputs = outputs.past_key_values, outputs.logits.argmax(-1)
        made.append(inputs[0])
    return torch.cat(made)

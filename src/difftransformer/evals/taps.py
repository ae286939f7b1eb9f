"""What a model's attention looks like from inside, without slowing its normal path: maps, logits, hidden states."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def last_row_weights(model: Any, ids: Tensor) -> list[Tensor]:
    """The weights by which the last token's heads add values: A1 - lambda A2 for differential attention.

    All tokens but the last go through the model's own kernels; only one row of each map is formed.

    Args:
        model: A causal language model of transformers' form.
        ids: (B, T).

    Returns:
        (B, H, T) in fp32 for each layer, on the CPU.
    """
    before = model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1)
    with _eager(model):
        last = model(
            input_ids=ids[:, -1:], past_key_values=before.past_key_values, use_cache=True, output_attentions=True
        )
    return [weights[:, :, -1].float().cpu() for weights in last.attentions]


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)

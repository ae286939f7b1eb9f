"""The loss that training and evaluation share."""

import torch.nn.functional as F
from torch import Tensor, nn


def next_token_nll(model: nn.Module, input_ids: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in nats.

    Args:
        model: A causal language model of transformers' form.
        input_ids: (B, T).
        targets: (B, T), the token after each of input_ids.

    Returns:
        (B, T) in fp32.
    """
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

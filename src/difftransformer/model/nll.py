"""The loss that training and evaluation share."""

import torch.nn.functional as F
from torch import Tensor, nn


def next_token_nll(model: nn.Module, input_ids: Tensor, targets: Tensor, **where: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target in nats, (B, T) in fp32, and 0 for targets of -100.

    Args:
        model: A causal language model with the interface of transformers.
        input_ids: (B, T).
        targets: (B, T), the token after each of input_ids, or -100.
        where: position_ids of tokens that do not begin their sequence, or of packed documents, which start at 0 in each.
    """
    logits = model(input_ids=input_ids, use_cache=False, **where).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

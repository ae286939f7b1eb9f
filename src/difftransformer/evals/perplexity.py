"""Validation loss: nats a token, bits a byte, and by position in the context."""

import math
from itertools import pairwise

import numpy as np
import torch

from ..data import Shards, validation_windows
from ..results import DocumentNll, NllResult, PositionBucket
from .base import LanguageModel, NllConfig


def evaluate_nll(model: LanguageModel, shards: Shards, config: NllConfig, *, context_tokens: int) -> NllResult:
    """Loss on fixed, evenly spread windows of the validation text.

    Bits a byte do not depend on the tokenizer: the summed loss over the bytes that the targets stand for. A window is one
    unit of the bootstrap.

    Args:
        model: The model.
        shards: Tokens and tokenizer.
        config: Number of windows and of position buckets.
        context_tokens: T, targets of a window.
    """
    windows = torch.from_numpy(np.stack(list(validation_windows(shards, context_tokens, config.windows))))
    targets = windows[:, 1:]
    nll = model.nll(windows[:, :-1], targets).double()
    byte_lengths = torch.from_numpy(shards.tokenizer.token_byte_lengths()).long()[targets]
    total_nats, total_bytes = nll.sum().item(), int(byte_lengths.sum())
    edges = torch.linspace(0, context_tokens, min(config.position_buckets, context_tokens) + 1).round().int().tolist()
    return NllResult(
        nll_nats_per_token=total_nats / nll.numel(),
        bits_per_byte=total_nats / math.log(2) / total_bytes,
        tokens=nll.numel(),
        bytes=total_bytes,
        context_tokens=context_tokens,
        by_position=[
            PositionBucket(
                start_tokens=start,
                end_tokens=end,
                nll_nats_per_token=nll[:, start:end].mean().item(),
                tokens=nll[:, start:end].numel(),
            )
            for start, end in pairwise(edges)
        ],
        documents=[
            DocumentNll(nll_nats=row.sum().item(), tokens=row.numel(), bytes=int(row_bytes.sum()))
            for row, row_bytes in zip(nll, byte_lengths, strict=True)
        ],
    )

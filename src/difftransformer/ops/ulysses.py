"""Exchange between processes that hold parts of a sequence, so that each attends with some of the heads to all of it.

This is the exchange of DeepSpeed-Ulysses (arXiv:2309.14509). The attention op runs between its two functions unchanged, because
a head needs no other heads: windows, packed documents and every backend keep working.
"""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def heads_of_sequence(tensor_BHTX: Tensor, group: "ProcessGroup") -> Tensor:
    """Exchange all heads of a part of the sequence, (B, H, T / P, X), for a part of the heads, (B, H / P, T, X).

    Args:
        tensor_BHTX: The heads of this process's tokens. Process p of the group holds part p of the sequence.
        group: The P processes of the sequence; P divides H.
    """
    parts = tensor_BHTX.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return _exchanged(parts, group).movedim(0, 2).flatten(2, 3)


def sequence_of_heads(tensor_BHTX: Tensor, group: "ProcessGroup") -> Tensor:
    """Undo `heads_of_sequence`: exchange (B, H / P, T, X) for (B, H, T / P, X)."""
    parts = tensor_BHTX.unflatten(2, (group.size(), -1)).movedim(2, 0)
    return _exchanged(parts, group).movedim(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, group: "ProcessGroup") -> Tensor:
    """Send part p to process p, and stack what comes from each process; gradients take the way back."""
    from torch.distributed import _functional_collectives as collectives  # not every build of torch has it

    received = collectives.all_to_all_single_autograd(parts.contiguous(), None, None, group)
    return collectives.wait_tensor(received)

"""What a checkpoint holds, whichever processes wrote it."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def tensors_of(checkpoint):
    """Every tensor of a checkpoint, put together from its parts by the places that the files say.

    Without the state of the generator that nothing in training draws from.
    """
    parts = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
        for key, part in load_file(path).items():
            offsets = places.get(key, {}).get("saved_offsets", [])
            parts.setdefault(key, []).append((tuple(offsets) or (0,) * part.dim(), part))
    del parts["random/cpu"]
    return {key: _assembled(found) for key, found in parts.items()}


def _assembled(parts):
    """Every element once, or there is a hole."""
    ends = [[place + size for place, size in zip(offsets, part.shape, strict=True)] for offsets, part in parts]
    whole = torch.full([max(end) for end in zip(*ends, strict=True)], torch.nan)
    for offsets, part in parts:
        place = whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))]
        assert place.isnan().all()
        place.copy_(part)
    assert not whole.isnan().any()
    return whole

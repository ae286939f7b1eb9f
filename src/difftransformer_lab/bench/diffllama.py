"""transformers' differential attention: DiffLlama's attention without its projections and its rotary embedding."""

import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig
from transformers.models.diffllama import modeling_diffllama

from difftransformer.ops.problem import Restrictions, allowed_keys

# Whether each attn_implementation of transformers makes n x n maps.
ATTN_IMPLEMENTATIONS = {"sdpa": False, "eager": True}


class DiffLlamaCore:
    """The causal forward pass of transformers' `DiffLlamaAttention`, given what its projections would return.

    It repeats the halves of V, calls ordinary attention on each, subtracts and normalises. Differential head i has the maps
    i and H + i, and the value [V_i; V_(H + i)].

    Args:
        query: Output of the query projection, (B, T, 2 H D).
        key: Output of the key projection, (B, T, 2 H D).
        value: Output of the value projection, (B, T, 2 H D).
        head_dim: Width D of a map.
        attn_implementation: A name in `ATTN_IMPLEMENTATIONS`.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, *, head_dim: int, attn_implementation: str) -> None:
        length, width = query.shape[1:]
        heads = width // head_dim
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
        config = DiffLlamaConfig(**sizes, rms_norm_eps=1e-5)
        config._attn_implementation = attn_implementation
        self.layer = modeling_diffllama.DiffLlamaAttention(config, layer_idx=0).to(query.device, query.dtype)
        for name, projected in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
            delattr(self.layer, name)
            setattr(self.layer, name, lambda _, projected=projected: projected)
        self.layer.o_proj = nn.Identity()
        self.hidden = query  # the layer reads only its leading dimensions
        # Their model makes the mask once for all layers, and makes none for SDPA.
        allowed = allowed_keys(Restrictions(is_causal=True), length, length, query.device)
        self.mask = None
        if ATTN_IMPLEMENTATIONS[attn_implementation] and allowed is not None:
            self.mask = torch.zeros(1, 1, length, length, device=query.device, dtype=query.dtype)
            self.mask.masked_fill_(~allowed, torch.finfo(query.dtype).min)

    def parameters(self) -> list[nn.Parameter]:
        """Return the four lambda vectors, (D,) each."""
        return list(self.layer.parameters())

    def __call__(self) -> Tensor:
        """Return (1 - lambda_init) RMSNorm((A1 - lambda A2) V), (B, T, 2 H D)."""
        rotate = modeling_diffllama.apply_rotary_pos_emb
        modeling_diffllama.apply_rotary_pos_emb = lambda query, key, cos, sin: (query, key)
        try:
            return self.layer(self.hidden, (None, None), attention_mask=self.mask)[0]
        finally:
            modeling_diffllama.apply_rotary_pos_emb = rotate

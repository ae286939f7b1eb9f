"""The language model a second time, from the equations of arXiv:2410.05258 section 2, in float64 and one head at a time.

It imports nothing of the package and none of torch's ready-made norms, attention or activations. Weights come as a dict by
the checkpoint's names. One sequence at a time: T tokens, and `allowed` (T, T) says who may attend to whom.
"""

import math
from dataclasses import dataclass

import torch

# Kinds that add something to another one, whose heads they have.
BASES = {
    "softmax_norm": "softmax", "xsa": "softmax", "gate": "softmax", "diff_xsa": "diff", "diff_gate": "diff",
    "diff_v2_added": "diff_v2",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What the weights alone do not say."""

    kind: str  # "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex", "softmax", or one of BASES
    layers: int
    heads: int  # of the kind: differential heads for "diff", signal heads for "grouped_diff" and "grouped_diff_v2"
    groups: int  # key/value heads of the kind
    head_dim: int  # of one map
    value_dim: int
    eps: float = 1e-5
    head_eps: float = 1e-5
    theta: float = 10_000.0
    noise: int = 0  # noise heads for "grouped_diff" and "grouped_diff_v2"
    extended: tuple = ()  # for "dex", each layer's extended heads
    multiplier: float = 1.0  # of the embeddings

    @property
    def base(self):
        return BASES.get(self.kind, self.kind)


def causal(length, window=None):
    """Who sees whom: the past and oneself, at most `window` positions."""
    rows = [[j <= t and (window is None or j > t - window) for j in range(length)] for t in range(length)]
    return torch.tensor(rows).view(length, length)


def root_mean_square(x, gain, eps):
    return gain * x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def rotate(x, positions, theta):
    """x (T, d): features i and i + d/2 are turned by position * theta^(-2i/d)."""
    width = x.shape[1]
    out = torch.empty_like(x)
    for i in range(width // 2):
        angle = positions * theta ** (-2 * i / width)
        a, b = x[:, i], x[:, i + width // 2]
        out[:, i] = a * torch.cos(angle) - b * torch.sin(angle)
        out[:, i + width // 2] = a * torch.sin(angle) + b * torch.cos(angle)
    return out


def softmax_map(q, k, allowed):
    weights = torch.exp(q @ k.T / math.sqrt(q.shape[1])) * allowed
    return weights / weights.sum(1, keepdim=True).clamp_min(1e-300)


def lam_init(layer):
    return 0.8 - 0.6 * math.exp(-0.3 * layer)  # layer counted from 0


def lam_of(weights, prefix, layer):
    def vector(name):
        return weights[prefix + name]

    first = torch.exp((vector("lambda_q1") * vector("lambda_k1")).sum())
    second = torch.exp((vector("lambda_q2") * vector("lambda_k2")).sum())
    return first - second + lam_init(layer)


def rows_of(shape, head, group, which):
    """Where a head's query and key for one of its maps lie in the projections, in units of head_dim."""
    if shape.base in ("softmax", "dex"):
        return head, group
    if shape.base == "diff_v2":
        return 2 * head + which, group
    if shape.base == "diff":
        return 2 * head + which, 2 * group + which
    if not shape.base.startswith("grouped_diff"):
        raise ValueError(
            f"{shape.kind!r} is not a kind that this file has equations for; write them here, or add it to BASES"
        )
    # Noise heads follow the signal heads that share them, noise keys the signal keys whose heads share them.
    signal, keys = shape.heads // shape.noise, min(shape.groups, shape.noise)
    noise = head // signal
    cell, signal_keys = noise // (shape.noise // keys), shape.groups // keys
    first_query, first_key = noise * (signal + 1), cell * (signal_keys + 1)
    if shape.base == "grouped_diff_v2":
        return first_query + (signal if which else head % signal), group
    if which == 0:
        return first_query + head % signal, first_key + group % signal_keys
    return first_query + signal, first_key + signal_keys


def attention(weights, prefix, shape, layer, x, positions, allowed):
    """One attention layer on (T, M); also the combined maps, (heads, T, T)."""
    q, k, v = (x @ weights[prefix + f"{name}_proj.weight"].T for name in "qkv")
    maps_per_head = 1 if shape.base in ("softmax", "dex") else 2
    d, e = shape.head_dim, shape.value_dim
    outputs, maps = [], []
    for head in range(shape.heads):
        group = head // (shape.heads // shape.groups)
        combined = 0
        for which in range(maps_per_head):
            q_at, k_at = (d * row for row in rows_of(shape, head, group, which))
            a = softmax_map(
                rotate(q[:, q_at : q_at + d], positions, shape.theta),
                rotate(k[:, k_at : k_at + d], positions, shape.theta),
                allowed,
            )
            if which == 0:
                combined = a
            elif not shape.base.endswith("_v2"):
                combined = combined - lam_of(weights, prefix, layer) * a
            else:
                projected = x @ weights[prefix + "lambda_proj.weight"][head]
                sign = 1 if shape.kind == "diff_v2_added" else -1
                combined = combined + sign * (1 / (1 + torch.exp(-projected))).unsqueeze(1) * a
        value = v[:, group * e : (group + 1) * e]
        out = combined @ value
        if shape.kind == "softmax_norm":
            out = root_mean_square(out, weights[prefix + "head_norm.weight"], shape.head_eps)
        if shape.base in ("diff", "grouped_diff"):
            out = root_mean_square(out, weights[prefix + "head_norm.weight"], shape.head_eps) * (1 - lam_init(layer))
        if shape.kind == "dex" and head in shape.extended[layer]:
            place = shape.extended[layer].index(head)
            out = out - weights[prefix + "dex_lambda"][place] * (out @ weights[prefix + "dex_proj"][place])
        if shape.kind.endswith("xsa"):
            out = out - (out * value).sum(1, keepdim=True) / (value * value).sum(1, keepdim=True) * value
        outputs.append(out)
        maps.append(combined)
    joined = torch.cat(outputs, 1)
    if shape.kind in ("gate", "diff_gate", "grouped_diff_v2"):
        joined = joined / (1 + torch.exp(-x @ weights[prefix + "gate_proj.weight"].T))
    return joined @ weights[prefix + "o_proj.weight"].T, torch.stack(maps)


def run(weights, shape, ids, *, positions=None, allowed=None):
    """Logits (T, vocabulary), hidden states before every layer and at the end, and the layers' combined maps.

    Args:
        weights: Name -> tensor of any dtype.
        shape: Heads and constants.
        ids: (T,).
        positions: (T,), 0 ... T - 1 if None.
        allowed: (T, T) bool, causal if None.
    """
    weights = {name: tensor.double() for name, tensor in weights.items()}
    positions = torch.arange(len(ids)) if positions is None else positions
    positions = positions.double()
    allowed = causal(len(ids)) if allowed is None else allowed
    x = shape.multiplier * weights["model.embed_tokens.weight"][ids]
    hidden, maps = [], []
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        hidden.append(x)
        normed = root_mean_square(x, weights[at + "input_layernorm.weight"], shape.eps)
        attended, layer_maps = attention(weights, at + "self_attn.", shape, layer, normed, positions, allowed)
        maps.append(layer_maps)
        x = x + attended
        normed = root_mean_square(x, weights[at + "post_attention_layernorm.weight"], shape.eps)
        gate = normed @ weights[at + "mlp.gate_proj.weight"].T
        gate = gate / (1 + torch.exp(-gate))
        x = x + (gate * (normed @ weights[at + "mlp.up_proj.weight"].T)) @ weights[at + "mlp.down_proj.weight"].T
    x = root_mean_square(x, weights["model.norm.weight"], shape.eps)
    hidden.append(x)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return x @ head.T, hidden, maps

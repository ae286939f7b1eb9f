"""The differential layers' equations a second time, one head after the other, and layers to compare with them."""

import math

import torch

from difftransformer.attention import (
    VARIANTS,
    DifferentialAttention,
    DifferentialAttentionV2,
    GroupedDifferentialAttention,
    GroupedDifferentialAttentionV2,
    SoftmaxAttention,
)

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
WIDTH, D = 20, 4
CHOICES = {  # what each class computes unless it is told otherwise
    SoftmaxAttention: {"form": "constant", "norm": "none"},
    DifferentialAttention: {},
    DifferentialAttentionV2: {"form": "token", "norm": "none", "shared_key": True},
    GroupedDifferentialAttention: {},
    GroupedDifferentialAttentionV2: {"form": "token", "norm": "none", "shared_key": True, "gate": True},
}
CHOICES |= {
    VARIANTS["softmax_norm"]: CHOICES[SoftmaxAttention] | {"norm": "gain", "scale": 1},
    VARIANTS["xsa"]: CHOICES[SoftmaxAttention] | {"exclusive": True},
    VARIANTS["gate"]: CHOICES[SoftmaxAttention] | {"gate": True},
    VARIANTS["diff_xsa"]: {"exclusive": True},
    VARIANTS["diff_gate"]: {"gate": True},
    VARIANTS["diff_v2_added"]: CHOICES[DifferentialAttentionV2] | {"sign": -1},
}


def drawn(layer, seed=0):
    """In float64, with no gain of 1 and no lambda near its start."""
    draw = torch.Generator().manual_seed(seed)
    layer = layer.double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name in (*VECTORS, "lambda_offset"):
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    return layer


def layer_of(cls, heads, **arguments):
    """A layer with signal heads, noise heads and key/value heads."""
    signal, noise, groups = heads
    if cls in (GroupedDifferentialAttention, GroupedDifferentialAttentionV2):
        arguments["num_noise_heads"] = noise
    return drawn(cls(WIDTH, signal, num_key_value_heads=groups, head_dim=D, **arguments))


def states(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def causal(length, window=99):
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < window)


def by_hand(
    weights, hidden, context, allowed, *, heads, e, start=None, d=D, value=None, scale=None, eps=1e-5,
    form="layer", norm="gain", shared_key=False, gate=False, exclusive=False, sign=1,
    prepare=lambda rows, name: rows,
):  # fmt: skip
    """Output and map, one signal head at a time. Rows are taken off a projection's front in the order that classes document.

    V1 and V2 have a noise head for each signal head, softmax attention has none. `start` is lambda_init, `value` the constant
    term of lambda where it is another number, `scale` the factor of the heads where it is not 1 - start. `prepare` gets each
    map's queries ("q") and keys ("k").
    """
    scale = scale if scale is not None else 1 if norm == "none" else 1 - start
    value = start if value is None else value
    signal, noise, groups = heads
    q, k, v = (x @ weights[f"{name}_proj.weight"].T for x, name in ((hidden, "q"), (context, "k"), (context, "v")))
    queries, keys = ([prepare(rows, name) for rows in x.split(d, -1)] for x, name in ((q, "q"), (k, "k")))
    values = v.split(e, -1)
    first_q, second_q, first_k, second_k = [], [], [], []
    for _ in range(noise):
        first_q += [queries.pop(0) for _ in range(signal // noise)]
        second_q.append(queries.pop(0))
    if not noise:
        first_q, first_k, queries, keys = queries, keys, [], []
    cells = groups if shared_key else min(groups, noise)
    for _ in range(cells):
        first_k += [keys.pop(0) for _ in range(groups // cells)]
        second_k.append(first_k[-1] if shared_key else keys.pop(0))
    assert (len(queries), len(keys), len(values)) == (0, 0, groups)
    outputs, maps = [], []
    for h in range(signal):
        g = h // (signal // groups)
        pairs = [(first_q[h], first_k[g])]
        if noise:
            j = h // (signal // noise)
            pairs.append((second_q[j], second_k[j // (noise // cells)]))
        first, *second = (
            torch.softmax((x @ y.mT / math.sqrt(d)).masked_fill(~allowed, -torch.inf), -1) for x, y in pairs
        )
        if form == "constant":
            lam = value
        elif form == "scalar":
            lam = weights["lambda_offset"][0] + value
        elif form == "token":
            lam = 1 / (1 + torch.exp(-(hidden @ weights["lambda_proj.weight"][h]))).unsqueeze(-1)
        else:
            q1, k1, q2, k2 = (weights[name][h] if form == "head" else weights[name] for name in VECTORS)
            lam = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + value
        maps.append(first - sign * lam * second[0] if second else first)
        out = maps[-1] @ values[g]
        if norm != "none":
            out = out / torch.sqrt(out.square().mean(-1, keepdim=True) + eps)
        if norm == "gain":
            out = out * weights["head_norm.weight"]
        if exclusive:
            own = values[g]
            out = out - (out * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True) * own
        if gate:
            out = out / (1 + torch.exp(-(hidden @ weights["gate_proj.weight"][h * e : (h + 1) * e].T)))
        outputs.append(out * scale)
    return torch.cat(outputs, -1) @ weights["o_proj.weight"].T, torch.stack(maps, 1)

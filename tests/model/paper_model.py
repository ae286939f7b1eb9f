"""The paper's decoder a second time, in float64, from its equations alone. Imports nothing of the package.

One loop over heads, no cache, no batching tricks: slow and plain on purpose (arXiv:2410.05258 section 2).
"""

import math

import torch


def rms_norm(x, gain, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def rotate(x, theta):
    """Half-split rotary embedding of (T, d): feature i turns with feature i + d/2."""
    length, width = x.shape
    half = width // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = torch.arange(length, dtype=torch.float64) * theta ** (-2.0 * i / width)
        out[:, i] = x[:, i] * torch.cos(angle) - x[:, half + i] * torch.sin(angle)
        out[:, half + i] = x[:, half + i] * torch.cos(angle) + x[:, i] * torch.sin(angle)
    return out


def attention_map(q, k, window):
    """Causal softmax of (T, d) queries and keys, each query seeing its last `window` positions."""
    length = q.shape[0]
    scores = q @ k.T / math.sqrt(q.shape[1])
    for t in range(length):
        for s in range(length):
            if s > t or (window is not None and t - s >= window):
                scores[t, s] = -math.inf
    return torch.softmax(scores, dim=1)


def logits(state, config, ids):
    """Logits (T, V) of one row of token ids, from a state dict of any dtype and the model's configuration."""
    weights = {name: tensor.double() for name, tensor in state.items()}
    layout, theta = config.head_layout(), config.rope_parameters["rope_theta"]
    heads, groups, d, e = layout.num_heads, layout.num_key_value_heads, layout.head_dim, layout.value_head_dim
    maps = 2 if config.attention_type == "diff" else 1
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        w = {name.split(".", 3)[3]: t for name, t in weights.items() if name.startswith(f"model.layers.{layer}.")}
        h = rms_norm(x, w["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (h @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        outputs = []
        for head in range(heads):
            group = head * groups // heads
            values = v[:, group * e : (group + 1) * e]
            probabilities = []
            for m in range(maps):
                q_m = rotate(q[:, (head * maps + m) * d : (head * maps + m + 1) * d], theta)
                k_m = rotate(k[:, (group * maps + m) * d : (group * maps + m + 1) * d], theta)
                probabilities.append(attention_map(q_m, k_m, config.sliding_window))
            if maps == 1:
                outputs.append(probabilities[0] @ values)
                continue
            initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
            lam = (
                torch.exp((w["self_attn.lambda_q1"] * w["self_attn.lambda_k1"]).sum())
                - torch.exp((w["self_attn.lambda_q2"] * w["self_attn.lambda_k2"]).sum())
                + initial
            )
            out = (probabilities[0] - lam * probabilities[1]) @ values
            outputs.append((1 - initial) * rms_norm(out, w["self_attn.head_norm.weight"], config.head_norm_eps))
        x = x + torch.cat(outputs, 1) @ w["self_attn.o_proj.weight"].T
        h = rms_norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (h @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
    x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T

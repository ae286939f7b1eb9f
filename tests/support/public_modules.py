"""Attention modules that others released, a second time: from their equations, in float64, one head at a time.

Nothing of the package is imported. `weights` are the module's tensors by their public names; x is (T, M).
"""

import math

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from tests.support.independent_model import causal, root_mean_square, rotate, softmax_map


def draw(shapes, seed=0):
    """Tensors of these shapes, every gain and lambda away from its start."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "subln" in name or "norm" in name:
            tensors[name] = 1 + 0.3 * noise
        elif "embed" in name or "lm_head" in name:
            tensors[name] = 0.6 * noise / shape[-1] ** 0.5
        elif len(shape) == 2:
            tensors[name] = 1.2 * noise / shape[-1] ** 0.5
        else:
            tensors[name] = 0.3 * noise
    return tensors


def v1_module_shapes(hidden, heads, groups, head_dim=None, output="out_proj"):
    """Of Microsoft's V1 module."""
    d = head_dim or hidden // heads // 2
    lambdas = {f"lambda_{which}": (d,) for which in ("q1", "k1", "q2", "k2")}
    counts = {"q": heads, "k": groups, "v": groups}
    rows = {f"{name}_proj.weight": (2 * count * d, hidden) for name, count in counts.items()}
    return {**rows, f"{output}.weight": (hidden, 2 * heads * d), "subln.weight": (2 * d,), **lambdas}


def v2_module_shapes(hidden, heads, groups, head_dim):
    """Of Microsoft's V2 module."""
    counts = {"q": 2 * heads, "k": groups, "v": groups}
    rows = {f"{name}_proj.weight": (count * head_dim, hidden) for name, count in counts.items()}
    return rows | {"o_proj.weight": (hidden, heads * head_dim), "lambda_proj.weight": (heads, hidden)}


def phi4flash_shapes(hidden, heads, groups):
    """Of Phi-4-mini-flash's attention; heads and groups are differential ones."""
    d = hidden // heads // 2
    inner = {f"inner_cross_attn.lambda_{which}": (d,) for which in ("q1", "k1", "q2", "k2")}
    rows = 2 * d * (heads + 2 * groups)
    projections = {"Wqkv.weight": (rows, hidden), "Wqkv.bias": (rows,)}
    projections |= {"out_proj.weight": (hidden, hidden), "out_proj.bias": (hidden,)}
    return projections | {"inner_cross_attn.subln.weight": (2 * d,), **inner}


def timm_shapes(hidden, heads, qk_norm=False):
    """Of timm's DiffAttention with all biases."""
    d = hidden // heads // 2
    norms = {"q_norm.weight": (d,), "k_norm.weight": (d,)} if qk_norm else {}
    lambdas = {f"lambda_{which}": (d,) for which in ("q1", "k1", "q2", "k2")}
    projections = {"qkv.weight": (3 * hidden, hidden), "qkv.bias": (3 * hidden,)}
    projections |= {"proj.weight": (hidden, hidden), "proj.bias": (hidden,)}
    return projections | {"sub_norm.weight": (2 * d,), **lambdas, **norms}


def rotate_interleaved(x, positions, theta=10_000.0):
    """x (T, d): features 2 i and 2 i + 1 are turned by position * theta^(-2 i / d)."""
    out = torch.empty_like(x)
    for i in range(x.shape[1] // 2):
        angle = positions * theta ** (-2 * i / x.shape[1])
        a, b = x[:, 2 * i], x[:, 2 * i + 1]
        out[:, 2 * i] = a * torch.cos(angle) - b * torch.sin(angle)
        out[:, 2 * i + 1] = a * torch.sin(angle) + b * torch.cos(angle)
    return out


def paper_lambda_init(depth):
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def v1_heads(q, k, v, lambdas, gain, init, d, turn, allowed):
    """Heads of V1 side by side, (T, H * 2 d): maps 2 i and 2 i + 1 make head i, and value i is 2 d wide."""
    positions = torch.arange(len(q)).double()
    q1, k1, q2, k2 = lambdas
    lam = math.exp(float(q1 @ k1)) - math.exp(float(q2 @ k2)) + init
    heads, groups = q.shape[1] // (2 * d), k.shape[1] // (2 * d)
    out = []
    for head in range(heads):
        group = head * groups // heads
        maps = [
            softmax_map(
                turn(q[:, (2 * head + m) * d : (2 * head + m + 1) * d], positions),
                turn(k[:, (2 * group + m) * d : (2 * group + m + 1) * d], positions),
                allowed,
            )
            for m in range(2)
        ]
        value = v[:, 2 * group * d : 2 * (group + 1) * d]
        out.append(root_mean_square((maps[0] - lam * maps[1]) @ value, gain, 1e-5) * (1 - init))
    return torch.cat(out, 1)


def _lambdas(weights, prefix=""):
    return [weights[f"{prefix}lambda_{which}"] for which in ("q1", "k1", "q2", "k2")]


def microsoft_v1(weights, x, depth, allowed=None):
    w = {name: tensor.double() for name, tensor in weights.items()}
    d = len(w["lambda_q1"])
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    gain = w.get("subln.weight", torch.ones(2 * d).double())
    allowed = causal(len(x)) if allowed is None else allowed
    heads = v1_heads(q, k, v, _lambdas(w), gain, paper_lambda_init(depth), d, rotate_interleaved, allowed)
    return heads @ w["out_proj.weight"].T


def microsoft_naive_v1(weights, x, depth):
    """multihead_diffattn.py: each of the 2 G keys serves H / G consecutive queries, of which two make a head."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    d = len(w["lambda_q1"])
    q, k, v = ((x @ w[f"{name}_proj.weight"].T).split(d * (1 + (name == "v")), 1) for name in "qkv")
    shared, positions, allowed = len(q) // len(k), torch.arange(len(x)).double(), causal(len(x))
    q1, k1, q2, k2 = _lambdas(w)
    lam = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + paper_lambda_init(depth)
    turned = [[rotate_interleaved(rows, positions) for rows in (query, k[j // shared])] for j, query in enumerate(q)]
    maps = [softmax_map(query, key, allowed) for query, key in turned]
    heads = []
    for head in range(len(q) // 2):
        out = (maps[2 * head] - lam * maps[2 * head + 1]) @ v[head // shared]
        heads.append(root_mean_square(out, w["subln.weight"], 1e-5) * (1 - paper_lambda_init(depth)))
    return torch.cat(heads, 1) @ w["out_proj.weight"].T


def motif(weights, x, depth):
    w = {name: tensor.double() for name, tensor in weights.items()}
    d = len(w["lambda_q1"])
    q, k, v = (x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0) for name in "qkv")

    def turn(rows, positions):
        return rotate(rows, positions, 10_000.0)

    init = paper_lambda_init(depth - 1)
    heads = v1_heads(q, k, v, _lambdas(w), w["subln.weight"], init, d, turn, causal(len(x)))
    return heads @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)


def grouped_motif(weights, x, depth):
    """Motif-2-12.7B: queries in cells of signal heads and one noise head, keys and values in pairs (the MLX port)."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    d = len(w["lambda_q1"])
    q, k, v = ((x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0)).split(d, 1) for name in "qkv")
    signal, pairs = w["o_proj.weight"].shape[1] // (2 * d), len(k) // 2
    noise = len(q) - signal
    cell = signal // noise + 1
    positions, allowed = torch.arange(len(x)).double(), causal(len(x))
    q1, k1, q2, k2 = _lambdas(w)
    init = paper_lambda_init(depth - 1)
    lam = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + init
    out = []
    for j in range(noise):
        pair = j // (noise // pairs)
        value = torch.cat((v[2 * pair], v[2 * pair + 1]), 1)
        signal_key, noise_key = (rotate(k[2 * pair + m], positions, 10_000.0) for m in range(2))
        turned = [rotate(rows, positions, 10_000.0) for rows in q[j * cell : (j + 1) * cell]]
        subtracted = softmax_map(turned[-1], noise_key, allowed) @ value
        for query in turned[:-1]:
            kept = softmax_map(query, signal_key, allowed) @ value
            out.append(root_mean_square(kept - lam * subtracted, w["subln.weight"], 1e-5) * (1 - init))
    return torch.cat(out, 1) @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)


def phi4flash(weights, x, depth, window=None):
    w = {name: tensor.double() for name, tensor in weights.items()}
    inner = "inner_cross_attn."
    d = len(w[inner + "lambda_q1"])
    rows = x @ w["Wqkv.weight"].T + w["Wqkv.bias"]
    width = w["out_proj.weight"].shape[1]
    keys = (rows.shape[1] - width) // 2
    q, k, v = rows[:, :width], rows[:, width : width + keys], rows[:, width + keys :]
    gain, init, allowed = w[inner + "subln.weight"], paper_lambda_init(depth), causal(len(x), window)
    heads = v1_heads(q, k, v, _lambdas(w, inner), gain, init, d, lambda rows, _: rows, allowed)
    return heads @ w["out_proj.weight"].T + w["out_proj.bias"]


def timm(weights, x, depth):
    w = {name: tensor.double() for name, tensor in weights.items()}
    d = len(w["lambda_q1"])
    q, k, v = (x @ w["qkv.weight"].T + w["qkv.bias"]).chunk(3, 1)
    if "q_norm.weight" in w:
        q, k = (
            root_mean_square(rows.unflatten(1, (-1, d)), w[f"{name}_norm.weight"], 1e-6).flatten(1)
            for name, rows in (("q", q), ("k", k))
        )
    every = torch.ones(len(x), len(x), dtype=torch.bool)
    init = paper_lambda_init(depth)
    heads = v1_heads(q, k, v, _lambdas(w), w["sub_norm.weight"], init, d, lambda rows, _: rows, every)
    return heads @ w["proj.weight"].T + w["proj.bias"]


def microsoft_v2(weights, x):
    w = {name: tensor.double() for name, tensor in weights.items()}
    heads = len(w["lambda_proj.weight"])
    d = w["q_proj.weight"].shape[0] // (2 * heads)
    groups = w["k_proj.weight"].shape[0] // d
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    lam = 1 / (1 + torch.exp(-(x @ w["lambda_proj.weight"].T)))
    positions, allowed = torch.arange(len(x)).double(), causal(len(x))
    out = []
    for head in range(heads):
        group = head * groups // heads
        key = rotate_interleaved(k[:, group * d : (group + 1) * d], positions)
        value = v[:, group * d : (group + 1) * d]
        first, second = (
            softmax_map(rotate_interleaved(q[:, (2 * head + m) * d : (2 * head + m + 1) * d], positions), key, allowed)
            @ value
            for m in range(2)
        )
        out.append(first - lam[:, head : head + 1] * second)
    return torch.cat(out, 1) @ w["o_proj.weight"].T


def language_model(weights, ids, attention, layers, eps=1e-5):
    """Logits (T, V) of a Llama-like model around an attention(tensors, x, depth)."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    for depth in range(layers):
        at = f"model.layers.{depth}."
        own = {name.removeprefix(at + "self_attn."): t for name, t in w.items() if name.startswith(at + "self_attn.")}
        x = x + attention(own, root_mean_square(x, w[at + "input_layernorm.weight"], eps), depth)
        normed = root_mean_square(x, w[at + "post_attention_layernorm.weight"], eps)
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        up = normed @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return root_mean_square(x, w["model.norm.weight"], eps) @ head.T


def whole_shapes(attention, *, hidden, layers, vocabulary=61, inner=48, tied=True):
    """Of `language_model`."""
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for depth in range(layers):
        at = f"model.layers.{depth}."
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes if tied else shapes | {"lm_head.weight": (vocabulary, hidden)}


def tables(length, d):
    """Cosine and sine for half-split rotary embedding, (1, T, d / 2) each in float64."""
    angles = torch.arange(length).double()[:, None] * 10_000.0 ** (-torch.arange(0, d, 2).double() / d)
    return angles.cos()[None], angles.sin()[None]


def stock(seed=0, **fields):
    """A DiffLlama with drawn weights, made by transformers."""
    base = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(seed)
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**base | {"num_attention_heads": 4} | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise if "lambda" in name else 1.2 * noise / parameter.shape[-1] ** 0.5)
    return model

"""The equations of attention once more, in float64 and a loop over batch, head and query: the ops are held against it.

Nothing here comes from the package. Gradients are float64 autograd of the loop.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor


@dataclass(eq=False)  # a case is itself: results are kept by it
class Case:
    """One call: sizes and restrictions. `lam` is the form: float, scalar, vector, head or query; None for softmax."""

    name: str
    B: int = 1
    H: int = 2
    G: int = 2
    T: int = 7
    S: int = 7
    D: int = 4
    E: int = 8
    shared_key: bool = False
    lam: str | None = "head"
    kwargs: dict = field(default_factory=dict)
    seed: int = 0

    def inputs(self, dtype=torch.float32, seed=None, requires_grad=True):
        """query, key, value and lam (None for softmax), and a gradient of the output."""
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)

        maps = 1 if self.lam is None else 2
        query = normal(self.B, self.H, self.T, maps * self.D)
        key = normal(self.B, self.G, self.S, self.D if self.shared_key else maps * self.D)
        value = normal(self.B, self.G, self.S, self.E)
        grad = torch.randn(self.B, self.H, self.T, self.E, generator=generator, dtype=torch.float64).to(dtype)
        shape = {"scalar": (), "vector": (1,), "head": (self.H,), "query": (self.B, self.H, self.T)}.get(self.lam)
        lam = 0.37 if self.lam == "float" else None
        if shape is not None:
            lam = 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64)
            lam = lam.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_(requires_grad)
        return query, key, value, lam, grad


def may_attend(case: Case, b: int, h: int, t: int, j: int) -> bool:
    """Every restriction written out for one query and one key."""
    restrictions = case.kwargs
    start, length = 0, case.S
    if restrictions.get("kv_start") is not None:
        start = int(restrictions["kv_start"][b])
    if restrictions.get("kv_lengths") is not None:
        length = int(restrictions["kv_lengths"][b])
    if not start <= j < length:
        return False
    own = length - 1 - (case.T - 1 - t)
    if restrictions.get("is_causal"):
        if j > own:
            return False
        if restrictions.get("window") is not None and j <= own - restrictions["window"]:
            return False
    if restrictions.get("cu_seqlens") is not None:
        bounds = restrictions["cu_seqlens"].tolist()
        documents = [i for i in range(len(bounds) - 1) if bounds[i] <= t < bounds[i + 1]]
        if not bounds[documents[0]] <= j < bounds[documents[0] + 1]:
            return False
    mask = restrictions.get("attn_mask")
    if mask is not None:
        index = (b, h, t, j)[4 - mask.dim() :]
        return bool(mask[tuple(0 if size == 1 else i for i, size in zip(index, mask.shape, strict=True))])
    return True


@cache
def dense_mask(case: Case) -> Tensor:
    """`may_attend` of all queries and keys at once, (B, H, T, S) bool."""
    restrictions = case.kwargs
    query, key = torch.arange(case.T)[:, None], torch.arange(case.S)
    start, length = restrictions.get("kv_start"), restrictions.get("kv_lengths")
    start = torch.tensor(0) if start is None else start.view(-1, 1, 1, 1)
    length = torch.tensor(case.S) if length is None else length.view(-1, 1, 1, 1)
    allowed = (key >= start) & (key < length)
    if restrictions.get("is_causal"):
        own = length - case.T + query
        allowed = allowed & (key <= own)
        if (window := restrictions.get("window")) is not None:
            allowed = allowed & (key > own - window)
    if (bounds := restrictions.get("cu_seqlens")) is not None:
        query_document, key_document = (torch.bucketize(x, bounds.long(), right=True) for x in (query, key))
        allowed = allowed & (query_document == key_document)
    if (mask := restrictions.get("attn_mask")) is not None:
        allowed = allowed & mask
    return allowed.expand(case.B, case.H, case.T, case.S)


def lam_at(lam, b: int, h: int, t: int):
    """lam of one head and query."""
    if not isinstance(lam, Tensor) or lam.dim() == 0:
        return lam
    if lam.dim() == 3:
        return lam[b, h, t]
    return lam[0] if lam.shape == (1,) else lam[h]


def scale_of(case: Case) -> float:
    """What multiplies the logits."""
    scale = case.kwargs.get("scale")
    return case.D**-0.5 if scale is None else scale


def attention(case: Case, query, key, value, lam) -> Tensor:
    """The output, (B, H, T, E), by the equations."""
    allowed = dense_mask(case)
    scale = scale_of(case)
    batches = []
    for b in range(case.B):
        heads = []
        for h in range(case.H):
            g = h // (case.H // case.G)
            rows = []
            for t in range(case.T):
                seen = allowed[b, h, t].nonzero().squeeze(-1)
                if len(seen) == 0:
                    rows.append(torch.zeros(case.E, dtype=value.dtype))
                    continue
                q, k, v = query[b, h, t], key[b, g, seen], value[b, g, seen]
                weights = torch.softmax(scale * (k[:, : case.D] @ q[: case.D]), 0)
                if case.lam is not None:
                    k2 = k if case.shared_key else k[:, case.D :]
                    weights = weights - lam_at(lam, b, h, t) * torch.softmax(scale * (k2 @ q[case.D :]), 0)
                rows.append(weights @ v)
            heads.append(torch.stack(rows))
        batches.append(torch.stack(heads))
    # Gradients of zero where no query sees a key.
    nothing = sum(0 * x.sum() for x in (query, key, value, lam) if isinstance(x, Tensor))
    return torch.stack(batches) + nothing


def rms_norm(out: Tensor, weight: Tensor | None, eps: float, factor: float) -> Tensor:
    """The norm of each head, in the dtype of `out`."""
    normed = factor * out / (out.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def output_and_gradients(function, case: Case, dtype, *, of=None, gradients=True) -> dict[str, Tensor]:
    """Output of `function(query, key, value, lam)` in one dtype and, unless a call without them is asked for, gradients.

    Inputs are those of the case in `of` (default `dtype`), so that a float64 oracle can be fed what bf16 was fed.
    """
    query, key, value, lam, grad = case.inputs(of or dtype)

    def cast(x):
        return x.detach().to(dtype).requires_grad_() if isinstance(x, Tensor) else x

    query, key, value = cast(query), cast(key), cast(value)
    if isinstance(lam, Tensor):
        lam = lam.detach().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    if not gradients:
        with torch.no_grad():
            return {"out": function(query, key, value, lam)}
    out = function(query, key, value, lam)
    out.backward(grad.to(dtype))
    results = {"out": out.detach(), "query": query.grad, "key": key.grad, "value": value.grad}
    if isinstance(lam, Tensor):
        results["lam"] = lam.grad
    return results


def relative_error(x: Tensor, reference: Tensor) -> float:
    """max|x - reference| / max|reference|; zero only where both are zero."""
    largest = reference.abs().max().item()
    difference = (x.double() - reference.double()).abs().max().item()
    return difference / largest if largest else difference

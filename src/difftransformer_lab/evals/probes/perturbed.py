"""How sensitive a model's predictions are to small changes of the input embeddings."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from difftransformer.errors import EvaluationError


def perturbed(
    model: Any, ids: Sequence[int], *, radii: Sequence[float], draws: int, seed: int, separator: int
) -> dict[str, Any]:
    """Perturb the embeddings e_t of one row, and measure loss, right answers and distributions of the next token.

    A perturbation of radius r moves every embedding by the same length r s, where s is the mean length of the row's
    embeddings, so that models with embeddings of different sizes compare. All its coordinates have one size,
    r s / sqrt(M). Their signs are those of the gradient of the mean loss L, which increase L most to first order (the fast
    gradient sign method, arXiv:1412.6572), or random.

    Args:
        model: A causal language model with the interface of transformers.
        ids: The row; its ids but the first are the targets.
        radii: Radii r.
        draws: Number of random perturbations for each radius.
        seed: Seed of the random signs.
        separator: Targets with this id are not scored.

    Returns:
        `tokens`, the number N of scored targets; `nats` and `right`, the sum of their losses and the number of them that
        have the largest logit, without a perturbation; `gradient_sign` and `random`, pairs of the same two numbers for each
        radius, the random ones averaged over draws; `gradient`, s sum_t |dL / de_t|, the largest rate at which L rises
        with r, to first order; `lipschitz`, the largest |p' - p| / (r sqrt(T)) over the perturbations of the smallest
        radius, where p holds the distributions after all T positions: a lower bound of the local Lipschitz constant of p
        with embeddings in units of s.

    Raises:
        EvaluationError: the model takes no embeddings, no target is scored, or the loss does not depend on the embeddings.
    """
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise EvaluationError(f"{type(model).__name__} takes no inputs_embeds, so its embeddings cannot be perturbed")
    with torch.inference_mode(False):
        row = torch.tensor([list(ids)], device=model.device)
        targets, is_scored = row[0, 1:], row[0, 1:] != separator
        scored = int(is_scored.sum())
        if not scored:
            raise EvaluationError("a window holds separators only; use a longer window")

        def predict(embeddings: Tensor) -> tuple[Tensor, Tensor, float]:
            logits = model(inputs_embeds=embeddings, use_cache=False).logits[0].float()
            nats = F.cross_entropy(logits[is_scored], targets[is_scored], reduction="sum")
            right = (logits.detach().argmax(-1) == targets)[is_scored].sum()
            return logits.detach().softmax(-1), nats, float(right)

        with torch.enable_grad():
            start = model.get_input_embeddings()(row[:, :-1]).detach().requires_grad_()
            before, nats, right = predict(start)
            (slope,) = torch.autograd.grad(nats / scored, start)
        with torch.no_grad():
            if not slope.any():
                raise EvaluationError("the loss does not depend on the embeddings: the gradient is 0 everywhere")
            start, slope = start.detach(), slope.float()
            size = start.float().norm(dim=-1).mean().item()
            generator = torch.Generator().manual_seed(seed)
            random = [torch.randint(0, 2, start.shape, generator=generator) * 2 - 1 for _ in range(draws)]
            signs = [slope.sign(), *(draw.to(start.device) for draw in random)]
            smallest, steepest = min(radii), 0.0
            found: list[list[tuple[float, float]]] = []
            for radius in radii:
                found.append([])
                for sign in signs:
                    moved = start + (radius * size / start.shape[-1] ** 0.5 * sign).to(start.dtype)
                    after, more, still = predict(moved)
                    found[-1].append((more.item(), still))
                    if radius == smallest:
                        change = (after - before).norm().item()
                        steepest = max(steepest, change / radius / len(targets) ** 0.5)
        return {
            "tokens": scored,
            "nats": nats.item(),
            "right": right,
            "gradient_sign": [pairs[0] for pairs in found],
            "random": [[sum(values) / draws for values in zip(*pairs[1:], strict=True)] for pairs in found],
            "gradient": size * slope.norm(dim=-1).sum().item(),
            "lipschitz": steepest,
        }

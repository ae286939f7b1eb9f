"""What the operators of the backends have in common: their signature, and how autograd differentiates them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendUnavailable
from .problem import SCHEMA, Call, Restrictions

_INPUTS = ("Tensor query", "Tensor key", "Tensor value", "Tensor? lam", *SCHEMA, "float scale")
_NORM = ("Tensor? norm_weight", "float? norm_eps", "float norm_factor")
_DIFFERENTIABLE = {"Tensor query", "Tensor key", "Tensor value", "Tensor? lam", "Tensor? norm_weight"}


def define(
    backend: str, kept: Sequence[str] = (), *, keeps_out: bool = False, normed: bool = True, more: Sequence[str] = ()
) -> torch.library.Library:
    """Define `difftransformer::BACKEND_attention` and `difftransformer::BACKEND_attention_backward`.

    The first operator returns its output and the tensors `kept`. With `norm_eps`, it returns factor * RMSNorm(head) * weight
    for each head. The second operator takes the output's gradient, the kept tensors (the output first, with `keeps_out`) and
    the arguments of the first, and returns the gradients of query, key, value, lam and weight. The last two are empty where
    there is no lam or no weight.

    Args:
        backend: The backend's name.
        kept: Names of the tensors that the forward keeps for the backward.
        keeps_out: Whether the backward needs the output.
        normed: Whether the operator takes the norm's arguments, and the backward returns a gradient of its weight.
        more: Further arguments in the language of operator schemas.

    Returns:
        The library to register implementations with.
    """
    name = f"{backend}_attention"
    arguments = (*_INPUTS, *(_NORM if normed else ()), *more)
    tensors = [place for place, argument in enumerate(arguments) if argument.startswith("Tensor")]
    differentiable = [place for place, argument in enumerate(arguments) if argument in _DIFFERENTIABLE]
    outputs = ", ".join(f"Tensor {word}" for word in ("out", *kept))
    inputs = ", ".join(("Tensor grad", *(f"Tensor {word}" for word in ("out",) * keeps_out + (*kept,)), *arguments))
    library = torch.library.Library("difftransformer", "FRAGMENT")
    library.define(f"{name}({', '.join(arguments)}) -> ({outputs})")
    library.define(f"{name}_backward({inputs}) -> ({', '.join(['Tensor'] * len(differentiable))})")

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        ctx.mark_non_differentiable(*results[1:])
        ctx.save_for_backward(*results[0 if keeps_out else 1 :], *(inputs[place] for place in tensors))
        ctx.arguments = [None if place in tensors else x for place, x in enumerate(inputs)]

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved, inputs = (
            ctx.saved_tensors,
            list(ctx.arguments),
        )  # read once: activation checkpointing allows no second time
        count = len(saved) - len(tensors)
        for place, tensor in zip(tensors, saved[count:], strict=True):
            inputs[place] = tensor
        found = getattr(torch.ops.difftransformer, f"{name}_backward")(grad, *saved[:count], *inputs)
        grads: list[Tensor | None] = [None] * len(inputs)
        for place, gradient in zip(differentiable, found, strict=True):
            grads[place] = None if inputs[place] is None else gradient.to(inputs[place].dtype)
        return tuple(grads)

    def refuse(ctx: Any, *_: Any) -> None:
        raise BackendUnavailable(f"backend {backend!r} has no second derivatives; name backend='reference'")

    torch.library.register_autograd(f"difftransformer::{name}", differentiate, setup_context=save)
    torch.library.register_autograd(f"difftransformer::{name}_backward", refuse)
    return library


def arguments_of(call: Call) -> tuple[Any, ...]:
    """Return a call as the arguments of an operator that takes a norm, with a positive scale."""
    query, scale = positive_scale(call.query, call.scale)
    return (query, *call[1:4], *call.restrictions, scale, *(call.norm or (None, None, 1.0)))


def call_of(query: Tensor, key: Tensor, value: Tensor, lam: Tensor | None, *rest: Any) -> Call:
    """Return the call that an operator's arguments describe."""
    restrictions, (scale, *norm) = Restrictions(*rest[: len(SCHEMA)]), rest[len(SCHEMA) :]
    if not norm or norm[1] is None:
        return Call(query, key, value, lam, restrictions, scale)
    weight, eps, factor = norm
    weight = None if weight is None else weight.contiguous()
    return Call(query, key, value, lam, restrictions, scale, (weight, eps, factor))


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale that give the same scores: the kernels take maxima of unscaled scores."""
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0, 1.0)

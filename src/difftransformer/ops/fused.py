"""The signature that the backends' operators share, and their derivatives in autograd and torch.func."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from ..errors import BackendUnavailable
from .problem import SCHEMA, Call, Restrictions

_INPUTS = ("Tensor query", "Tensor key", "Tensor value", "Tensor? lam", *SCHEMA, "float scale")
_NORM = ("Tensor? norm_weight", "float? norm_eps", "float norm_factor")
_DIFFERENTIABLE = {"Tensor query", "Tensor key", "Tensor value", "Tensor? lam", "Tensor? norm_weight"}


def define(
    backend: str, kept: Sequence[str] = (), *, keeps_out: bool = False, normed: bool = True, more: Sequence[str] = ()
) -> tuple[torch.library.Library, Callable[..., Any]]:
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
        The library to register implementations with, and a function that calls the first operator.
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
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        inputs = list(ctx.arguments)
        count = len(saved) - len(tensors)
        for place, tensor in zip(tensors, saved[count:], strict=True):
            inputs[place] = tensor
        gradients = call_backward(grad, *saved[:count], *inputs)
        grads: list[Tensor | None] = [None] * len(inputs)
        for place, gradient in zip(differentiable, gradients, strict=True):
            grads[place] = None if inputs[place] is None else gradient.to(inputs[place].dtype)
        return tuple(grads)

    def refuse(what: str, *_: Any) -> None:
        raise BackendUnavailable(f"backend {backend!r} has no {what} derivatives; name backend='reference'")

    second, forward_mode = partial(refuse, "second"), partial(refuse, "forward-mode")

    torch.library.register_autograd(f"difftransformer::{name}", differentiate, setup_context=save)
    torch.library.register_autograd(f"difftransformer::{name}_backward", second)
    call = _transformable(name, save, differentiate, forward_mode)
    call_backward = _transformable(f"{name}_backward", lambda ctx, inputs, output: None, second, forward_mode)
    return library, call


def _transformable(
    name: str, setup_context: Callable[..., None], backward: Callable[..., Any], jvp: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls an operator, also under the transforms of torch.func and in forward mode.

    torch.func refuses gradients that are registered for an operator, and forward mode does not see that there is no formula.
    Both take a `Function`. Under vmap it runs one sample after the other.
    """

    def forward(*arguments: Any) -> Any:
        return getattr(torch.ops.difftransformer, name)(*arguments)

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        count = info.batch_size

        def sample(i: int) -> Any:
            """Run one sample. For an empty batch, a sample of zeros gives the shapes of the result."""
            return transformed.apply(
                *(
                    x if dim is None else x.select(dim, i) if count else x.sum(dim).to(x.dtype)
                    for x, dim in zip(arguments, in_dims, strict=True)
                )
            )

        samples = [sample(i) for i in range(max(count, 1))]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples)[:count], 0
        return tuple(torch.stack(parts)[:count] for parts in zip(*samples, strict=True)), (0,) * len(samples[0])

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp, "vmap": vmap}
    transformed: Any = type(name, (Function,), {key: staticmethod(method) for key, method in methods.items()})

    def call(*arguments: Any) -> Any:
        if is_transformed():
            return transformed.apply(*arguments)
        return forward(*arguments)

    return call


@torch.compiler.assume_constant_result
def is_transformed() -> bool:
    """Whether a transform of torch.func or forward mode is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def untraceable() -> str | None:
    """Return why a registered operator cannot run now, or None."""
    if torch.compiler.is_compiling() and is_transformed():
        return "torch.compile cannot trace its gradient under the transforms of torch.func"
    return None


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

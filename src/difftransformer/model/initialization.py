"""How the parameters of a model start.

A start is a distribution for every kind of matrix:

* "fan_in": linear layers from U(-1/sqrt(d_in), 1/sqrt(d_in)), as PyTorch's `nn.Linear` and the Differential Transformer's code
  have it, embeddings and an output layer of its own from N(0, 1/d). The model multiplies embeddings by `embedding_multiplier`,
  sqrt(d) with this start, so that the residual stream begins with rms 1 at every width d (YOCO, arXiv:2405.05254).
* "normal": all matrices from N(0, initializer_range^2), as in Llama.

Each parameter is drawn on the CPU in fp32 from a generator of its own, seeded by the model's seed and the parameter's name. So
its values depend neither on what else the model has nor on how it is divided among processes, and two models of one seed have
equal values, up to rounding to their dtypes, wherever their parameters have the same name, shape and distribution.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..attention import Attention
from .config import DiffTransformerConfig

RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight")
BASE_PREFIX = "model."

Make = Callable[[], Tensor]


def new_seed() -> int | None:
    """Draw the seed of a model from PyTorch's global generator; None where nothing is drawn: tensors are fake or meta."""
    drawn = torch.randint(2**63 - 1, ())
    return None if drawn.is_meta or isinstance(drawn, FakeTensor) else int(drawn)


class Start:
    """Gives the parameters of a model their first values.

    Parameters on the meta device get none now: how to make them is kept in `deferred`, by name.

    Args:
        model: The model.
        seed: Its seed.
        deferred: What is kept for later.
    """

    def __init__(self, model: nn.Module, seed: int, deferred: dict[str, Make]) -> None:
        self._seed, self._deferred = seed, deferred
        self._names = {
            id(parameter): name.removeprefix(BASE_PREFIX)
            for name, parameter in reversed([*model.named_parameters(remove_duplicate=False)])
        }

    def linear(self, weight: Tensor, config: DiffTransformerConfig) -> None:
        """Fill the matrix of a linear layer, (d_out, d_in)."""
        self._fill(weight, self._linear(weight, config))

    def embedding(self, weight: Tensor, config: DiffTransformerConfig, *, padding: int | None = None) -> None:
        """Fill an embedding or an output layer, (vocabulary, d); the row of the padding token is zero."""
        std = config.hidden_size**-0.5 if config.initialization == "fan_in" else config.initializer_range
        draw = self._normal(weight, std=std)

        def make() -> Tensor:
            drawn = draw()
            if padding is not None:
                drawn[padding] = 0
            return drawn

        self._fill(weight, make)

    def last_norm(self, gain: Tensor, config: DiffTransformerConfig) -> None:
        """Fill the gain of the last norm, (d,), with 1 / sqrt(d)."""
        self._fill(gain, lambda: torch.full(gain.shape, config.hidden_size**-0.5))

    def attention(self, layer: Attention, config: DiffTransformerConfig) -> None:
        """Fill what an attention layer has beside its projections, and all of it where attention starts mimetic."""

        def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> None:
            self._fill(tensor, self._normal(tensor, mean=mean, std=std))

        layer.init_own_parameters(normal_)
        if not config.mimetic_attention:
            return
        query, value = (
            self._normal(projection.weight, std=layer.embed_dim**-0.5) for projection in (layer.q_proj, layer.v_proj)
        )
        weights = [projection.weight for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)]
        makes = (query, lambda: layer.mimetic_key(query()), value, lambda: layer.mimetic_output(value()))
        for weight, make in zip(weights, makes, strict=True):
            self._fill(weight, self._of_depth(weight, make, config))

    def _linear(self, weight: Tensor, config: DiffTransformerConfig) -> Make:
        if config.initialization == "fan_in":
            make = fan_in(weight, self._seed, self._names[id(weight)])
        else:
            make = self._normal(weight, std=config.initializer_range)
        return self._of_depth(weight, make, config)

    def _of_depth(self, weight: Tensor, make: Make, config: DiffTransformerConfig) -> Make:
        if not config.depth_scaled_residual or not self._names[id(weight)].endswith(RESIDUAL_PROJECTIONS):
            return make
        return lambda: make() / math.sqrt(2 * config.num_hidden_layers)

    def _normal(self, tensor: Tensor, *, mean: float = 0.0, std: float) -> Make:
        def draw(whole: Tensor, generator: torch.Generator) -> Tensor:
            return whole.normal_(mean, std, generator=generator)

        return _drawn(tensor, self._seed, self._names[id(tensor)], draw)

    def _fill(self, parameter: Tensor, make: Make) -> None:
        if getattr(parameter, "_is_hf_initialized", False):  # it was read from files
            return
        if parameter.is_meta:
            self._deferred[self._names[id(parameter)]] = make
            return
        own, index = local_part(parameter)
        own.copy_(make()[index])


def fan_in(weight: Tensor, seed: int, name: str) -> Make:
    """Make a function that draws a matrix (d_out, d_in) from U(-1/sqrt(d_in), 1/sqrt(d_in)), seeded by model and name."""
    bound = weight.shape[1] ** -0.5
    return _drawn(weight, seed, name, lambda whole, generator: whole.uniform_(-bound, bound, generator=generator))


def _drawn(like: Tensor, seed: int, name: str, draw: Callable[[Tensor, torch.Generator], Tensor]) -> Make:
    """Make a function that draws a whole tensor of a parameter's shape in fp32 from the parameter's own generator."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    shape = like.shape

    def make() -> Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return draw(torch.empty(shape, dtype=torch.float32, device="cpu"), generator)

    return make


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this process's part of a parameter, and where it is in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    own = parameter.to_local()
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert shape == own.shape
    return own, tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))

"""How large the branches of a new model are beside the residual stream that they join: a forward pass before training.

A branch is the attention or the MLP of a layer. One that starts much larger than the stream drowns what the layers before it
wrote there, the embeddings above all.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from .config import DiffTransformerConfig
from .counts import count
from .modeling import DiffTransformerModel, RotaryEmbedding

LARGEST_RATIO = 5.0  # of a branch to the stream that it joins
TOKENS, VOCABULARY = 256, 2048
MOST_BYTES, MOST_LAYER_BYTES = 2**30, 2**32  # of the weights that are built; of a single layer, which may be larger
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch of a layer at step 0.

    Attributes:
        layer: Index of the layer, from 0.
        name: Which branch.
        stream: RMS of the residual stream that the branch joins.
        output: RMS of what the branch adds to it.
    """

    layer: int
    name: Literal["attention", "MLP"]
    stream: float
    output: float

    @property
    def ratio(self) -> float:
        """The branch over the stream that it joins."""
        return self.output / self.stream


def start_sizes(config: DiffTransformerConfig, *, seed: int = 0, layers: int | None = None) -> list[Branch]:
    """Measure the branches of a new model on 256 random tokens: attention and MLP of layer 0, of layer 1, and so on.

    Only the layers that are measured are built, on the CPU in fp32, with the values that they have in the whole model; of the
    embedding at most 2,048 rows are. PyTorch's random generators stay as they are.

    Args:
        config: The model's configuration.
        seed: The seed of the model, as training has it, and of the tokens.
        layers: The largest number of first layers to measure; None means `measured_layers`.

    Raises:
        ConfigError: The weights of a single layer take more than 4 GiB.
    """
    most = measured_layers(config)
    model = first_layers(config, most if layers is None else min(layers, most), seed)
    sizes: dict[str, list[float]] = {"before": [], "attention": [], "between": [], "MLP": []}

    def keep(name: str, tensor: Tensor) -> None:
        sizes[name].append(tensor.square().mean().sqrt().item())

    with ExitStack() as hooks:
        for layer in model.layers:
            for name, norm in (("before", layer.input_layernorm), ("between", layer.post_attention_layernorm)):
                hooks.callback(norm.register_forward_pre_hook(lambda _, given, at=name: keep(at, given[0])).remove)
            attention, mlp = layer.self_attn, layer.mlp
            hooks.callback(attention.register_forward_hook(lambda _, given, made: keep("attention", made[0])).remove)
            hooks.callback(mlp.register_forward_hook(lambda _, given, made: keep("MLP", made)).remove)
        tokens = torch.Generator().manual_seed(seed)
        row = torch.randint(model.config.vocab_size, (1, TOKENS), generator=tokens, device="cpu")
        with torch.no_grad():
            model.eval()(row, use_cache=False)
    joined: tuple[tuple[Literal["attention", "MLP"], str], ...] = (("attention", "before"), ("MLP", "between"))
    return [
        Branch(layer=layer, name=name, stream=sizes[stream][layer], output=sizes[name][layer])
        for layer in range(len(model.layers))
        for name, stream in joined
    ]


def measured_layers(config: DiffTransformerConfig) -> int:
    """Return how many layers of a model are measured: as many as 1 GiB holds of its weights, and at least one.

    Raises:
        ConfigError: The weights of a single layer take more than 4 GiB.
    """
    own = count(config)
    untied = 1 if config.tie_word_embeddings else 2
    layer = FP32_BYTES * (own.parameters - untied * own.embedding_parameters) // config.num_hidden_layers
    if layer > MOST_LAYER_BYTES:
        raise ConfigError(
            f"hidden_size={config.hidden_size}: one layer takes {layer / 2**30:.1f} GiB, and its start is measured in at most "
            f"{MOST_LAYER_BYTES / 2**30:.0f} GiB; measure a narrower model with the same heads"
        )
    return min(config.num_hidden_layers, max(1, MOST_BYTES // layer))


def drowning(config: DiffTransformerConfig, branches: Sequence[Branch]) -> str | None:
    """Say what starts more than `LARGEST_RATIO` times as large as the stream it joins, and the remedy; None if nothing does."""
    worst = max(branches, key=lambda branch: branch.ratio)
    if worst.ratio <= LARGEST_RATIO:
        return None
    where = "embeddings" if (worst.layer, worst.name) == (0, "attention") else "residual stream"
    remedy = "start with initialization: fan_in"
    if config.initialization == "fan_in":
        remedy = f"raise embedding_multiplier, now {config.embedding_multiplier:g}"
    return (
        f"the {worst.name} of layer {worst.layer} starts {worst.ratio:.1f} times as large as the {where} that it joins, and "
        f"drowns {'them' if where == 'embeddings' else 'it'}; {remedy}"
    )


def first_layers(config: DiffTransformerConfig, layers: int, seed: int) -> Any:
    """Build the first layers of a model, with the values that `train` gives them."""
    small = copy.deepcopy(config)
    small.vocab_size, small.pad_token_id = min(config.vocab_size, VOCABULARY), None
    small.attn_backend = "reference"
    with torch.device("meta"):
        model = DiffTransformerModel(small)
    del model.layers[layers:]
    model.to_empty(device="cpu")
    model.rotary_emb = RotaryEmbedding(small).to("cpu")
    model._seed = int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(seed), device="cpu"))
    with torch.no_grad():
        model.initialize_weights()
    return model

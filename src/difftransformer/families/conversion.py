"""The table of layouts, and the conversion of a whole model as data: which tensors it needs, how each result is made.

A layout is one file of this package and one line of `LAYOUTS`; one with folders is also named in `checkpoint_io._conversion`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import CheckpointError, ConfigError, ShapeError
from ..model import DiffTransformerConfig

Read = Callable[[str], Tensor]
Shape = tuple[int, ...]
NAMES_SHOWN = 3  # tensor names that a message lists
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class Layout(NamedTuple):
    """A layout of weights.

    Attributes:
        summary: What it is, in a few words.
        model_type: The model_type in config.json, or None if the layout has no folders of its own.
        architecture: The class of its causal language model in config.json; empty if attention weights alone are converted.
        functions: Names in `difftransformer.families` that convert attention weights; empty if whole folders are converted.
    """

    summary: str
    model_type: str | None
    architecture: str = ""
    functions: tuple[str, ...] = ()


LAYOUTS: dict[str, Layout] = {
    "difftransformer": Layout("models of this package", "difftransformer", "DiffTransformerForCausalLM"),
    "diffllama": Layout("DiffLlama of transformers", "diffllama", "DiffLlamaForCausalLM"),
    "llama": Layout("Llama of transformers, for softmax twins and DEX", "llama", "LlamaForCausalLM"),
    "microsoft": Layout(
        "attention modules of microsoft/unilm, V1 and V2",
        None,
        functions=("microsoft_attention_state", "load_microsoft_attention", "microsoft_state", "load_microsoft_state"),
    ),
    "phi4flash": Layout(
        "attention of Phi-4-mini-flash",
        "phi4flash",
        functions=("phi4flash_attention_state", "load_phi4flash_attention"),
    ),
    "motif": Layout(
        "attention of Motif-2.6B and Motif-2-12.7B",
        "Motif",
        functions=("motif_attention_state", "load_motif_attention"),
    ),
    "timm": Layout("DiffAttention of timm", None, functions=("timm_attention_state", "load_timm_attention")),
}
FOLDER_LAYOUTS = [name for name, layout in LAYOUTS.items() if not layout.functions]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The conversion of one configuration from one layout to another.

    Attributes:
        config: config.json of the result.
        needs: Shape of every tensor of the source, by name.
        ties: Tensors that the source may leave out, each with the tensor it equals.
        makes: For every tensor of the result, the function that makes it from the source's tensors.
        notes: Sentences about what the result cannot hold.
        unread: Patterns of tensors that the source may hold and its model does not read, such as a draft head's.
    """

    config: dict[str, Any]
    needs: Mapping[str, Shape]
    ties: Mapping[str, str]
    makes: Mapping[str, Callable[[Read], Tensor]]
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def check(self, shapes: Mapping[str, Shape], source: str = "") -> tuple[str, ...]:
        """Check that a source has the tensors that are needed, and return a note if it has some that are not read.

        Args:
            shapes: Shape of every tensor, by name.
            source: The folder, for messages.

        Raises:
            CheckpointError: A tensor is missing, or there is one too many.
            ShapeError: A tensor's shape contradicts the configuration.
        """
        unread = [
            name for name in shapes.keys() - self.needs.keys() if any(re.search(one, name) for one in self.unread)
        ]
        read = {name: shape for name, shape in shapes.items() if name not in unread}
        check_tensors(read, self.needs, optional=self.ties, source=source)
        return (f"{_listed(sorted(unread))} left out: the source's model does not read such tensors",) if unread else ()

    def apply(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a state dict in memory.

        Raises:
            CheckpointError: A tensor is missing, or there is one too many.
            ShapeError: A tensor's shape contradicts the configuration.
        """
        self.check(shapes_of(state))
        return {name: make(state.__getitem__) for name, make in self.makes.items()}


def kept(name: str) -> Callable[[Read], Tensor]:
    """Return the function that takes a tensor as it is."""
    return lambda read: read(name)


def refuse_tied_multiplier(config: DiffTransformerConfig, target: str) -> None:
    """Refuse a model whose tied embedding would need two sizes where nothing multiplies it.

    Raises:
        ConfigError: Embeddings are multiplied, and the output layer is the embedding.
    """
    if config.tie_word_embeddings and config.embedding_multiplier != 1:
        raise ConfigError(
            f"embedding_multiplier={config.embedding_multiplier:g} with tie_word_embeddings=True: {target} has no multiplier, "
            "and the output layer needs the embedding as it is; untie them (--untie, or untie=True)"
        )


def with_multiplier_folded(
    conversion: Conversion, config: DiffTransformerConfig, target: str, *, untie: bool
) -> Conversion:
    """Return a conversion whose embedding is multiplied, for a layout without `embedding_multiplier`.

    The product is rounded as the model rounds it, so that in the dtype of the weights the function is the same to the bit.

    Args:
        conversion: A conversion that keeps the embedding, and an output layer of its own.
        config: Configuration of the source.
        target: Name of the layout, for messages.
        untie: Whether a tied output layer becomes a matrix of its own: the embedding as it was.

    Raises:
        ConfigError: The model's embedding is tied, and untie is False.
    """
    makes, document = dict(conversion.makes), conversion.config
    if untie and config.tie_word_embeddings:
        embedding = makes[EMBEDDING]
        makes[OUTPUT] = lambda read: embedding(read).clone()
        document = document | {"tie_word_embeddings": False}
    else:
        refuse_tied_multiplier(config, target)
    if config.embedding_multiplier != 1:
        keep = makes[EMBEDDING]
        makes[EMBEDDING] = lambda read: keep(read) * config.embedding_multiplier
    return replace(conversion, config=document, makes=makes)


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shape of every tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_tensors(
    shapes: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    *,
    optional: Collection[str] = (),
    source: str = "",
    by: str = "config.json",
) -> None:
    """Check that the tensors are exactly the expected ones.

    Args:
        shapes: Shapes by name.
        expected: Shapes by name, with those in `optional`.
        optional: Names that may be absent.
        source: The file or folder, for messages.
        by: What determines the expected tensors, for messages.

    Raises:
        CheckpointError: Tensors are missing, or there are too many.
        ShapeError: A shape is wrong.
    """
    at = f"{source}: " if source else ""
    missing = [name for name in expected if name not in shapes and name not in optional]
    if missing:
        raise CheckpointError(f"{at}{_listed(missing)} missing; expected {len(expected) - len(optional)} tensors")
    extra = [name for name in shapes if name not in expected]
    if extra:
        raise CheckpointError(f"{at}{_listed(extra)} not part of this layout, by {by}")
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise ShapeError(f"{at}{name} has shape {shapes[name]}, expected {shape} by {by}")


def _listed(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    text = ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
    return f"{text} {'is' if len(names) == 1 else 'are'}"

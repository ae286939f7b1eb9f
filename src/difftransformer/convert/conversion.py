"""What a conversion of a whole model does, as data: which tensors it needs, and how each tensor of the result is made."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, ShapeError

Read = Callable[[str], Tensor]
Shape = tuple[int, ...]
NAMES_SHOWN = 3  # of a list in a message


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One direction between two layouts for one configuration.

    Attributes:
        config: The result's config.json.
        needs: Name and shape of every tensor of the source.
        ties: Tensors of the source that may be left out, since the tensor named here is the same.
        makes: Name of every tensor of the result, and what makes it from the source's tensors.
        notes: What the result has no place for, in sentences.
    """

    config: dict[str, Any]
    needs: Mapping[str, Shape]
    ties: Mapping[str, str]
    makes: Mapping[str, Callable[[Read], Tensor]]
    notes: tuple[str, ...] = ()

    def apply(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a state dict in memory.

        Raises:
            CheckpointError: a tensor is missing or belongs to something else.
            ShapeError: a tensor's shape is not the configuration's.
        """
        check_tensors({name: tuple(tensor.shape) for name, tensor in state.items()}, self.needs, optional=self.ties)
        return {name: make(state.__getitem__) for name, make in self.makes.items()}


def check_tensors(
    found: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    *,
    optional: Collection[str] = (),
    source: str = "",
    by: str = "config.json",
) -> None:
    """Refuse tensors that are not exactly the expected ones.

    Args:
        found: Name to shape.
        expected: Name to shape, `optional` included.
        optional: Names that may be absent.
        source: The file or folder, for messages.
        by: What the expectation follows from, for messages.

    Raises:
        CheckpointError: names are missing, or there are more.
        ShapeError: a shape is another one.
    """
    at = f"{source}: " if source else ""
    missing = [name for name in expected if name not in found and name not in optional]
    if missing:
        raise CheckpointError(f"{at}{_listed(missing)} missing; expected {len(expected) - len(optional)} tensors")
    extra = [name for name in found if name not in expected]
    if extra:
        raise CheckpointError(f"{at}{_listed(extra)} not part of this layout, by {by}")
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            raise ShapeError(f"{at}{name} has shape {found[name]}, expected {shape} by {by}")


def _listed(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    text = ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
    return f"{text} {'is' if len(names) == 1 else 'are'}"

"""Models that are built and divided before their matrices have values. Each process then gets its part of the values alone.

A matrix on the meta device has a shape and no memory. Operations on it are noted together with the state of the random
generator, and done when its values are due: for one whole matrix at a time, on the CPU, whatever the mesh. So the values are to
the bit those of a model that is built whole, and no process holds more than its part and one matrix.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Index: TypeAlias = tuple[slice, ...]
Read: TypeAlias = Callable[[str, Index], Tensor]


class Unfilled:
    """A model whose matrices have no values yet.

    Matrices that a module makes with values, and does not fill in afterwards, have them at once, as vectors do.

    Args:
        build: Builds the model.
        read: Returns the part of a parameter at an index, by the parameter's name, if the values of what `build` makes come
            from elsewhere. None takes those that `build` gives them.

    Attributes:
        network: The model, with its matrices on the meta device.
    """

    def __init__(self, build: Callable[[], Any], read: Read | None = None) -> None:
        self._notes, self._read = _Notes(), read
        self.network: Any = None
        self._build(build, noted=read is None)

    def change(self, change: Callable[[Any], object]) -> None:
        """Change the model in place, such as by adding modules, of which new matrices are drawn."""

        def changed() -> Any:
            change(self.network)
            return self.network

        self._build(changed, noted=True)

    def _build(self, build: Callable[[], Any], *, noted: bool) -> None:
        with (
            _without_memory(self._notes.take_empty if noted else lambda _: True),
            self._notes if noted else nullcontext(),
        ):
            self.network = build()
        self._before = {name: parameter.detach() for name, parameter in self.network.named_parameters()}

    @torch.no_grad()
    def fill(self, device: str) -> None:
        """Move the model, which may have been divided since, to a device, and give it its values.

        Names and parameter objects stay what they are.
        """
        tensors = [*self.network.named_parameters(), *self.network.named_buffers()]
        there = {name: tensor.detach().to(device) for name, tensor in tensors if not tensor.is_meta}
        with _same_parameters():
            self.network.to_empty(device=device)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(there[name])
        for name, parameter in self.network.named_parameters():
            own, index = part(parameter)
            if not own.numel():
                continue
            if self._notes.knows(self._before[name]):
                own.copy_(self._notes.value(self._before[name])[index])
            elif self._read is not None:
                own.copy_(self._read(name, index))
            else:
                parameter.copy_(there[name])


def part(parameter: Tensor) -> tuple[Tensor, Index]:
    """Return this process's part of a parameter, and where it is in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    own = parameter.to_local()
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert shape == own.shape
    return own, tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))


class _Note(NamedTuple):
    operator: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: Any
    state: Tensor | None  # of the random generator, if the operator draws


class _Notes(TorchDispatchMode):
    """Notes the operations on meta tensors, and takes from the random generator what they take on others.

    Notes speak of storages, and a tensor is a place in one. So views need no notes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._storages: dict[int, Any] = {}  # kept, so that each has an address of its own
        self._of: dict[int, dict[int, _Note]] = {}  # by number, what the values in a storage follow from
        self._empty: dict[int, Any] = {}  # storages on the CPU that hold no values yet

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Run an operation, and note it if a meta tensor takes part."""
        options = options or {}
        read = _meta((arguments, options))
        if not read:
            made = operator(*arguments, **options)
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor) and not operator.is_view:
                    self._empty.pop(_key(tensor), None)
                    if operator.name().startswith(_EMPTY):
                        self._empty[_key(tensor)] = tensor.untyped_storage()
            return made
        state = None
        if torch.Tag.nondeterministic_seeded in operator.tags:
            state = torch.get_rng_state()
            operator(*tree_map_only(Tensor, lambda tensor: _on_cpu(tensor, _memory(tensor)), arguments), **options)
        result = operator(*arguments, **options)
        if operator.is_view:
            return result
        written = {_key(tensor): tensor.untyped_storage() for tensor in _meta(result)}
        before: dict[int, _Note] = {}
        if operator.name() not in _OVERWRITE or not _is_whole(arguments[0]):
            for tensor in read:
                before |= self._of.get(_key(tensor), {})
        self._storages |= written
        # Aliases of the tensors, because a parameter may become another tensor.
        note = tree_map_only(Tensor, Tensor.detach, _Note(operator, arguments, options, result, state))
        for key in written:
            self._of[key] = before | {self._count: note}
        self._count += 1
        return result

    def take_empty(self, tensor: Tensor) -> bool:
        """Whether a tensor on the CPU holds no values yet. It is about to be replaced by one on the meta device if so."""
        return self._empty.pop(_key(tensor), None) is not None

    def knows(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor follow from notes."""
        return tensor.is_meta and _key(tensor) in self._of

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a meta tensor, on the CPU."""
        storages: dict[int, Any] = {}

        def real(meta: Tensor) -> Tensor:
            if not meta.is_meta:
                return meta
            if _key(meta) not in storages:
                storages[_key(meta)] = _memory(meta)
            return _on_cpu(meta, storages[_key(meta)])

        with torch.random.fork_rng(devices=[]):
            for _, note in sorted(self._of[_key(tensor)].items()):
                if note.state is not None:
                    torch.set_rng_state(note.state)
                arguments, options = tree_map_only(Tensor, real, (note.arguments, note.options))
                found = note.operator(*arguments, **options)
                for meta, made in zip(tree_leaves(note.result), tree_leaves(found), strict=True):
                    storages.setdefault(_key(meta), made.untyped_storage())
        return real(tensor)


_EMPTY = ("aten::empty", "aten::new_empty")
# Operators that write all of their first argument, and read nothing of it.
_OVERWRITE = {"aten::normal_", "aten::uniform_", "aten::fill_.Scalar", "aten::zero_"}


def _meta(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _memory(meta: Tensor) -> Any:
    """Return a storage on the CPU of the size of a tensor's storage.

    Its memory goes back to the system at once. The small tensors that stay would keep a heap from shrinking.
    """
    pages = mmap.mmap(-1, max(1, meta.untyped_storage().nbytes()))
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


def _on_cpu(meta: Tensor, storage: Any) -> Tensor:
    return torch.empty(0, dtype=meta.dtype).set_(storage, meta.storage_offset(), meta.shape, meta.stride())


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


@contextmanager
def _without_memory(is_meant: Callable[[Tensor], bool]) -> Iterator[None]:
    """Put those matrices of modules that are meant on the meta device. Vectors and buffers are as they always are."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or parameter.dim() < 2 or not is_meant(parameter):
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _same_parameters() -> Iterator[None]:
    """Let modules that move to another device keep their parameter objects, which may be tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)

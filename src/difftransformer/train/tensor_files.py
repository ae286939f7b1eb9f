"""Tensors in safetensors files; every process writes and reads its part.

torch.distributed.checkpoint divides the work and fits the parts of one mesh to another. Its safetensors form holds the
places of parts in the header of each file, so nothing is pickled.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from ..errors import CheckpointError
from ..files import naming
from .parallel import Processes
from .parallel.mesh import whole


def part_name(stem: str, index: int, count: int) -> str:
    """Return the name of a process's file, as Hugging Face names the files of a model."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def is_part(name: str, stem: str) -> bool:
    """Whether a file is one of those that `part_name` names."""
    return re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.safetensors", name) is not None


def own_share(
    tensors: dict[str, Tensor], processes: Processes, *, copy: bool
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Gather tensors one by one, and keep in each process an equal share of them, whole and on the CPU.

    Args:
        tensors: Tensors, in the same order in every process, which may hold parts of them.
        processes: The processes, which all take part.
        copy: Whether to copy also what is whole and on the CPU already.

    Returns:
        The tensors of this process, and the index of the process of each name.
    """
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    share, owners, before = {}, {}, 0
    for name, tensor in tensors.items():
        owners[name] = before * processes.count // total
        before += tensor.numel() * tensor.element_size()
        gathered = whole(tensor.detach())
        if owners[name] == processes.rank:
            share[name] = gathered.to("cpu", copy=copy).contiguous()
    return share, owners


def on_cpu(tensors: dict[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """Return tensors, or this process's parts of them, on the CPU; as copies if `copy`, or if they are on a GPU."""
    if copy or any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return BlockingAsyncStager().stage(tensors)
    return tensors


def write_parts(folder: Path, stem: str, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Write each process's parts of tensors to a file of its own. All processes take part, and all fail if one does.

    Raises:
        OSError: A process cannot write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=processes.group)
    except CheckpointException as fault:
        rank, (error, _) = min(fault.failures.items())
        with naming(folder / part_name(stem, rank, processes.count)):
            raise error from None
    for written in folder.glob(f"shard-{processes.rank + 1:05d}-*.safetensors"):
        written.rename(folder / part_name(stem, processes.rank, processes.count))


class TensorFiles(HuggingFaceStorageReader):
    """The tensors of some files of a folder, whole ones or parts.

    Args:
        files: The files.
        name: What errors call them.

    Attributes:
        shapes: Shape of each tensor.

    Raises:
        CheckpointError: There is no file, or one cannot be read.
    """

    def __init__(self, files: Sequence[Path], *, name: Path) -> None:
        if not files:
            raise CheckpointError(f"{name}: missing")
        super().__init__(str(name.parent))
        self._name = name
        self.fs.ls = lambda path: [str(file) for file in files]  # type: ignore[method-assign]
        try:
            self._metadata = self.read_metadata()
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name}: cannot be read ({error})") from None
        entries: dict[str, Any] = self._metadata.state_dict_metadata
        self.shapes = {key: tuple(entry.size) for key, entry in entries.items()}
        for key, entry in entries.items():
            if sum(part.sizes.numel() for part in entry.chunks) != entry.size.numel():
                raise CheckpointError(f"{name}: parts of {key} are missing, or are there twice")

    def __str__(self) -> str:
        return str(self._name)

    @torch.no_grad()
    def read(self, into: dict[str, Tensor]) -> None:
        """Read tensors, or this process's parts of them, into the memory that they have.

        Raises:
            CheckpointError: A file cannot be read.
        """
        planner = dcp.DefaultLoadPlanner()
        try:
            planner.set_up_planner(into, self._metadata, is_coordinator=True)
            self.set_up_storage_reader(self._metadata, is_coordinator=True)
            self.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AssertionError, RuntimeError) as error:
            raise CheckpointError(f"{self}: cannot be read ({error})") from None

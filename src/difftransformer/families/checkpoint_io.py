"""Reading, converting and writing folders of models.

Nothing in a folder is run. Tensors are converted one by one, and the result is written whole or not at all.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DiffLlamaConfig, LlamaConfig

from ..attention import SoftmaxAttention
from ..errors import CheckpointError, ConfigError, DiffTransformerError, on_one_line
from ..files import locked, naming
from ..model import DiffTransformerConfig
from ..model.transformers_errors import FOREIGN_FAULTS
from ..model.weights import (
    CONFIG_FILE,
    INDEX_FILE,
    PIECES,
    WEIGHTS_FILE,
    check_inside,
    refuse_adapter,
    weight_map,
    weights_files,
)
from ..reading import read_json, with_floats
from .conversion import FOLDER_LAYOUTS, LAYOUTS, Conversion, Shape
from .diffllama import from_diffllama, to_diffllama
from .llama import MUST_BE, beyond_layout, from_llama, to_llama

COMPUTED = "rotary_emb.inv_freq"  # how names of buffers end that files of Llama 2 hold and models compute
SHARD_BYTES = 5 * 10**9  # largest weights file; hubs and file systems handle this size well
# Tokenizers of every kind, chat templates, generation settings and licences are copied unchanged.
CARRIED = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates*",  # a folder; on the hub, patterns match the paths of the files inside
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion."""

    folder: Path  # that was written
    layout: str
    tensors: int  # their number
    bytes: int  # size of the tensors
    carried: tuple[str, ...]  # files and folders that were copied unchanged
    left_behind: tuple[str, ...]  # files of the source that are neither weights nor copied
    notes: tuple[str, ...]  # sentences about what the target cannot hold


def convert_folder(
    source: Path | str,
    target: Path | str,
    *,
    to: str,
    source_layout: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    untie: bool = False,
) -> Converted:
    """Convert a model's folder to another layout.

    Args:
        source: A folder with config.json and safetensors, in one file or several.
        target: The folder to make. It may exist if it is empty.
        to: The layout to write, a name in `LAYOUTS`.
        source_layout: The layout to read, a name in `LAYOUTS`; None takes it from config.json.
        shard_bytes: Largest size of a weights file.
        untie: Whether a tied output layer becomes a matrix of its own, where the target is not this package's layout. A layout
            without an embedding multiplier needs this.

    Raises:
        ConfigError: The layouts do not convert into one another, the target cannot express the model, an adapter lies beside
            the weights, or the target folder is in use.
        CheckpointError: Files are missing or damaged, or tensors contradict the configuration.
        ShapeError: A tensor's shape contradicts config.json.
    """
    source, target = Path(source), Path(target)
    refuse_used(target)
    document = read_config(source)
    source_layout = _checked_layouts(document, source_layout, to, source)
    if untie and to == "difftransformer":
        raise ConfigError(f"--untie with --to {to}: this layout has tied embeddings; leave it out")
    conversion = _conversion(document, source_layout, to, source, untie)
    return write_converted(source, target, conversion, to, shard_bytes)


def write_converted(
    source: Path, target: Path, conversion: Conversion, layout: str, shard_bytes: int | None = None
) -> Converted:
    """Apply a conversion from folder to folder, and copy tokenizer, chat template and licence.

    Args:
        source, target: The folders.
        conversion: What is made of what.
        layout: Name of the target's layout, for the result.
        shard_bytes: Largest size of a weights file. None follows the source's files (`WeightsReader.shard_bytes`).

    Raises:
        ConfigError: An adapter lies beside the weights.
        CheckpointError: Files are missing or damaged, or tensors contradict the configuration.
        ShapeError: A tensor's shape contradicts config.json.
    """
    with WeightsReader(source) as weights:
        notes = conversion.check(weights.shapes, str(source))
        weights.refuse_quantized()
        refuse_adapter(source, "converted")
        _check_ties(conversion, weights)
        with whole_or_not_at_all(target) as folder:
            (folder / CONFIG_FILE).write_text(json.dumps(conversion.config, indent=2) + "\n", encoding="utf-8")
            tensors = ((name, make(weights.read)) for name, make in conversion.makes.items())
            total = write_weights(folder, tensors, shard_bytes or weights.shard_bytes)
            carried = carry(source, folder)
        known = {CONFIG_FILE, INDEX_FILE, *weights.files, *carried}
    return Converted(
        folder=target,
        layout=layout,
        tensors=len(conversion.makes),
        bytes=total,
        carried=tuple(carried),
        left_behind=tuple(sorted(path.name for path in source.iterdir() if path.name not in known)),
        notes=conversion.notes + notes,
    )


def carry(source: Path, target: Path, *, leave: Collection[str] = ()) -> list[str]:
    """Copy tokenizer, chat template, generation settings and licence, but for `leave`, and return their names.

    Raises:
        CheckpointError: One of them is a link out of the folder: a copy would hold a file that was never part of the model.
    """
    names = sorted({path.name for pattern in CARRIED for path in source.glob(pattern)} - set(leave))
    for name in names:
        path = source / name
        for part in (path, *path.rglob("*")):
            check_inside(part)
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, target / name)
    return names


class WeightsReader:
    """A context manager that reads the safetensors of a folder, tensor by tensor. One file is open at a time.

    Attributes:
        files: Names of the weights files.
        shapes: Shape of every tensor, by name, but for buffers that models compute.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = lru_cache(maxsize=1)(self._opened)
        self._where: dict[str, str] = {}  # file of each tensor
        self._dtypes: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.files = weights_files(folder)
        if Path(self.files[0]).match(PIECES):
            raise CheckpointError(
                f"{folder / self.files[0]} has one process's pieces of the tensors; first call "
                "transformers.distributed.consolidate_distributed_checkpoint on the folder"
            )
        for name in self.files:
            self._list(name)
        listed = {} if self.files == [WEIGHTS_FILE] else weight_map(folder)
        if absent := sorted(name for name in listed.keys() - self.shapes.keys() if not name.endswith(COMPUTED)):
            raise CheckpointError(
                f"{folder / INDEX_FILE}: {absent[0]} is listed but in none of the files; copy them again"
            )

    def __enter__(self) -> "WeightsReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.cache_clear()

    def read(self, name: str) -> Tensor:
        """Load one tensor."""
        return self._open(self._where[name]).get_tensor(name)  # type: ignore[no-any-return]

    def read_part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Load a part of one tensor, of at least one dimension."""
        return self._open(self._where[name]).get_slice(name)[index]  # type: ignore[no-any-return]

    @property
    def shard_bytes(self) -> int:
        """Size to split a conversion's weights by: 3/4 of the folder's largest file, or SHARD_BYTES if it has only one.

        A file being read and one being filled are in memory together, which is then less than twice the largest file.
        """
        sizes = [(self.folder / name).stat().st_size for name in self.files]
        return max(sizes) * 3 // 4 if len(sizes) > 1 else SHARD_BYTES

    def refuse_quantized(self) -> None:
        """Raise a CheckpointError unless all weights are floating-point, as permuting and folding need them."""
        for name, dtype in self._dtypes.items():
            if dtype not in ("F64", "F32", "F16", "BF16"):
                raise CheckpointError(
                    f"{self.folder}: {name} has dtype {dtype}, expected F64, F32, F16 or BF16; convert the model before it "
                    "is quantized"
                )

    def _opened(self, name: str) -> Any:
        path = self.folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, though {INDEX_FILE} lists it; copy the folder again")
        try:
            return safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is cut short or damaged ({error}); its {path.stat().st_size:,} bytes do not hold what its header "
                "lists: copy it again"
            ) from None

    def _list(self, name: str) -> None:
        file = self._open(name)
        for tensor in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
            if tensor.endswith(COMPUTED):
                continue
            if tensor in self._where:
                raise CheckpointError(
                    f"{self.folder / name}: {tensor} is in two files of {self.folder}; expected it once"
                )
            part = file.get_slice(tensor)
            self._where[tensor], self._dtypes[tensor] = name, part.get_dtype()
            self.shapes[tensor] = tuple(part.get_shape())


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Write tensors in files of at most shard_bytes (but at least one tensor each), and an index for several files.

    Returns:
        The size of all tensors in bytes.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        weight = tensor.numel() * tensor.element_size()
        if pending and size + weight > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.contiguous()
        size, total = size + weight, total + weight
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / WEIGHTS_FILE)
        return total
    weight_map: dict[str, str] = {}
    for place, names in enumerate(shards):
        file = f"model-{place + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{place}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


@contextmanager
def whole_or_not_at_all(target: Path) -> Iterator[Path]:
    """Provide a folder beside the target, which is renamed to the target at the end, or removed after an error.

    An empty folder that is there is filled: it may be where the shell stands, a link or a mount. What a process left that was
    killed is removed. An error of the operating system, such as that of a full disk, names the file in the target.

    Raises:
        FolderInUse: Another process is writing the target.
    """
    place = target.resolve()
    temporary = place.with_name(f".{place.name}.tmp")
    with locked(place.parent, name=f".{place.name}.lock"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            with naming(temporary):
                yield temporary
            if place.exists():
                for path in temporary.iterdir():
                    shutil.move(path, place)
                temporary.rmdir()
            else:
                temporary.rename(place)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            name = str(error.filename).replace(str(temporary), str(target))
            raise OSError(error.errno, error.strerror, name) from None


def refuse_used(target: Path) -> None:
    """Raise a ConfigError unless the target does not exist or is an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        what = "is a folder that is not empty" if target.is_dir() else "is a file"
        raise ConfigError(f"{target} {what}; name a folder that does not exist yet")


def read_config(source: Path) -> dict[str, Any]:
    """Read config.json of a folder."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder; name one with {CONFIG_FILE} and {WEIGHTS_FILE}")
    path = source / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{source} has no {CONFIG_FILE}; name the folder of a saved model")
    document = read_json(path, error=CheckpointError, advice="copy it again")
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds a {type(document).__name__}, expected a JSON object")
    return {key: with_floats(value) for key, value in document.items()}


def _checked_layouts(document: dict[str, Any], stated: str | None, to: str, source: Path) -> str:
    """Return the source's layout after checking that both layouts have folders that convert into one another."""
    for option, name in (("to", to), ("from", stated)):
        if name is not None and name not in LAYOUTS:
            raise ConfigError(f"--{option} {name!r} is not a layout; choose one of {', '.join(LAYOUTS)}")
    at, model_type = source / CONFIG_FILE, document.get("model_type")
    types = {layout.model_type: name for name, layout in LAYOUTS.items() if layout.model_type}
    name = stated or types.get(str(model_type))
    if name is None:
        known = ", ".join(repr(LAYOUTS[name].model_type) for name in FOLDER_LAYOUTS)
        raise ConfigError(f"{at}: model_type={model_type!r} is not a layout that can be read; expected one of {known}")
    for layout in (name, to):
        if layout not in FOLDER_LAYOUTS:
            first, second = LAYOUTS[layout].functions[:2]
            raise ConfigError(
                f"{layout}: {LAYOUTS[layout].summary} convert as attention weights, not as folders; call "
                f"difftransformer.families.{first} or .{second}"
            )
    if LAYOUTS[name].model_type != model_type:
        raise ConfigError(f"{at}: model_type={model_type!r}, expected {LAYOUTS[name].model_type!r} for --from {name}")
    if name == to:
        raise ConfigError(f"{source} is a {name} folder already; choose another layout with --to")
    if "difftransformer" not in (name, to):
        raise ConfigError(
            f"{source} is a {name} folder, which converts to difftransformer alone; choose that with --to"
        )
    return name


def _conversion(document: dict[str, Any], layout: str, to: str, source: Path, untie: bool) -> Conversion:
    at = source / CONFIG_FILE
    expected = [LAYOUTS[layout].architecture]
    architectures = document.get("architectures") or expected
    if architectures != expected:
        raise ConfigError(f"{at}: architectures={architectures}, expected {expected}, a causal language model")
    if document.get("quantization_config") is not None:
        raise ConfigError(f"{at}: quantization_config is set, expected none; convert the model before it is quantized")
    with naming_config(at, layout):
        if layout == "diffllama":
            return from_diffllama(DiffLlamaConfig.from_dict(document))
        if layout == "llama":
            theirs = LlamaConfig.from_dict(document)
            for field, value in beyond_layout(theirs).items():
                raise ConfigError(f"{field}={value!r}: models of this package have {MUST_BE[field]!r}; use upcycle")
            return from_llama(theirs, to=SoftmaxAttention.name)
        make = {"diffllama": to_diffllama, "llama": to_llama}[to]
        return make(DiffTransformerConfig.from_dict(document), untie=untie)


@contextmanager
def naming_config(at: Path, kind: str) -> Iterator[None]:
    """Turn any error that a configuration causes into a ConfigError that names its file.

    Args:
        at: The config.json.
        kind: Kind of model that it should describe.
    """
    try:
        yield
    except DiffTransformerError as error:
        raise ConfigError(f"{at}: {error}") from None
    except FOREIGN_FAULTS as error:
        raise ConfigError(f"{at} describes no {kind} model ({on_one_line(error)})") from error


def _check_ties(conversion: Conversion, weights: WeightsReader) -> None:
    for name, same in conversion.ties.items():
        if name in weights.shapes and not torch.equal(weights.read(name), weights.read(same)):
            raise CheckpointError(
                f"{weights.folder}: {name} differs from {same}, though config.json has tie_word_embeddings=true; expected "
                "equal tensors, or tie_word_embeddings=false"
            )

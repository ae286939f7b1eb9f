"""Checkpoints: a model folder that transformers opens, together with the state that resuming needs.

runs/NAME/checkpoints/step-000500/
    config.json, model.safetensors, tokenizer files    Hugging Face model folder
    trained.safetensors                                adapters of a run with training.lora, which the model has merged
    optimizer.safetensors                              moments of the optimizer and states of the random generators
    state.json                                         step, loader, size and SHA-256 of every other file

Each of several processes writes files of its own, such as model-00001-of-00002.safetensors: whole weights, as Hugging Face
divides them, and its parts of the moments. Any number of processes reads them.

A checkpoint is written under another name, flushed to disk and renamed, and renamed again before it is deleted, so a folder
called step-* was once complete. The sizes and sums in state.json reveal later damage, such as a truncated copy.
"""

import hashlib
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..model import DiffTransformerForCausalLM
from ..model.weights import ADAPTER_CONFIG_FILE
from ..reading import is_plain_name, read_json
from ..sources import find_model
from ..typed import build
from .lora import adapter_state, has_lora
from .parallel import ALONE, Processes
from .tensor_files import TensorFiles, is_part

STATE_FILE = "state.json"
STATE_VERSION = 1
WEIGHTS, ADAPTERS, MOMENTS = "model", "trained", "optimizer"  # names of files, without .safetensors
AVERAGE = "average"  # of a parameter over steps
MOMENTS_OF = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer", AVERAGE)  # of a parameter
RANDOM = "random/"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """State of a run beside weights and moments.

    Attributes:
        step: Number of finished steps.
        tokens: Number of tokens trained on.
        seconds: Time spent in training steps.
        loader: State of the loader.
        norms: Gradient norms that the next ones are compared with.
        callbacks: State of callbacks from outside this package, by name.
    """

    step: int
    tokens: int
    seconds: float
    loader: dict[str, Any]
    norms: list[float] = field(default_factory=list)
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StateFile(CheckpointState):
    """Contents of state.json."""

    version: int
    files: dict[str, dict[str, Any]]


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def folder_of_step(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / "checkpoints" / f"step-{step:06d}"


def newest_intact(run: Path) -> tuple[Path, StateFile] | None:
    """Return a run's newest checkpoint whose files are intact, and its state; None for a run without checkpoints.

    A warning names the damaged file of each newer checkpoint.

    Raises:
        CheckpointError: There are checkpoints, and none is intact; or the newest is of another release.
    """
    damaged: list[_Damage] = []
    for path in reversed(checkpoints(run)):
        try:
            state = _verified(path)
        except _Damage as damage:
            damaged.append(damage)
            continue
        for fault in damaged:
            warnings.warn(f"{fault}; training continues from {path.name}", stacklevel=2)
        return path, state
    if damaged:
        raise CheckpointError(
            f"{damaged[0]}; no intact checkpoint exists; delete {run / 'checkpoints'} and run again from the start"
        )
    return None


def latest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run folder, or the folder itself if it is a checkpoint or a model folder.

    The name of a shipped model stands for its folder.

    Raises:
        CheckpointError: There is no checkpoint, or an adapter alone.
    """
    run = find_model(run)
    if (run / "config.json").is_file():
        return run
    saved = checkpoints(run)
    if not saved and (run / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{run} holds an adapter without its model; merge them (merge_and_unload of PEFT) and save_pretrained the result"
        )
    if not saved:
        raise CheckpointError(f"{run}: no checkpoint here; name a run with checkpoints/step-*, or a model folder")
    return saved[-1]


def load_checkpoint(
    path: Path,
    *,
    model: DiffTransformerForCausalLM,
    optimizer: torch.optim.Optimizer,
    processes: Processes = ALONE,
    state: "StateFile | None" = None,
) -> CheckpointState:
    """Restore weights, moments and random state from a checkpoint of any mesh. Each process reads its part alone.

    Args:
        path: The checkpoint.
        model: Model of the checkpoint's configuration.
        optimizer: Optimizer of the model's parameters.
        processes: This process and the others of the run.
        state: The checkpoint's state, if its files have been verified; None verifies them.

    Returns:
        The checkpoint's state.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model. The message names the file and what to do.
    """
    verified = state or processes.broadcast(lambda: verify_checkpoint(path))
    with processes.fail_together():
        adapted = has_lora(model)
        weights = _files(path, verified, ADAPTERS if adapted else WEIGHTS)
        held = adapter_state(model) if adapted else model.state_dict()
        own = {name: tuple(tensor.shape) for name, tensor in held.items()}
        expected = {
            name: shape
            for name, shape in own.items()
            if name in weights.shapes or name not in model.all_tied_weights_keys
        }
        if different := sorted(n for n in weights.shapes | expected if weights.shapes.get(n) != expected.get(n)):
            name = different[0]
            raise CheckpointError(
                f"{weights}: weights of another model ({name} has shape {weights.shapes.get(name)} in the file and "
                f"{expected.get(name)} in the model); train in another folder"
            )
        weights.read({name: held[name] for name in expected})
        _restore_optimizer(_files(path, verified, MOMENTS), model, optimizer)
    return verified


def read_average(path: Path, model: DiffTransformerForCausalLM) -> None:
    """Replace the weights of a checkpoint's model by their average over steps (`TrainingConfig.ema`).

    Raises:
        CheckpointError: The checkpoint is damaged, or has no average.
    """
    is_checkpoint = (path / STATE_FILE).is_file()  # and not the folder of a saved model
    files = _files(path, verify_checkpoint(path), MOMENTS) if is_checkpoint else None
    averages = {f"{AVERAGE}/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    if files is None or not averages.keys() <= files.shapes.keys():
        raise CheckpointError(f"{path}: it has no average of the weights; train with training.ema, such as 0.999")
    files.read(averages)


def verify_checkpoint(path: Path) -> StateFile:
    """Check every file of a checkpoint against state.json, and return the state.

    Raises:
        CheckpointError: A file is missing, truncated or changed.
    """
    try:
        return _verified(path)
    except _Damage as damage:
        raise CheckpointError(f"{damage}; {_way_out(path)}") from None


class _Damage(CheckpointError):
    """What is wrong with a file of a checkpoint."""


def _verified(path: Path) -> StateFile:
    """Return a checkpoint's state.

    Raises:
        _Damage: A file is missing, truncated or changed.
        CheckpointError: The checkpoint is of another release.
    """
    file = path / STATE_FILE
    content = read_json(file, error=_Damage, advice="every checkpoint has one")
    if not isinstance(content, dict) or "version" not in content:
        raise _Damage(f"{file}: damaged (it has no version)")
    if (version := content["version"]) != STATE_VERSION:
        raise CheckpointError(
            f"{file}: version {version!r}, this release reads {STATE_VERSION}; use the release that wrote it, or "
            f"{_way_out(path)}"
        )
    content.pop("sha256", None)  # its own sum, in checkpoints of earlier releases
    state = build(StateFile, content, source=str(file), error=_Damage)
    for name in state.files:
        if not is_plain_name(name) or not (path / name).is_file():
            raise _Damage(f"{path / name}: missing")
    with ThreadPoolExecutor() as threads:
        sums = threads.map(file_sum, [path / name for name in state.files])
        for (name, expected), now in zip(state.files.items(), sums, strict=True):
            if now != expected:
                raise _Damage(f"{path / name}: damaged (found {now}, expected {expected})")
    return state


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, which counts as one until nothing of it is deleted yet."""
    leftover = checkpoint.with_name(f".{checkpoint.name}.deleted.tmp")
    shutil.rmtree(leftover, ignore_errors=True)
    checkpoint.rename(leftover)
    shutil.rmtree(leftover)


def is_of_training(name: str) -> bool:
    """Whether a file of a checkpoint is read by training alone: its state, moments and adapters."""
    return name == STATE_FILE or is_part(name, MOMENTS) or is_part(name, ADAPTERS)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))


def _way_out(path: Path) -> str:
    run = path.parent.parent
    older = [other for other in checkpoints(run) if _NAME.fullmatch(path.name) and step_of(other) < step_of(path)]
    if older:
        return f"delete {path} and run again to continue from {older[-1].name}, which is kept"
    return f"delete {path} and run again from the start; no earlier checkpoint exists"


def _files(path: Path, state: StateFile, stem: str) -> TensorFiles:
    return TensorFiles([path / name for name in state.files if is_part(name, stem)], name=path / f"{stem}.safetensors")


def _restore_optimizer(
    moments: TensorFiles, model: DiffTransformerForCausalLM, optimizer: torch.optim.Optimizer
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for moment in MOMENTS_OF:
            if (shape := moments.shapes.get(f"{moment}/{name}")) is not None:
                like = torch.empty_like(parameter, requires_grad=False)
                # The step count of a parameter is a single number, which is not divided.
                tensors[f"{moment}/{name}"] = like if shape else torch.empty((), device=parameter.device)
        optimizer.state[parameter] = {m: tensors[f"{m}/{name}"] for m in MOMENTS_OF if f"{m}/{name}" in tensors}
    random = random_states()
    if not random.keys() <= moments.shapes.keys():  # another number of GPUs
        random = {f"{RANDOM}cpu": random[f"{RANDOM}cpu"]}
    moments.read(tensors | random)
    torch.set_rng_state(random.pop(f"{RANDOM}cpu"))
    if random:
        torch.cuda.set_rng_state_all([*random.values()])


def random_states() -> dict[str, Tensor]:
    """Return the states of the random generators of this process."""
    states = {f"{RANDOM}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"{RANDOM}cuda/{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def file_sum(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

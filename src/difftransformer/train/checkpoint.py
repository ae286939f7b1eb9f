"""Checkpoints: a model folder that transformers opens, together with the state that resuming needs.

runs/NAME/checkpoints/step-000500/
    config.json, model.safetensors, tokenizer files    Hugging Face model folder
    trained.safetensors                                adapters of a run with training.lora, which the model has merged
    optimizer.safetensors                              moments of the optimizer and states of the random generators
    state.json                                         step, loader, size and SHA-256 of every other file and of itself

A checkpoint is written under another name, flushed to disk and renamed, and renamed again before it is deleted, so a folder
called step-* was once complete. The sizes and sums in state.json reveal later damage, such as a truncated copy.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..data import Tokenizer
from ..errors import CheckpointError, DataError
from ..files import naming
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.card import CARD_FILE, model_card
from ..model.quiet import quietly
from ..reading import is_plain_name, read_json
from ..typed import build
from .lora import adapter_state, has_lora, merged_state
from .parallel import ALONE, Processes
from .parallel.weights import part_like, whole
from .run_summary import training_summary

STATE_FILE = "state.json"
STATE_VERSION = 1
OPTIMIZER_FILE = "optimizer.safetensors"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "trained.safetensors"
MAKE_ROOM = "; make room and run again"
MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """State of a run beside weights and moments.

    Attributes:
        step: Number of finished steps.
        tokens: Number of tokens trained on.
        seconds: Time spent in training steps.
        loader: State of the loader.
    """

    step: int
    tokens: int
    seconds: float
    loader: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _StateFile(CheckpointState):
    """Contents of state.json."""

    version: int
    files: dict[str, dict[str, Any]]


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step)


def newest_intact(run: Path) -> tuple[Path, CheckpointState] | None:
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

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if (run / "config.json").is_file():
        return run
    found = checkpoints(run)
    if not found:
        raise CheckpointError(f"{run}: no checkpoint here; name a run with checkpoints/step-*, or a model folder")
    return found[-1]


def save_checkpoint(
    run: Path,
    state: CheckpointState,
    *,
    model: DiffTransformerForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    keep: int,
    keeps_step: Callable[[int], bool] = lambda step: False,
    processes: Processes = ALONE,
) -> Path:
    """Write a checkpoint atomically, then delete all but the `keep` newest and those whose step `keeps_step` names.

    Every process takes part, and the first one writes. The files do not depend on how weights are divided.

    Raises:
        CheckpointError: The checkpoint cannot be written, for example because the disk is full. Older checkpoints are kept,
            and the message names the newest.
    """
    moments = _whole_tensors(_optimizer_tensors(model, optimizer), keep=processes.is_first)
    adapters = _whole_tensors(adapter_state(model), keep=processes.is_first) if has_lora(model) else None
    weights = None if adapters is None else merged_state(model)
    if processes.count > 1:
        state_dict = model.state_dict() if weights is None else weights
        untied = {name: tensor for name, tensor in state_dict.items() if name not in model.all_tied_weights_keys}
        weights = _whole_tensors(untied, keep=processes.is_first)

    def write() -> Path:
        written = _write(run, state, model, tokenizer, weights=weights, adapters=adapters, moments=moments)
        for old in checkpoints(run)[:-keep]:
            if not keeps_step(_step(old)):
                _delete(old)
        return written

    return processes.from_first(write)


def _write(
    run: Path,
    state: CheckpointState,
    model: DiffTransformerForCausalLM,
    tokenizer: Tokenizer,
    *,
    weights: dict[str, Tensor] | None,
    adapters: dict[str, Tensor] | None,
    moments: dict[str, Tensor],
) -> Path:
    """Write the files of `save_checkpoint`. `weights` are the model's own if they are None."""
    folder = run / "checkpoints"
    final = folder / f"step-{state.step:06d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        with naming(temporary):
            with quietly():
                model.save_pretrained(temporary, state_dict=weights)
            if adapters is not None:
                with naming(temporary / ADAPTER_FILE):
                    save_file(adapters, temporary / ADAPTER_FILE)
            tokenizer.save(temporary)
            if isinstance(model.config, DiffTransformerConfig):
                card = model_card(model.config, name=run.resolve().name, training=training_summary(run, state.step))
                (temporary / CARD_FILE).write_text(card, "utf-8")
            with naming(temporary / OPTIMIZER_FILE):
                save_file(moments, temporary / OPTIMIZER_FILE)
            # The sums leave out the card, which users may edit.
            summed = [path for path in sorted(temporary.iterdir()) if path.is_file() and path.name != CARD_FILE]
            files = {path.name: _file_sum(path) for path in summed}
            content = dataclasses.asdict(_StateFile(**vars(state), version=STATE_VERSION, files=files))
            content["sha256"] = _content_sha256(content)
            (temporary / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            for path in [*temporary.iterdir(), temporary]:
                with naming(path):
                    _flush(path)
        if final.exists():
            _delete(final)
        temporary.rename(final)
        _flush(folder)
    except (OSError, SafetensorError, DataError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        complete = [path for path in checkpoints(run) if path != final]
        kept = f"{complete[-1]} is kept and complete" if complete else "no earlier checkpoint exists"
        cause = error.__cause__ if isinstance(error, DataError) else error
        reason = str(error)
        if isinstance(cause, OSError) and cause.strerror:
            reason = f"{Path(cause.filename or final).name}: {cause.strerror}"
        raise CheckpointError(
            f"{final}: the checkpoint of step {state.step} cannot be written ({reason}); {kept}{MAKE_ROOM}"
        ) from None
    return final


def load_checkpoint(
    path: Path,
    *,
    model: DiffTransformerForCausalLM,
    optimizer: torch.optim.Optimizer,
    processes: Processes = ALONE,
    state: CheckpointState | None = None,
) -> CheckpointState:
    """Restore weights, moments and random state from a checkpoint, each process its part of them.

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
    verified = state or processes.from_first(lambda: verify_checkpoint(path))
    with processes.together():
        adapted = has_lora(model)
        file = path / (ADAPTER_FILE if adapted else WEIGHTS_FILE)
        weights = load_file(file) if file.exists() else {}
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        held = adapter_state(model) if adapted else model.state_dict()
        own = {name: tuple(tensor.shape) for name, tensor in held.items()}
        expected = {
            name: shape for name, shape in own.items() if name in shapes or name not in model.all_tied_weights_keys
        }
        if different := sorted(name for name in shapes | expected if shapes.get(name) != expected.get(name)):
            name = different[0]
            raise CheckpointError(
                f"{file}: weights of another model ({name} has shape {shapes.get(name)} in the file and "
                f"{expected.get(name)} in the model); train in another folder"
            )
        moments = load_file(path / OPTIMIZER_FILE)
    parts = {name: part_like(tensor, held[name]) for name, tensor in weights.items()}
    model.load_state_dict(parts, strict=False)
    _restore_optimizer(moments, model, optimizer)
    return verified


def verify_checkpoint(path: Path) -> CheckpointState:
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


def _verified(path: Path) -> CheckpointState:
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
    # state.json has no other file to vouch for it. Early checkpoints lack the sum.
    expected_sum = content.pop("sha256", None)
    if expected_sum not in (None, _content_sha256(content)):
        raise _Damage(f"{file}: damaged (its sha256 is another)")
    state = build(_StateFile, content, source=str(file), error=_Damage)
    for name, expected in state.files.items():
        file = path / name
        if not is_plain_name(name) or not file.is_file():
            raise _Damage(f"{file}: missing")
        found = _file_sum(file)
        if found != expected:
            raise _Damage(f"{file}: damaged (found {found}, expected {expected})")
    return state


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint, which counts as one until nothing of it is deleted yet."""
    leftover = checkpoint.with_name(f".{checkpoint.name}.deleted.tmp")
    shutil.rmtree(leftover, ignore_errors=True)
    checkpoint.rename(leftover)
    shutil.rmtree(leftover)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _content_sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _way_out(path: Path) -> str:
    run = path.parent.parent
    older = [other for other in checkpoints(run) if _NAME.fullmatch(path.name) and _step(other) < _step(path)]
    if older:
        return f"delete {path} and run again to continue from {older[-1].name}, which is kept"
    return f"delete {path} and run again from the start; no earlier checkpoint exists"


def _optimizer_tensors(model: DiffTransformerForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"random/cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    for name, parameter in model.named_parameters():
        tensors |= {
            f"{moment}/{name}": value
            for moment, value in optimizer.state.get(parameter, {}).items()
            if moment in MOMENTS
        }
    return tensors


def _restore_optimizer(
    tensors: dict[str, Tensor], model: DiffTransformerForCausalLM, optimizer: torch.optim.Optimizer
) -> None:
    torch.set_rng_state(tensors["random/cpu"])
    cuda = [tensors[name] for name in sorted(tensors) if name.startswith("random/cuda/")]
    if torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            moment: part_like(tensors[f"{moment}/{name}"], parameter)
            for moment in MOMENTS
            if f"{moment}/{name}" in tensors
        }


def _whole_tensors(tensors: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return all of every tensor, of which processes may hold parts; nothing in processes that do not keep them."""
    kept = {}
    for name, tensor in tensors.items():
        tensor = whole(tensor)
        if keep:
            kept[name] = tensor
    return kept


def _file_sum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

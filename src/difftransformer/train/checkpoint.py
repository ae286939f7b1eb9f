"""Checkpoints that are whole or not there: a folder that transformers opens, with what resuming needs beside it.

runs/NAME/checkpoints/step-000500/
    config.json, model.safetensors, tokenizer files      a Hugging Face model folder
    trained.safetensors                                   adapters, in a run with training.lora; the model above has them merged
    optimizer.safetensors                                 moments of AdamW, state of the random generators
    state.json                                            step, loader, size and sha256 of every other file and of itself

A checkpoint is written under another name, flushed to disk and renamed, so a folder called step-* was once whole. What
damages it later (a full disk elsewhere, a cut copy) is found by the sizes and sums in state.json.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..data import Tokenizer
from ..errors import CheckpointError, DataError
from ..model import DiffTransformerForCausalLM
from ..model.card import CARD_FILE, model_card
from ..model.quiet import quietly
from .lora import adapter_state, has_lora, merged_state
from .record import recorded_training

STATE_FILE = "state.json"
STATE_VERSION = 1
OPTIMIZER_FILE = "optimizer.safetensors"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "trained.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """What a checkpoint holds beside weights and moments.

    Attributes:
        step: Steps done.
        tokens: Tokens trained on.
        seconds: Time spent in training steps.
        loader: The loader's position.
    """

    step: int
    tokens: int
    seconds: float
    loader: dict[str, Any]


def checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step)


def latest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run folder, or the folder itself if it is a checkpoint or a model folder.

    Raises:
        CheckpointError: there is none.
    """
    if (run / "config.json").is_file():
        return run
    found = checkpoints(run)
    if not found:
        raise CheckpointError(
            f"{run}: no checkpoint here; name a run folder with checkpoints/step-*, or a model folder"
        )
    return found[-1]


def save_checkpoint(
    run: Path,
    state: CheckpointState,
    *,
    model: DiffTransformerForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    keep: int,
) -> Path:
    """Write a checkpoint whole, then drop all but the `keep` newest.

    Raises:
        CheckpointError: it cannot be written (a full disk, say); older checkpoints stay, and the message names the newest.
    """
    folder = run / "checkpoints"
    final = folder / f"step-{state.step:06d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        with quietly():
            model.save_pretrained(temporary, state_dict=merged_state(model) if has_lora(model) else None)
        if has_lora(model):
            save_file(adapter_state(model), temporary / ADAPTER_FILE)
        tokenizer.save(temporary)
        training = recorded_training(run, state.step)
        (temporary / CARD_FILE).write_text(
            model_card(model.config, name=run.resolve().name, training=training), "utf-8"
        )
        save_file(_optimizer_tensors(model, optimizer), temporary / OPTIMIZER_FILE)
        # The card is left out: who edits it damages nothing.
        files = {
            path.name: _fingerprint(path)
            for path in sorted(temporary.iterdir())
            if path.is_file() and path.name != CARD_FILE
        }
        document = {
            "version": STATE_VERSION,
            "step": state.step,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "loader": state.loader,
            "files": files,
        }
        document["sha256"] = _seal(document)
        (temporary / STATE_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(folder)
    except (OSError, SafetensorError, DataError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        whole = [path for path in checkpoints(run) if path != final]
        kept = f"{whole[-1]} is kept and whole" if whole else "no earlier checkpoint exists"
        cause = error.__cause__ if isinstance(error, DataError) else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
        raise CheckpointError(
            f"{final}: the checkpoint of step {state.step} cannot be written ({reason}); {kept}; make room and run again"
        ) from None
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(
    path: Path, *, model: DiffTransformerForCausalLM, optimizer: torch.optim.Optimizer
) -> CheckpointState:
    """Put a checkpoint's weights, moments and random state back.

    Raises:
        CheckpointError: it is damaged or of another model; the message names the file and the newest whole checkpoint.
    """
    document = verify_checkpoint(path)
    adapted = has_lora(model)
    file = path / (ADAPTER_FILE if adapted else WEIGHTS_FILE)
    weights = load_file(file) if file.exists() else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    held = adapter_state(model) if adapted else model.state_dict()
    own = {name: tuple(tensor.shape) for name, tensor in held.items()}
    expected = {name: shape for name, shape in own.items() if name in shapes or name not in model.all_tied_weights_keys}
    if different := sorted(name for name in shapes | expected if shapes.get(name) != expected.get(name)):
        name = different[0]
        raise CheckpointError(
            f"{file}: weights of another model ({name} has shape {shapes.get(name)} in the file and "
            f"{expected.get(name)} in the model); train in another folder"
        )
    model.load_state_dict(weights, strict=False)
    _restore_optimizer(load_file(path / OPTIMIZER_FILE), model, optimizer)
    return CheckpointState(**{name: document[name] for name in ("step", "tokens", "seconds", "loader")})


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against state.json, and return that.

    Raises:
        CheckpointError: a file is missing, cut off or changed.
    """
    try:
        document = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / STATE_FILE}: unreadable ({error}); {_way_out(path)}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path / STATE_FILE}: damaged (no mapping); {_way_out(path)}")
    if document.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"{path / STATE_FILE}: version {document.get('version')!r}, this release reads {STATE_VERSION}; "
            f"use the release that wrote it, or {_way_out(path)}"
        )
    seal = document.pop("sha256", None)
    if seal is not None and seal != _seal(document):
        raise CheckpointError(f"{path / STATE_FILE}: damaged (its sha256 is another); {_way_out(path)}")
    if not document.keys() >= {"step", "tokens", "seconds", "loader"} or not isinstance(document.get("files"), dict):
        raise CheckpointError(f"{path / STATE_FILE}: damaged (keys are missing); {_way_out(path)}")
    for name, expected in document["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; {_way_out(path)}")
        found = _fingerprint(file)
        if found != expected:
            what = "bytes" if found["bytes"] != expected["bytes"] else "sha256"
            raise CheckpointError(
                f"{file}: damaged ({what} {found[what]}, expected {expected[what]}); {_way_out(path)}"
            )
    return document


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _seal(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _way_out(path: Path) -> str:
    run = path.parent.parent
    older = [other for other in checkpoints(run) if _NAME.fullmatch(path.name) and _step(other) < _step(path)]
    if older:
        return f"delete {path} and run again to go on from {older[-1].name}, which is kept"
    return f"delete {path} and run again from the start; no earlier checkpoint exists"


def _optimizer_tensors(model: DiffTransformerForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"random/cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    for name, parameter in model.named_parameters():
        tensors |= {
            f"{moment}/{name}": value.contiguous()
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
        state = {moment: tensors[f"{moment}/{name}"] for moment in MOMENTS if f"{moment}/{name}" in tensors}
        optimizer.state[parameter] = {
            moment: value.to(parameter.device) if moment != "step" or parameter.is_cuda else value
            for moment, value in state.items()
        }


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Write the checkpoints of a run in a thread, whose end training waits for, or not, and for a limited time."""

import copy
import dataclasses
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import TIMEOUT_MAX, Thread

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..data import Tokenizer
from ..errors import CheckpointError, DataError, FailedElsewhere
from ..files import naming
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.card import CARD_FILE, model_card
from ..model.transformers_errors import quietly
from ..model.weights import INDEX_FILE
from .checkpoint import (
    ADAPTERS,
    MOMENTS,
    MOMENTS_OF,
    STATE_FILE,
    STATE_VERSION,
    WEIGHTS,
    CheckpointState,
    StateFile,
    checkpoints,
    content_sha256,
    delete_checkpoint,
    file_sum,
    folder_of_step,
    random_states,
    step_of,
)
from .config import TrainingConfig
from .lora import adapter_state, has_lora, merged_state
from .parallel import ALONE, Processes
from .run_summary import training_summary
from .tensor_files import on_cpu, own_share, part_name, write_parts

MAKE_ROOM = "; make room and run again"


class Saver:
    """Writes a run's checkpoints atomically, one at a time, and deletes those that the configuration does not keep.

    Every process takes part in each call, and calls them in the same order.

    Args:
        run: Folder of the run.
        model: The model.
        optimizer: Its optimizer.
        tokenizer: Its tokenizer.
        config: Says how to save, and which checkpoints to keep.
        processes: This process and the others of the run.
    """

    def __init__(
        self,
        run: Path,
        *,
        model: DiffTransformerForCausalLM,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        config: TrainingConfig,
        processes: Processes = ALONE,
    ) -> None:
        self._run, self._model, self._optimizer, self._tokenizer = run, model, optimizer, tokenizer
        self._config, self._processes = config, processes
        self._writing: _Writing | None = None
        self._last: _Writing | None = None

    def save(self, state: CheckpointState) -> Path:
        """Write a checkpoint, and return its folder.

        Raises:
            CheckpointError: It cannot be written, for example because the disk is full, or not in time. Older checkpoints are
                kept, and the message names the newest.
            FailedElsewhere: The same, in all processes but the first.
        """
        self.wait()
        self._start(state)
        self._finish()
        return folder_of_step(self._run, state.step)

    def save_if_possible(self, state: CheckpointState) -> None:
        """Write a checkpoint, or start to write it if saving is asynchronous. A fault is a warning, as in `wait`.

        Raises:
            CheckpointError: As `wait`.
            FailedElsewhere: As `wait`.
        """
        self.wait()
        self._if_possible(lambda: self._start(state))
        if not self._config.checkpoint.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the end of a save that has been started. A fault is a warning where another checkpoint exists.

        Raises:
            CheckpointError: No checkpoint exists.
            FailedElsewhere: The same, in all processes but the first.
        """
        self._if_possible(self._finish)

    def close(self) -> None:
        """Wait for the save that has been started, also if other processes are gone. A fault is a warning."""
        writing, self._writing = self._writing, None
        if writing is not None and (fault := writing.fault()) and self._processes.is_first:
            warnings.warn(fault, stacklevel=2)

    def _if_possible(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (CheckpointError, FailedElsewhere) as error:
            if not self._processes.from_first(lambda: checkpoints(self._run)):
                raise
            if self._processes.is_first:
                warnings.warn(f"{str(error).removesuffix(MAKE_ROOM)}; training goes on", stacklevel=2)

    def _start(self, state: CheckpointState) -> None:
        if self._processes.largest(self._last is not None and self._last.is_alive()):
            final = folder_of_step(self._run, state.step)
            self._processes.fail(
                CheckpointError(f"{final}: not written, as an earlier save has not ended; {_kept(final)}")
            )
        copies, processes = self._config.checkpoint.asynchronous, self._processes
        weights = merged_state(self._model) if has_lora(self._model) else self._model.state_dict()
        untied = {name: tensor for name, tensor in weights.items() if name not in self._model.all_tied_weights_keys}
        shares = {WEIGHTS: own_share(untied, processes, copy=copies)}
        if has_lora(self._model):
            shares[ADAPTERS] = own_share(adapter_state(self._model), processes, copy=copies)
        moments = on_cpu(_optimizer_tensors(self._model, self._optimizer, processes), copy=copies)
        writing = _Writing(self._run, state, self._model, self._tokenizer, self._config, processes, shares, moments)
        self._writing = self._last = writing
        writing.start()

    def _finish(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        fault, has_ended = self._processes.from_first(lambda: (writing.fault(), not writing.is_alive()))
        if has_ended:
            writing.join()
        if fault is not None:
            self._processes.fail(CheckpointError(fault))


class _Writing(Thread):
    """One save. Threads of all processes meet in a group of their own, while training uses the others.

    Args:
        shares: For weights and adapters, the whole tensors that this process writes, and the process of each name.
        moments: Parts of what the optimizer needs to go on.
    """

    def __init__(
        self,
        run: Path,
        state: CheckpointState,
        model: DiffTransformerForCausalLM,
        tokenizer: Tokenizer,
        config: TrainingConfig,
        processes: Processes,
        shares: dict[str, tuple[dict[str, Tensor], dict[str, int]]],
        moments: dict[str, Tensor],
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._run, self._state, self._tokenizer, self._config = run, state, tokenizer, config
        self._model, self._shares, self._moments = model, shares, moments
        self._members = processes.in_background()
        self._gpu = torch.cuda.current_device() if processes.device == "cuda" else None
        self._final = folder_of_step(run, state.step)
        self._temporary = self._final.with_name(f".{self._final.name}.tmp")
        self._begun, self._given_up = time.monotonic(), False
        self._error: BaseException | None = None

    def fault(self) -> str | None:
        """Return what is wrong with the save, when it has ended or its time is over."""
        most = self._config.checkpoint.timeout_seconds
        self.join(min(TIMEOUT_MAX, max(0.0, self._begun + most - time.monotonic())))
        if self.is_alive():
            # What is not whole yet must never count, because training goes on to change the tensors.
            self._given_up = True
            reason, advice = f"it has not ended after {most:g} s", "; see whether the disk answers"
        elif self._error is not None:
            reason, advice = _reason(self._error, self._final), MAKE_ROOM
        else:
            return None
        step, kept = self._state.step, _kept(self._final)
        return f"{self._final}: the checkpoint of step {step} cannot be written ({reason}); {kept}{advice}"

    def run(self) -> None:
        """Be the thread."""
        try:
            if self._gpu is not None:  # a new thread is on the first GPU, which belongs to another process
                torch.cuda.set_device(self._gpu)
            self._write()
        except BaseException as error:
            self._error = error
            if self._members.is_first:
                shutil.rmtree(self._temporary, ignore_errors=True)
        finally:
            self._shares, self._moments = {}, {}

    def _write(self) -> None:
        self._members.from_first(self._make_room)
        sums: dict[str, dict[str, object]] | str
        try:
            self._write_own_files()
            sums = self._flushed_sums()
        except Exception as error:  # the other processes wait for what follows
            sums = _reason(error, self._final)
        found = self._members.gathered(sums)
        if self._members.is_first:
            files: dict[str, dict[str, object]] = {}
            for one in found:
                if isinstance(one, str):
                    raise CheckpointError(one)
                files |= one
            self._publish(files)

    def _make_room(self) -> None:
        folder = self._temporary.parent
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        self._temporary.mkdir()

    def _write_own_files(self) -> None:
        folder, members = self._temporary, self._members
        tensors = {stem: share for stem, (share, _) in self._shares.items()}
        if members.count == 1:
            tensors[MOMENTS] = self._moments
        else:  # first, as all processes fail together here
            write_parts(folder, MOMENTS, self._moments, members)
        for stem, share in tensors.items():
            file = folder / part_name(stem, members.rank, members.count)
            if share:
                with naming(file):
                    save_file(share, file, metadata={"format": "pt"})
        if members.is_first:
            with naming(folder):
                self._write_small_files()

    def _write_small_files(self) -> None:
        folder, model = self._temporary, self._model
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # which FSDP2 puts before the name
        config.dtype = str(model.dtype).removeprefix("torch.")
        with quietly():
            config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        self._tokenizer.save(folder)
        if self._members.count > 1:
            owners = self._shares[WEIGHTS][1]
            names = {name: part_name(WEIGHTS, owner, self._members.count) for name, owner in owners.items()}
            (folder / INDEX_FILE).write_text(
                json.dumps({"metadata": {}, "weight_map": names}, indent=1) + "\n", "utf-8"
            )
        if isinstance(model.config, DiffTransformerConfig):
            training = training_summary(self._run, self._state.step)
            card = model_card(model.config, name=self._run.resolve().name, training=training)
            (folder / CARD_FILE).write_text(card, "utf-8")

    def _flushed_sums(self) -> dict[str, dict[str, object]]:
        """Flush the files of this process to disk, and return size and sum of each."""
        count, rank = self._members.count, self._members.rank
        own = {part_name(stem, rank, count) for stem in (WEIGHTS, ADAPTERS, MOMENTS)}
        if self._members.is_first:
            own |= {path.name for path in self._temporary.iterdir() if not path.name.endswith(".safetensors")}
        sums = {}
        for name in sorted(own):
            if (path := self._temporary / name).exists():
                with naming(path):
                    _flush(path)
                    sums[name] = file_sum(path)
        return sums

    def _publish(self, files: dict[str, dict[str, object]]) -> None:
        files.pop(CARD_FILE, None)  # which users may edit
        content = dataclasses.asdict(
            StateFile(**vars(self._state), version=STATE_VERSION, files=dict(sorted(files.items())))
        )
        content["sha256"] = content_sha256(content)
        with naming(self._temporary / STATE_FILE):
            (self._temporary / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            _flush(self._temporary / STATE_FILE)
        _flush(self._temporary)
        if self._given_up:
            raise CheckpointError("it was given up")
        if self._final.exists():
            delete_checkpoint(self._final)
        self._temporary.rename(self._final)
        _flush(self._final.parent)
        for old in checkpoints(self._run)[: -self._config.keep_checkpoints]:
            if not self._config.keeps_step(step_of(old)):
                delete_checkpoint(old)


def _optimizer_tensors(
    model: DiffTransformerForCausalLM, optimizer: torch.optim.Optimizer, processes: Processes
) -> dict[str, Tensor]:
    tensors = random_states() if processes.is_first else {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{moment}/{name}": state[moment] for moment in MOMENTS_OF if moment in state}
    return tensors


def _reason(error: BaseException, final: Path) -> str:
    cause = error.__cause__ if isinstance(error, DataError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return f"{Path(cause.filename or final).name}: {cause.strerror}"
    return str(error) or type(error).__name__


def _kept(final: Path) -> str:
    complete = [path for path in checkpoints(final.parent.parent) if path != final]
    return f"{complete[-1]} is kept and complete" if complete else "no earlier checkpoint exists"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Write the checkpoints of a run, in a thread or while training waits."""

import copy
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX, Thread
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
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
    delete_checkpoint,
    file_sum,
    folder_of_step,
    random_states,
    step_of,
)
from .config import TrainingConfig
from .lora import adapter_state, has_lora, merged_state
from .parallel import ALONE, Processes
from .parallel.processes import LONGEST_WAIT
from .run_summary import training_summary
from .tensor_files import on_cpu, own_share, part_name, write_parts

# For weights and adapters, the whole tensors that this process writes, and the process of each name.
Shares: TypeAlias = dict[str, tuple[dict[str, Tensor], dict[str, int]]]


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
        # The threads of all processes meet in a group of their own, while training uses the others.
        group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT) if processes.count > 1 else None
        self._threads = dataclasses.replace(processes, group=group)
        self._writing: tuple[Path, Future[None]] | None = None

    def save(self, state: CheckpointState) -> Path:
        """Write a checkpoint, and return its folder.

        Raises:
            CheckpointError: It cannot be written, for example because the disk is full, or not in time. Older checkpoints are
                kept, and the message names the newest.
            FailedElsewhere: The same, in all processes but the first.
        """
        self.wait()
        self._start(state)
        self._finish(needed=True)
        return folder_of_step(self._run, state.step)

    def save_if_possible(self, state: CheckpointState) -> None:
        """Write a checkpoint, or start to write it if saving is asynchronous. A fault is a warning, as in `wait`.

        Raises:
            CheckpointError: As `wait`.
            FailedElsewhere: As `wait`.
        """
        self.wait()
        self._start(state)
        if not self._config.checkpoint.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the end of a save that has been started. A fault is a warning where another checkpoint exists.

        Raises:
            CheckpointError: No checkpoint exists, or the save does not end in time.
            FailedElsewhere: The same, in all processes but the first.
        """
        self._finish(needed=False)

    def close(self) -> None:
        """Wait for the save that has been started, also if other processes are gone. A fault is a warning."""
        writing, self._writing = self._writing, None
        if writing is not None and (fault := self._fault(writing[1])) and self._processes.is_first:
            warnings.warn(_message(writing[0], fault[1]), stacklevel=2)

    def _start(self, state: CheckpointState) -> None:
        model, processes, copies = self._model, self._processes, self._config.checkpoint.asynchronous
        weights = merged_state(model) if has_lora(model) else model.state_dict()
        untied = {name: tensor for name, tensor in weights.items() if name not in model.all_tied_weights_keys}
        shares = {WEIGHTS: own_share(untied, processes, copy=copies)}
        if has_lora(model):
            shares[ADAPTERS] = own_share(adapter_state(model), processes, copy=copies)
        moments = on_cpu(_optimizer_tensors(model, self._optimizer, processes), copy=copies)
        gpu = torch.cuda.current_device() if processes.device == "cuda" else None
        write = partial(self._write, state, shares, moments, gpu)
        self._writing = folder_of_step(self._run, state.step), _in_background(write)

    def _finish(self, *, needed: bool) -> None:
        if self._writing is None:
            return
        (final, future), self._writing = self._writing, None
        faults = [fault for fault in self._processes.gathered(self._fault(future)) if fault is not None]
        if not faults:
            return
        is_late, reason = faults[0]
        message = _message(final, reason)
        if needed or is_late or not self._processes.broadcast(lambda: checkpoints(self._run)):
            advice = "see whether the disk answers" if is_late else "make room"
            self._processes.fail(CheckpointError(f"{message}; {advice} and run again"))
        if self._processes.is_first:
            warnings.warn(f"{message}; training goes on", stacklevel=2)

    def _fault(self, future: Future[None]) -> tuple[bool, str] | None:
        """Return whether a save is late, and what is wrong with it, when it has ended or its time is over."""
        most = self._config.checkpoint.timeout_seconds
        if not wait([future], min(TIMEOUT_MAX, most)).done:
            return True, f"it has not ended after {most:g} s"
        error = future.exception()
        if error is None or isinstance(error, FailedElsewhere):  # another process has the reason
            return None
        return False, _reason(error)

    def _write(self, state: CheckpointState, shares: Shares, moments: dict[str, Tensor], gpu: int | None) -> None:
        """Write a checkpoint. This is what the thread does."""
        if gpu is not None:  # a new thread is on the first GPU, which belongs to another process
            torch.cuda.set_device(gpu)
        final, threads = folder_of_step(self._run, state.step), self._threads
        temporary = final.with_name(f".{final.name}.tmp")
        try:
            threads.broadcast(lambda: _make_room(temporary))
            with threads.fail_together():
                self._write_files(temporary, state, shares, moments)
            with threads.fail_together():  # the first process lists the folder, when no other writes there
                sums = _flushed_sums(temporary, threads)
            files = {name: one for sums_of_one in threads.gathered(sums) for name, one in sums_of_one.items()}
            if threads.is_first:
                self._publish(temporary, final, state, files)
        except BaseException:
            if threads.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _write_files(self, folder: Path, state: CheckpointState, shares: Shares, moments: dict[str, Tensor]) -> None:
        """Write the files of this process."""
        threads, tensors = self._threads, {stem: share for stem, (share, _) in shares.items()}
        if threads.count == 1:
            tensors[MOMENTS] = moments
        else:  # first, as all processes fail together here
            write_parts(folder, MOMENTS, moments, threads)
        for stem, share in tensors.items():
            file = folder / part_name(stem, threads.rank, threads.count)
            if share:
                with naming(file):
                    save_file(share, file, metadata={"format": "pt"})
        if threads.is_first:
            with naming(folder):
                self._write_small_files(folder, state, shares[WEIGHTS][1])

    def _write_small_files(self, folder: Path, state: CheckpointState, owners: dict[str, int]) -> None:
        model, count = self._model, self._threads.count
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # which FSDP2 puts before the name
        config.dtype = str(model.dtype).removeprefix("torch.")
        with quietly():
            config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        self._tokenizer.save(folder)
        if count > 1:
            names = {name: part_name(WEIGHTS, owner, count) for name, owner in owners.items()}
            _write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": names})
        if isinstance(model.config, DiffTransformerConfig):
            training = training_summary(self._run, state.step)
            card = model_card(model.config, name=self._run.resolve().name, training=training)
            (folder / CARD_FILE).write_text(card, "utf-8")

    def _publish(self, temporary: Path, final: Path, state: CheckpointState, files: dict[str, dict[str, Any]]) -> None:
        """Write state.json, give the folder its name, and delete the checkpoints that are not kept."""
        files.pop(CARD_FILE, None)  # which users may edit
        content = StateFile(**vars(state), version=STATE_VERSION, files=dict(sorted(files.items())))
        _write_json(temporary / STATE_FILE, dataclasses.asdict(content))
        _flush(temporary / STATE_FILE)
        _flush(temporary)
        if final.exists():
            delete_checkpoint(final)
        temporary.rename(final)
        _flush(final.parent)
        for old in self._config.retired(map(step_of, checkpoints(self._run)), state.step):
            delete_checkpoint(folder_of_step(self._run, old))


def _in_background(act: Callable[[], None]) -> Future[None]:
    """Run a function in a thread that does not keep the process from ending, as that of an executor would."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            act()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _make_room(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(".step-*.tmp"):
        shutil.rmtree(leftover)
    folder.mkdir()


def _flushed_sums(folder: Path, processes: Processes) -> dict[str, dict[str, Any]]:
    """Flush the files of this process to disk, and return size and sum of each."""
    own = {part_name(stem, processes.rank, processes.count) for stem in (WEIGHTS, ADAPTERS, MOMENTS)}
    if processes.is_first:
        own |= {path.name for path in folder.iterdir() if not path.name.endswith(".safetensors")}
    sums = {}
    for name in sorted(own):
        if (path := folder / name).exists():
            _flush(path)
            sums[name] = file_sum(path)
    return sums


def _optimizer_tensors(
    model: DiffTransformerForCausalLM, optimizer: torch.optim.Optimizer, processes: Processes
) -> dict[str, Tensor]:
    tensors = random_states() if processes.is_first else {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{moment}/{name}": state[moment] for moment in MOMENTS_OF if moment in state}
    return tensors


def _message(final: Path, reason: str) -> str:
    complete = [path for path in checkpoints(final.parent.parent) if path != final]
    kept = f"{complete[-1]} is kept and complete" if complete else "no earlier checkpoint exists"
    return f"{final}: the checkpoint of step {step_of(final)} cannot be written ({reason}); {kept}"


def _reason(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, DataError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return f"{Path(cause.filename).name}: {cause.strerror}" if cause.filename else cause.strerror
    return str(error) or type(error).__name__


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with naming(path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

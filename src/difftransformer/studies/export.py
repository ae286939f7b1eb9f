"""A run or a saved model as a clean Hugging Face folder: weights, configuration, tokenizer, and a card with the figures."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from ..convert import convert_folder
from ..convert.checkpoint_io import (
    CARRIED,
    CONFIG_FILE,
    INDEX_FILE,
    SHARD_BYTES,
    WeightsReader,
    refuse_used,
    whole_or_not_at_all,
    write_weights,
)
from ..errors import CheckpointError, ConfigError, ResultsError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.card import CARD_FILE, Training, is_ours, model_card, training_section
from ..model.progress import without_progress_bars
from ..results import Evaluation, read_result
from ..train import latest_checkpoint, verify_checkpoint
from ..train.checkpoint import STATE_FILE
from ..train.run_summary import training_summary
from .figures import evaluation_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        folder: Where.
        source: The checkpoint or folder that was read.
        layout: difftransformer or diffllama.
        bytes: Of all files.
        files: Names in the folder.
        kept_card: Whether the card is the source's own, changed by a person.
        notes: What the target has no place for.
    """

    folder: Path
    source: Path
    layout: str
    bytes: int
    files: tuple[str, ...]
    kept_card: bool
    notes: tuple[str, ...]


def export_folder(
    source: Path | str,
    target: Path | str,
    *,
    dtype: Literal["auto", "fp32", "bf16"] = "auto",
    to: Literal["difftransformer", "diffllama"] = "difftransformer",
    license: str | None = None,
) -> Exported:
    """Write a model's folder as it should be handed on, whole or not at all.

    Args:
        source: Run folder (its newest checkpoint), checkpoint, or saved model folder of this package.
        target: The folder to make. It may exist if it is empty.
        dtype: Of the weights; auto keeps what they were saved in.
        to: Layout; diffllama opens in stock transformers.
        license: For the card, if it is known.

    Raises:
        ConfigError: the target is in use, an option is unknown, or the layout cannot express the model.
        CheckpointError: the source is missing, damaged, or of another model type.
    """
    target = Path(target)
    for option, value, allowed in (
        ("dtype", dtype, ("auto", *DTYPES)),
        ("to", to, ("difftransformer", "diffllama")),
    ):
        if value not in allowed:
            raise ConfigError(f"{option}={value!r}: choose one of {', '.join(allowed)}")
    refuse_used(target)
    if not Path(source).is_dir():
        raise CheckpointError(f"{source}: no such folder; name a run folder or the folder of a saved model")
    folder = latest_checkpoint(Path(source))
    model = _whole_model(folder)
    title = target.resolve().name
    card = model_card(model.config, name=title, training=_training(folder), license=license, stock=to == "diffllama")
    notes: tuple[str, ...] = ()
    with whole_or_not_at_all(target) as out:
        if to == "difftransformer":
            _write(model, out, folder, dtype)
        else:
            between = out / ".difftransformer"
            between.mkdir()
            _write(model, between, folder, "auto")
            notes = convert_folder(between, out / ".diffllama", to="diffllama").notes
            shutil.rmtree(between)
            for path in (out / ".diffllama").iterdir():
                path.rename(out / path.name)
            (out / ".diffllama").rmdir()
            if dtype != "auto":
                _cast(out, dtype)
        theirs = _card_of_a_person(folder)
        (out / CARD_FILE).write_text(card if theirs is None else theirs, encoding="utf-8")
        files = sorted(path for path in out.rglob("*") if path.is_file())
        names, size = tuple(str(path.relative_to(out)) for path in files), sum(path.stat().st_size for path in files)
    return Exported(
        folder=target, source=folder, layout=to, bytes=size, files=names, kept_card=theirs is not None, notes=notes
    )


def _whole_model(folder: Path) -> DiffTransformerForCausalLM:
    """A model all of whose weights are in the folder, in the dtype that they were saved in."""
    if (folder / STATE_FILE).exists():
        verify_checkpoint(folder)
    try:
        document = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        model_type = document.get("model_type")
        if model_type != DiffTransformerConfig.model_type:
            raise ValueError(f"its model_type is {model_type!r}, not {DiffTransformerConfig.model_type!r}")
        if document.get("quantization_config") is not None:
            raise ValueError("it is quantized; export the model as it was before")
        with WeightsReader(folder), without_progress_bars():  # refuses pickles and files cut short, by name
            model, found = DiffTransformerForCausalLM.from_pretrained(
                folder, dtype="auto", local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be opened as a model ({str(error).splitlines()[0]})") from None
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[what]:
            name = min(map(str, found[what]))
            raise CheckpointError(f"{folder}: {what.removesuffix('_keys')} weight {name}; save the model again")
    return model


def _write(model: DiffTransformerForCausalLM, out: Path, source: Path, dtype: str) -> None:
    """Weights, configuration and settings of generation, and the source's tokenizer and licence as they are."""
    if dtype != "auto":
        for name, parameter in model.named_parameters():
            if not any(kept in name for kept in model._keep_in_fp32_modules_strict):
                parameter.data = parameter.data.to(DTYPES[dtype])
    with without_progress_bars():
        model.save_pretrained(out, max_shard_size=SHARD_BYTES)
    for path in sorted({path for pattern in CARRIED for path in source.glob(pattern)}):
        if path.name != GENERATION_FILE:
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, out / path.name)


def _cast(folder: Path, dtype: str) -> None:
    """Rewrite the weights of a folder in another dtype: once they are folded, so that they are rounded once."""
    with WeightsReader(folder) as weights:
        tensors = {name: weights.read(name).to(DTYPES[dtype]) for name in weights.shapes}
        files = weights.files
    for name in [*files, INDEX_FILE]:
        (folder / name).unlink(missing_ok=True)
    write_weights(folder, tensors.items(), SHARD_BYTES)
    document = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    document["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
    (folder / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _training(folder: Path) -> Training | str | None:
    """Recipe and figures: of the run that the checkpoint lies in, or what an earlier card of ours says."""
    if folder.parent.name == "checkpoints":
        run, step = folder.parent.parent, int(folder.name.removeprefix("step-"))
        recorded = training_summary(run, step)
        if recorded is not None:
            found = [result for path in (run / "evals").glob("*.json") if (result := _evaluation(path, folder.name))]
            newest = max(found, key=lambda result: result.created, default=None)
            rows = evaluation_rows(newest) if newest is not None else []
            return replace(recorded, figures=[*recorded.figures, *rows])
    path = folder / CARD_FILE
    return training_section(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None


def _evaluation(path: Path, checkpoint: str) -> Evaluation | None:
    try:
        result = read_result(path, Evaluation)
    except ResultsError:  # another kind of file, or of another release
        return None
    return result if Path(result.checkpoint).name == checkpoint else None


def _card_of_a_person(folder: Path) -> str | None:
    path = folder / CARD_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    return None if text is None or is_ours(text) else text

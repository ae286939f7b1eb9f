"""Export a run or a saved model to a clean Hugging Face folder: weights, configuration, tokenizer and model card."""

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import transformers

from ..attention import SoftmaxAttention
from ..errors import CheckpointError, ConfigError, DiffTransformerError, on_one_line
from ..families import DifferentialFamilyConfig, convert_folder
from ..families.checkpoint_io import (
    SHARD_BYTES,
    WeightsReader,
    carry,
    read_config,
    refuse_used,
    whole_or_not_at_all,
    write_weights,
)
from ..model import DiffTransformerConfig
from ..model.card import CARD_FILE, HEADS, Training, is_ours, model_card, read_card, training_section
from ..model.pretrained import DiffTransformerPreTrainedModel
from ..model.transformers_errors import FOREIGN_FAULTS, quietly
from ..model.weights import CONFIG_FILE, DTYPES, GENERATION_FILE, INDEX_FILE, refuse_adapter
from ..sources import find_model
from ..train import latest_checkpoint
from ..train.checkpoint import read_average
from ..train.run_summary import training_summary
from .code import check_code, write_code
from .opening import open_model

ExportDtype = Literal["auto", "fp32", "bf16"]
ExportLayout = Literal["difftransformer", "diffllama", "llama"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Summary of an export from `source` to `folder`, with its files and their size in bytes.

    Attributes:
        kept_card: Whether the card was copied from the source because it was edited by hand.
        notes: Properties of the model that the target layout cannot store.
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
    dtype: ExportDtype = "auto",
    to: ExportLayout = "difftransformer",
    license: str | None = None,
    with_code: bool = False,
    untie: bool = False,
    average: bool = False,
    figures: Sequence[tuple[str, str]] = (),
) -> Exported:
    """Write a model to a folder that is ready to be shared. If the export fails, nothing is written.

    Args:
        source: Run folder (its newest checkpoint), checkpoint, or folder of a saved model of this package.
        target: Folder to write. It must not exist, or be empty.
        dtype: Floating-point type of the weights. "auto" keeps the type that they were saved in.
        to: Layout. "diffllama", and "llama" for a softmax twin or DEX, open in stock transformers.
        license: Licence identifier for the card, such as "mit".
        with_code: Add code with which transformers opens the folder without this package (see `write_code`).
        untie: Whether a tied output layer becomes a matrix of its own, for a layout without an embedding multiplier.
        average: Write the average of a checkpoint's weights over steps (`training.ema`).
        figures: Names and values of evaluations, for the card of a run.

    Raises:
        ConfigError: The target is in use, an option is unknown, an adapter lies beside the weights, or the layout cannot
            express the model, as none but this package's can a differential model of another family.
        CheckpointError: The source is missing, damaged, or has another model type.
    """
    target = Path(target)
    for option, value, allowed in (("dtype", dtype, get_args(ExportDtype)), ("to", to, get_args(ExportLayout))):
        if value not in allowed:
            raise ConfigError(f"{option}={value!r}: choose one of {', '.join(allowed)}")
    if with_code and to != "difftransformer":
        raise ConfigError(f"--with-code with --to {to}: that layout opens in stock transformers; leave one of them out")
    if untie and to == "difftransformer":
        raise ConfigError(f"--untie with --to {to}: this layout has tied embeddings; leave it out")
    refuse_used(target)
    if not find_model(source).is_dir():
        raise CheckpointError(f"{source}: no such folder; name a run folder or the folder of a saved model")
    folder = latest_checkpoint(Path(source))
    document = read_config(folder)
    model_type, ours = document.get("model_type"), DiffTransformerConfig.model_type
    if model_type not in (ours, DifferentialFamilyConfig.model_type):
        raise CheckpointError(
            f"{folder}: model_type={model_type!r} is not of this package, and its folder can be shared as it is; export takes "
            "what difftransformer train, convert and upcycle write"
        )
    if model_type != ours and (with_code or to != ours):
        raise ConfigError(
            f"{folder}: a model of another family, made differential; it opens with this package alone, so leave out "
            f"{'--with-code' if with_code else f'--to {to}'}"
        )
    if document.get("quantization_config") is not None:
        raise CheckpointError(f"{folder}: the model is quantized; export it as it was before quantization")
    refuse_adapter(folder, "exported")
    model = open_model(folder, auto_class=_auto_class(document))
    if average:
        read_average(folder, model)
    if with_code:
        check_code(model.config)
    described = copy.deepcopy(model.config)
    if to != "difftransformer":  # as `convert_folder` writes it
        described.embedding_multiplier = 1.0
        if to == "llama":
            described.attention_type, described.dex_heads = SoftmaxAttention.name, None
        described.tie_word_embeddings = described.tie_word_embeddings and not untie
    card = model_card(
        described,
        name=target.resolve().name,
        architecture=type(model).__name__,
        training=_training(folder, figures),
        license=license,
        opens_with="code" if with_code else "package" if to == "difftransformer" else "transformers",
        counts=model._counts(),
    )
    notes: tuple[str, ...] = ()
    with whole_or_not_at_all(target) as out:
        if to == "difftransformer":
            _write(model, out, folder, dtype)
            if with_code:
                write_code(out)
        else:
            # Inside `out`, so that it goes with it if the process is killed.
            saved, converted = out / "saved", out / "converted"
            saved.mkdir()
            _write(model, saved, folder, "auto")
            try:
                notes = convert_folder(saved, converted, to=to, untie=untie).notes
            except DiffTransformerError as refusal:  # of what is removed again
                raise type(refusal)(str(refusal).replace(str(saved), str(folder))) from None
            shutil.rmtree(saved)
            for path in converted.iterdir():
                path.rename(out / path.name)
            converted.rmdir()
            if dtype != "auto":
                _cast(out, dtype)
        present = read_card(folder)
        kept = present if present is not None and not is_ours(present) else None
        (out / CARD_FILE).write_text(kept or card, encoding="utf-8")
        files = sorted(path for path in out.rglob("*") if path.is_file())
        names, size = tuple(str(path.relative_to(out)) for path in files), sum(path.stat().st_size for path in files)
    return Exported(
        folder=target, source=folder, layout=to, bytes=size, files=names, kept_card=kept is not None, notes=notes
    )


def _auto_class(document: dict[str, Any]) -> Any:
    """Return the Auto class of the model that config.json describes; a causal language model where it names none."""
    architecture = str((document.get("architectures") or ["ForCausalLM"])[0])
    return getattr(transformers, "AutoModel" + next(head for head in HEADS if architecture.endswith(head)))


def _write(model: DiffTransformerPreTrainedModel, out: Path, source: Path, dtype: str) -> None:
    """Write weights, configuration and generation settings, and copy the source's tokenizer and licence."""
    if dtype != "auto":
        for name, parameter in model.named_parameters():
            if not any(kept in name for kept in model._keep_in_fp32_modules_strict):
                parameter.data = parameter.data.to(DTYPES[dtype])
    try:
        if model.can_generate():
            model.generation_config.validate(strict=True)  # which saving asks for
    except FOREIGN_FAULTS as error:
        raise CheckpointError(f"{source / GENERATION_FILE}: not valid ({on_one_line(error)}); correct it") from error
    with quietly():
        model.save_pretrained(out, max_shard_size=SHARD_BYTES)
    carry(source, out, leave=[GENERATION_FILE])


def _cast(folder: Path, dtype: str) -> None:
    """Rewrite the weights of a folder in another dtype. This follows the conversion, so that weights are rounded once."""
    with WeightsReader(folder) as weights:
        tensors = {name: weights.read(name).to(DTYPES[dtype]) for name in weights.shapes}
        files = weights.files
    for name in [*files, INDEX_FILE]:
        (folder / name).unlink(missing_ok=True)
    write_weights(folder, tensors.items(), SHARD_BYTES)
    document = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    document["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
    (folder / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _training(folder: Path, figures: Sequence[tuple[str, str]]) -> Training | str | None:
    """Return recipe and figures from the run that the checkpoint belongs to, or the training section of its card."""
    if folder.parent.name == "checkpoints":
        run, step = folder.parent.parent, int(folder.name.removeprefix("step-"))
        recorded = training_summary(run, step)
        if recorded is not None:
            return replace(recorded, figures=[*recorded.figures, *figures])
    return training_section(read_card(folder) or "")

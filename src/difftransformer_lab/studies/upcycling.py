"""`upcycle --train`: the study of a pretrained model that is trained on in several differential forms and unconverted."""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from difftransformer.attention import label
from difftransformer.data import Shards
from difftransformer.errors import ConfigError
from difftransformer.hub import folder_sha256, source_folder

from ..evals.drift import measure_drift
from ..results import Drift, StudyIndex, Upcycling, kept_result, write_result
from .comparison import arm_size, own_design
from .design import ArmConfig
from .evaluation import evaluate_checkpoint
from .recipe import Recipe
from .records import run_figures
from .study import Study

logger = logging.getLogger(__name__)
PLAIN = "softmax"
DRIFT_TOKENS = 2000


def upcycle_and_train(recipe: Recipe, source: str, folder: Path, *, to: Sequence[str]) -> StudyIndex:
    """Convert, compare logits, evaluate, train each model on the same batches, evaluate; write results.json.

    What is complete in the folder already is not done again.

    Args:
        recipe: The recipe of the training; its model is empty, its tokenizer the source's.
        source: The pretrained model: a folder, a GGUF file, or owner/name on the hub.
        to: Targets of `upcycle_folder` besides the plain model, which is always trained too.

    Raises:
        DiffTransformerError: the source cannot be converted, or a run failed; its message.
        Interrupted: a signal; every run has saved a checkpoint.
    """
    if recipe.start_from is not None:
        raise ConfigError(f"start_from={recipe.start_from!r}: the study starts from the converted models; leave it out")
    names = [*(name for name in dict.fromkeys(to) if name != PLAIN), PLAIN]
    models = {name: folder / "models" / name for name in names}
    title = Path(source).name
    design = own_design(
        recipe,
        "upcycle",
        question=f"{title}, made differential and trained on: {recipe.name}",
        source=title,
        reference=PLAIN,
        arms={name: ArmConfig(label=_label(name), upcycle=name) for name in names},
    )
    study = Study(design, folder, alone=True, source=source, models=folder / "models")
    prepared = {run.arm: study.prepared(run) for run in study.design.reported()}  # makes the models
    plain = prepared[PLAIN]
    with source_folder(source) as pretrained:
        drift = {}
        for name, place in models.items():
            logger.info("comparing the logits of %s with the source's", name)
            drift[name] = _drift(pretrained, place, folder / "drift" / f"{name}.json", plain.shards)
    logger.info("evaluating before training")
    before = evaluate_checkpoint(models[PLAIN], plain.recipe, plain.shards, folder / "before")
    study.train(folder, at_once=recipe.compare.jobs)
    figures = [figure for task, result in before.items() for figure in run_figures(task, result)]
    context = recipe.training.context_tokens
    return study.write_index(
        sizes=[arm_size(name, AutoConfig.from_pretrained(place), context) for name, place in models.items()],
        upcycling=Upcycling(source=title, drift=drift, before=figures),
    )


def _label(name: str) -> str:
    plain, _, matched = name.partition("+")
    if plain != PLAIN:
        return label(name)
    return f"unconverted, MLP wider by what {label(matched)} adds" if matched else "unconverted"


def _drift(source: Path, target: Path, cached: Path, shards: Shards) -> Drift:
    ids = shards.tokens("validation")[:DRIFT_TOKENS].astype("int64")
    of = f"{folder_sha256(source)} {folder_sha256(target)} {hashlib.sha256(ids.tobytes()).hexdigest()}"
    drift = kept_result(cached, Drift)
    if drift is None or drift.of != of:
        drift = dataclasses.replace(measure_drift(source, target, torch.from_numpy(ids)), of=of)
        write_result(drift, cached)
    return drift

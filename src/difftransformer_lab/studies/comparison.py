"""`compare` and `upcycle --train`: studies of one recipe, with their runs and records in a folder of their own."""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig

from difftransformer.attention import label
from difftransformer.data import Shards
from difftransformer.errors import ConfigError, DataError
from difftransformer.hub import folder_sha256, source_folder

from ..environment import foreign_cpu_share
from ..evals.drift import measure_drift
from ..results import ArmSize, BaselineNll, Drift, StudyIndex, Upcycling, kept_result, write_result
from .costs import measure_costs
from .design import ArmConfig, Design, PresetConfig, StudyConfig
from .evaluation import evaluate_checkpoint
from .recipe import Recipe, counts_of, recipe_dict
from .records import run_figures
from .study import Study

logger = logging.getLogger(__name__)
PLAIN = "softmax"
DRIFT_TOKENS = 2000
_CHUNK_BYTES = 2**24


def compare(recipe: Recipe, folder: Path, *, costs: bool = True) -> StudyIndex:
    """Train, evaluate and compare; write results.json. What is complete in the folder already is not done again.

    Args:
        recipe: The recipe; `compare` names the arms and the number of seeds.
        costs: Whether to time training, prefill and decoding at the end.

    Raises:
        DiffTransformerError: a run failed, or a task is impossible; its message.
        Interrupted: a signal; every run has saved a checkpoint.
    """
    study = Study(comparison(recipe), folder, alone=True)
    study.train(folder, at_once=recipe.compare.jobs)
    shards = study.prepared(study.design.reported()[0]).shards
    context = recipe.training.context_tokens
    configs = {
        model: recipe.with_model(model).model_config(vocab_size=shards.tokenizer.vocab_size)
        for model in recipe.compare.models
    }
    sizes, baselines = [arm_size(model, config, context) for model, config in configs.items()], _baselines(shards)
    if not costs:
        return study.write_index(sizes=sizes, baselines=baselines)
    logger.info("measuring time and memory of the models in turn, a minute or more; --no-costs leaves it out")
    share = foreign_cpu_share()
    rows, labels = max(1, recipe.training.batch_tokens // context), {model: label(model) for model in configs}
    timed = measure_costs(configs, rows=rows, context_tokens=context, labels=labels)
    return study.write_index(sizes=sizes, baselines=baselines, costs=timed, costs_foreign_cpu_share=share())


def comparison(recipe: Recipe) -> Design:
    """Return the study of a recipe: an arm for each of `compare.models`, the last one the reference."""
    *others, reference = recipe.compare.models
    are, names = "Is" if len(others) == 1 else "Are", " and ".join(map(label, others))
    question = f"{are} {names} better than {label(reference)}? ({recipe.name})"
    arms = {}
    for model in recipe.compare.models:
        fields = recipe.with_model(model).model
        arms[model] = ArmConfig(label=label(model), set={f"model.{key}": value for key, value in fields.items()})
    return own_design(recipe, "compare", question=question, reference=reference, arms=arms)


def own_design(recipe: Recipe, preset: str, **study: Any) -> Design:
    """Return the study of a recipe that is its own, with these fields; its only size is called `preset`."""
    presets = {preset: PresetConfig(seeds=recipe.compare.seeds)}
    config = StudyConfig(name=recipe.name, recipe=recipe.name, presets=presets, **study)
    return Design(config, preset, document=recipe_dict(recipe), first_seed=recipe.training.seed)


def arm_size(arm: str, config: Any, context_tokens: int) -> ArmSize:
    counts = counts_of(config, context_tokens)
    return ArmSize(
        arm=arm,
        attention_type=config.attention_type,
        parameters=counts.parameters,
        train_flops_per_token=counts.train_flops_per_token,
        kv_bytes_per_token=counts.kv_bytes_per_token,
    )


def _baselines(shards: Shards) -> list[BaselineNll]:
    if shards.records:  # examples need not be text
        return []
    bits = byte_bigram_bits_per_byte(shards.text_bytes("train"), shards.text_bytes("validation"))
    return [BaselineNll(name="byte bigram", bits_per_byte=bits)]


def byte_bigram_bits_per_byte(train_bytes: bytes, validation_bytes: bytes) -> float:
    """Fit a byte bigram to one text and return the mean of -log2 p on another, in bits per byte.

    The bigram is interpolated with a smoothed unigram by Witten-Bell's rule, which has no parameters. With the counts c in
    the training text of n bytes and the number T(a) of distinct bytes that follow a in it:

        p(b)     = (c(b) + 1) / (n + 256)
        p(b | a) = (c(a, b) + T(a) p(b)) / (c(a) + T(a)), or p(b) where nothing follows a

    The first validation byte is scored by p(b), all others by p(b | a).
    """
    for name, text in (("training", train_bytes), ("validation", validation_bytes)):
        if not text:
            raise DataError(f"byte bigram baseline: empty {name} text; give a text of at least one byte")
    train, validation = np.frombuffer(train_bytes, np.uint8), np.frombuffer(validation_bytes, np.uint8)
    unigram = (np.bincount(train, minlength=256) + 1.0) / (len(train) + 256.0)
    pairs = _pair_counts(train)
    totals = pairs.sum(axis=1, keepdims=True)
    followers = np.count_nonzero(pairs, axis=1)[:, None]
    seen = np.maximum(totals + followers, 1)
    bigram = np.where(totals > 0, (pairs + followers * unigram) / seen, unigram)
    bits = -(_pair_counts(validation) * np.log2(bigram)).sum() - np.log2(unigram[validation[0]])
    return float(bits / len(validation))


def _pair_counts(text: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Count (byte, next byte) pairs, (256, 256)."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    for start in range(0, len(text) - 1, _CHUNK_BYTES):
        chunk = text[start : start + _CHUNK_BYTES + 1].astype(np.uint16)
        counts += np.bincount(chunk[:-1] * 256 + chunk[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


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

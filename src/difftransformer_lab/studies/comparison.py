"""`compare`: the study of a model and its same-size twin, trained on identical batches for each seed."""

import logging
from pathlib import Path
from typing import Any

from difftransformer.attention import label
from difftransformer.data import Shards

from ..environment import foreign_cpu_share
from ..results import ArmSize, BaselineNll, StudyIndex
from .costs import measure_costs
from .design import ArmConfig, Design, PresetConfig, StudyConfig
from .ngram import byte_bigram_bits_per_byte
from .recipe import Recipe, counts_of, recipe_dict
from .study import Study

logger = logging.getLogger(__name__)


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

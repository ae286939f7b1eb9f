"""How transformers learns of model classes from outside: its Auto classes, its tables of names, and names of its own."""

import sys
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto import modeling_auto as names

TABLES = {  # of each Auto class
    "AutoModel": names.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForMaskedLM": names.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": names.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": names.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": names.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}


def register_models(config: type[Any], models: Mapping[str, type[Any]], *, key: str) -> None:
    """Register the models of a configuration.

    Trainer and pipelines read the tables of names: Trainer shifts smoothed labels for the causal ones. TRL and
    `transformers serve` look for a class by its name in the module `transformers`.

    Args:
        config: Class of the configuration.
        models: Class of the model by the name of an Auto class, such as "AutoModelForCausalLM".
        key: The model's name in the tables; it stands for these classes alone.
    """
    server = sys.modules.get(
        "transformers.cli.serving.model_manager"
    )  # started early, it has a module object of its own
    for auto, model in models.items():
        getattr(transformers, auto).register(config, model, exist_ok=True)
        TABLES[auto][key] = model.__name__
        for place in {transformers, getattr(server, "transformers", transformers)}:
            setattr(place, model.__name__, model)

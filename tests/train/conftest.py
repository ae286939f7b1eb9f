"""Small training runs."""

import dataclasses

import pytest

from difftransformer.model import DiffTransformerConfig
from difftransformer.train import Callback, read_metrics, train

# Wall time differs from run to run; everything else in metrics.jsonl must not.
CLOCKS = ("seconds", "tokens_per_second", "mfu", "peak_bytes")


@pytest.fixture
def model_config(toy_recipe, toy_shards):
    """attention_type -> the toy model's configuration."""

    def configure(attention_type="diff", **fields) -> DiffTransformerConfig:
        recipe = dataclasses.replace(toy_recipe, model=toy_recipe.model | fields | {"attention_type": attention_type})
        return recipe.model_config(vocab_size=toy_shards.tokenizer.vocab_size)

    return configure


@pytest.fixture
def listening():
    """A callback that passes metrics on to a function."""

    class Listener(Callback):
        def __init__(self, listen):
            self.listen = listen

        def on_metrics(self, trainer, metrics):
            self.listen(metrics)

    return Listener


@pytest.fixture
def train_toy(toy_recipe, toy_shards, model_config, listening):
    """Train the toy in a folder, with other fields of the model and of TrainingConfig."""

    def run(
        folder,
        *,
        attention_type="diff",
        model=None,
        shards=toy_shards,
        on_metrics=lambda metrics: None,
        callbacks=(),
        device="cpu",
        **fields,
    ):
        config = dataclasses.replace(toy_recipe.training, **fields)
        how = {"callbacks": [listening(on_metrics), *callbacks], "device": device}
        return train(config, model_config(attention_type, **model or {}), shards, folder, **how)

    return run


@pytest.fixture
def read_run():
    """What metrics.jsonl says, without clocks."""

    def read(folder):
        steps, validations = read_metrics(folder / "metrics.jsonl")
        plain = [{k: v for k, v in dataclasses.asdict(line).items() if k not in CLOCKS} for line in steps]
        return plain, [dataclasses.asdict(line) for line in validations]

    return read


@pytest.fixture(scope="session")
def _plain_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plain") / "run"


@pytest.fixture
def plain_run(_plain_folder, train_toy):
    """The folder of the toy's run with all of its checkpoints, trained once for all tests, which only read it."""
    if not (_plain_folder / "checkpoints" / "step-000008").exists():
        train_toy(_plain_folder, keep_checkpoints=9)
    return _plain_folder

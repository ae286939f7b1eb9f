"""A recipe: one YAML file that says what is trained on what, how it is evaluated, and what is compared."""

import dataclasses
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from difftransformer.data import DataConfig
from difftransformer.data.synthetic import PREFIX
from difftransformer.data.text import STDLIB
from difftransformer.errors import ConfigError, DataError
from difftransformer.families import DifferentialFamilyConfig, DifferentialFields, count_family
from difftransformer.families.checkpoint_io import naming_config
from difftransformer.files import write_text_atomically
from difftransformer.model import DiffTransformerConfig, count, matching_width, preset
from difftransformer.model.counts import Counts
from difftransformer.reading import parse_yaml, read_json
from difftransformer.stores import is_url
from difftransformer.train import LogsConfig, ParallelConfig, TrainingConfig, checkpoints
from difftransformer.typed import ADJUSTABLE, ASIDE, WeightsDtype, build, plain, unknown_key

from ..evals.evaluate import TaskSpec, check_specs
from ..recipe_files import check_name, read_recipe

STARTS = (DiffTransformerConfig.model_type, DifferentialFamilyConfig.model_type)
MOST_SEEDS, MOST_JOBS = 1000, 64
IDENTITY_VERSION = 1
MOST_ROUNDED = 0.01  # of a model's parameters, so that it is still the same size as its twin
_POSSIBLE = set[str]()  # models that have been checked, since the recipes of a study share some
FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


VALIDATION_LOSS = TaskSpec(
    task="perplexity", options={"text": "validation", "windows": 64, "spread": True, "position_buckets": 8}
)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The models that `compare` trains.

    Attributes:
        models: Attention types; each is compared with the last one.
        fields: Fields of the model that one of them alone has, such as an intermediate_size for equal parameters.
        seeds: Number of seeds, counted from training.seed.
        jobs: Runs that train at the same time; each gets an equal share of the threads.
    """

    models: list[str] = field(default_factory=lambda: ["diff", "softmax"])
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: int = 1
    jobs: int = 1

    def __post_init__(self) -> None:
        if not 2 <= len(set(self.models)) == len(self.models):
            raise ConfigError(
                f"models={self.models}: name two or more attention types, each once, and last the one to compare with"
            )
        for name in self.fields:
            if name not in self.models:
                raise ConfigError(f"fields.{name}: {unknown_key(name, self.models)}")
        if not 1 <= self.seeds <= MOST_SEEDS or not 1 <= self.jobs <= MOST_JOBS:
            raise ConfigError(
                f"seeds={self.seeds}, jobs={self.jobs}: give 1 to {MOST_SEEDS} seeds and 1 to {MOST_JOBS} jobs"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a command needs to know.

    A field with the metadata `ASIDE`, here or in a part, is not part of what a run computes; with `ADJUSTABLE` it is, and may
    change when a run continues.

    Attributes:
        name: Name for titles and default folders.
        model: Fields of DiffTransformerConfig, and optionally `preset`, whose fields come first. Heads describe the
            same-size Transformer. vocab_size comes from the tokenizer. `match_parameters` names an attention type, usually
            softmax: intermediate_size becomes what gives as many parameters as that type has with the one stated.
            `multiple_of` rounds intermediate_size to a multiple, such as the number of processes of `parallel.tensor`.
        data: Text, tokenizer, split.
        training: Steps, batches, optimiser.
        parallel: How the processes of `train` divide its work.
        logs: What a run says beside its loss, and where.
        evaluation: Tasks that a trained model is evaluated with.
        evaluation_batch_tokens: Largest number of tokens in a batch of an evaluation.
        evaluation_dtype: Dtype of the weights while the model is evaluated; auto is the saved one.
        compare: Models, seeds, jobs.
        start_from: Run, or folder of a saved model of this package, to take the weights from. `model` is then empty,
            or describes a model that takes these weights: positions and rotary settings may differ.
        branch_from: Checkpoint, or run with its newest, of another run that this one goes on from in a folder of its own, with
            weights, moments and place in the data; such as the stable part of a `wsd` schedule, which this run ends.
    """

    name: str = field(metadata=ASIDE)
    model: dict[str, Any]
    data: DataConfig
    training: TrainingConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata=ASIDE)
    logs: LogsConfig = field(default_factory=LogsConfig, metadata=ASIDE)
    evaluation: list[TaskSpec] = field(default_factory=lambda: [VALIDATION_LOSS], metadata=ADJUSTABLE)
    evaluation_batch_tokens: int = field(default=16_384, metadata=ASIDE)
    evaluation_dtype: WeightsDtype = field(default="auto", metadata=ADJUSTABLE)
    compare: CompareConfig = field(default_factory=CompareConfig, metadata=ASIDE)
    start_from: str | None = None
    branch_from: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.start_from is not None and self.branch_from is not None:
            raise ConfigError(
                "start_from and branch_from are both given; name the run to go on from as branch_from alone"
            )
        try:
            check_specs(self.evaluation)
        except ConfigError as error:
            raise ConfigError(f"evaluation.{error}") from None
        every, saved = self.logs.evaluate_every, self.training.checkpoint_every
        if every % saved:
            raise ConfigError(
                f"logs.evaluate_every={every} is no multiple of training.checkpoint_every={saved}; checkpoints are evaluated, "
                "so change one"
            )
        if self.evaluation_batch_tokens < 1:
            raise ConfigError(f"evaluation_batch_tokens={self.evaluation_batch_tokens}: give at least 1")
        key = f"{self.model} {self.training.context_tokens}"
        if (self.start_from is None or self.model) and key not in _POSSIBLE:
            self.model_config(vocab_size=1)  # impossible models are refused when the recipe is read
            _POSSIBLE.add(key)

    def model_config(self, *, vocab_size: int, **tokens: int) -> DiffTransformerConfig:
        """The model's configuration with the tokenizer's vocabulary and special tokens.

        Raises:
            ConfigError: an unknown field or an impossible combination.
        """
        context = self.training.context_tokens
        if self.start_from is not None and not self.model:
            return self._start_config(context)
        types = {"preset": str} | DiffTransformerConfig.field_types() | {"match_parameters": str, "multiple_of": int}
        allowed = [name for name in types if name not in FROM_TOKENIZER]
        for key, value in self.model.items():
            if key not in allowed:
                raise ConfigError(f"model.{key}: {unknown_key(key, allowed)}")
            build(types[key], value, source="", key=f"model.{key}", error=ConfigError)
        fields = dict(self.model)
        if "preset" in fields:
            fields = preset(fields.pop("preset")).fields | fields
        match, multiple = fields.pop("match_parameters", None), fields.pop("multiple_of", 1)
        longest = fields.setdefault("max_position_embeddings", context)
        if longest < context:
            raise ConfigError(
                f"model.max_position_embeddings={longest} is below the trained context of {context} tokens"
            )
        config = DiffTransformerConfig(**{**fields, "vocab_size": vocab_size, **tokens})
        if match is not None:
            config.intermediate_size = matching_width(config, count(config.twin(match)).parameters)
        if multiple != 1:
            round_width(config, multiple)
        return config

    def planned_config(self) -> DiffTransformerConfig:
        """The model's configuration while neither data nor tokenizer need exist: with the preset's vocabulary, if it has one.

        Raises:
            ConfigError: See `model_config`.
        """
        if "preset" in self.model:
            return self.model_config(vocab_size=preset(self.model["preset"]).fields["vocab_size"])
        return self.model_config(vocab_size=self.data.tokenizer_vocabulary)

    @property
    def train_flops(self) -> int:
        """FLOPs of the whole training, by formula."""
        config, training = self.planned_config(), self.training
        counts = counts_of(config, training.context_tokens)
        return counts.train_flops_per_token * training.steps * training.batch_tokens

    def missing(self) -> list[str]:
        """List missing files that the recipe names. A store may hold the shards of a text that is elsewhere."""
        named = [("data.mixture", one.source) for one in self.data.mixture] or [("data.source", self.data.source)]
        named = [] if is_url(self.data.folder) else named
        named.append(("data.tokenizer", self.data.tokenizer))
        starts = {"start_from": self.start_from, "branch_from": self.branch_from}
        named += [(key, value) for key, value in starts.items() if value is not None]
        elsewhere = ("hf:", "hf-stream:", "ids:", PREFIX)
        local = [(key, value) for key, value in named if not value.startswith(elsewhere)]
        made = ("bpe", "byte", STDLIB)
        files = [(key, value) for key, value in local if value not in made]
        return [f"{key}: {value} does not exist" for key, value in files if not Path(value).exists()]

    def _start_config(self, context: int) -> DiffTransformerConfig:
        folder = Path(str(self.start_from))
        path = (checkpoints(folder) or [folder])[-1] / "config.json"
        document = read_json(path, error=ConfigError, advice="name the folder of a saved model as start_from")
        model_type = document.get("model_type") if isinstance(document, dict) else None
        if model_type not in STARTS:
            raise ConfigError(
                f"start_from: {path} has model_type {model_type!r}, expected {' or '.join(map(repr, STARTS))}; "
                "make it one with difftransformer upcycle or convert"
            )
        with naming_config(path, model_type):
            config = AutoConfig.from_pretrained(path.parent)
        if config.max_position_embeddings < context:
            raise ConfigError(
                f"start_from: {path} has max_position_embeddings={config.max_position_embeddings}, below the trained "
                f"context of {context} tokens"
            )
        return config

    def with_model(self, attention_type: str) -> "Recipe":
        """Return the recipe with another attention type and its own fields."""
        fields = self.compare.fields.get(attention_type, {})
        return dataclasses.replace(self, model=self.model | fields | {"attention_type": attention_type})

    def with_seed(self, seed: int) -> "Recipe":
        return dataclasses.replace(self, training=dataclasses.replace(self.training, seed=seed))


def counts_of(config: Any, context_tokens: int) -> Counts:
    """Count parameters and FLOPs of a model of this package, or of another family with differential attention."""
    counted = count_family if isinstance(config, DifferentialFields) else count
    return counted(config, context_tokens=context_tokens)


def round_width(config: DiffTransformerConfig, multiple: int) -> None:
    if multiple < 1:
        raise ConfigError(f"model.multiple_of={multiple}: give at least 1")
    stated = config.intermediate_size
    before = count(config)
    config.intermediate_size = max(1, round(stated / multiple)) * multiple
    layers = before.parameters - before.embedding_parameters * (1 if config.tie_word_embeddings else 2)
    if (change := abs(count(config).parameters - before.parameters) / layers) > MOST_ROUNDED:
        raise ConfigError(
            f"model.multiple_of={multiple} makes intermediate_size {config.intermediate_size} of {stated}, which changes the "
            f"layers' parameters by {100 * change:.1f} %, more than {100 * MOST_ROUNDED:g} %; take a smaller multiple"
        )


def load_recipe(path: Path | str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe, or one that is shipped by its name, and apply overrides such as `training.steps=100` (YAML values).

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a wrong type or an impossible combination; the message names
            the file, the key and the value.
    """
    document = read_recipe(path)
    for change in overrides or []:
        override(document, *parsed_change(change), said=f"--set {change}")
    return recipe_from(document, source=str(path))


def recipe_from(document: dict[str, Any], *, source: str) -> Recipe:
    try:
        return build(Recipe, document, source=source, error=ConfigError)
    except DataError as error:
        raise ConfigError(f"{source}: {error}") from None


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a resolved recipe; `load_recipe` reads it back to an equal one."""
    write_text_atomically(path, yaml.safe_dump(recipe_dict(recipe), sort_keys=False))


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    document: dict[str, Any] = plain(recipe)
    return document


def identity(recipe: Recipe) -> str:
    """Return a SHA-256 of what a run trains and evaluates: recipes with equal ones give the same run on the same data.

    It is computed from the recipe as this release reads it, so a new option keeps the identity of earlier runs.
    """
    document: dict[str, Any] = plain(recipe, without=[ASIDE])
    document["training"]["compile"] = False  # it was part of the identity at first
    document["evaluation"] = [[spec.name, spec.task, asdict(spec.built())] for spec in recipe.evaluation]
    text = json.dumps([IDENTITY_VERSION, document], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def parsed_change(change: str) -> tuple[str, Any]:
    """Split a change such as training.steps=100 into its key and its value."""
    key, separator, text = change.partition("=")
    if not separator:
        raise ConfigError(f"--set {change}: expected KEY=VALUE, such as training.steps=100")
    try:
        return key, parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"--set {change}: the value is {error}") from None


def override(document: dict[str, Any], key: str, value: Any, *, said: str) -> None:
    """Replace a value of a recipe in plain data.

    Args:
        document: The recipe.
        key: Dotted key, such as training.steps; below `evaluation` a task's name and one of its options.
        value: The value; null takes a task out, and a field of the model back to its default.
        said: What messages call the change.
    """
    *parents, last = key.split(".")
    place: Any = document
    if isinstance(specs := document.get("evaluation"), list) and parents[:1] == ["evaluation"]:
        place, parents = _task_options(specs, [*parents[1:], last][0], said), parents[2:]
        if key.count(".") == 1:
            if value is not None:
                raise ConfigError(f"{said}: give null to leave a task out, or name one of its options")
            specs[:] = [spec for spec in specs if spec.get("options") is not place]
            return
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{said}: {parent} is not a mapping in the recipe")
    if value is None and parents == ["model"]:  # the model's default, which may depend on its other fields
        place.pop(last, None)
    else:
        place[last] = value


def _task_options(specs: list[Any], name: str, said: str) -> dict[str, Any]:
    """Return the options of a task, by the name in evaluation.needle.documents=50."""
    named = {spec.get("label") or spec.get("task"): spec for spec in specs if isinstance(spec, dict)}
    if name not in named:
        raise ConfigError(f"{said}: the recipe has no evaluation {name!r}; it has {', '.join(map(str, named))}")
    options: dict[str, Any] = named[name].setdefault("options", {})
    return options

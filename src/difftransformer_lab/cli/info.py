"""difftransformer info."""

import copy
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from difftransformer.errors import ConfigError
from difftransformer.sources import find_model

from ..recipe_files import shipped_recipes
from .arguments import check_positive
from .console import console, show, show_table

if TYPE_CHECKING:
    from difftransformer.model import DiffTransformerConfig
    from difftransformer.model.start_sizes import Branch

    from ..studies import Recipe
    from ..table import Table

KERNEL_WIDTHS = (32, 16, 8)
"""Kernels of quantized weights need matrix widths that are multiples of one of these, usually the first."""


def run(model: str, start: bool = False, processes: int | None = None, set: list[str] | None = None) -> int:
    """Show parameters, FLOPs and bytes of a model and its twins, computed by formula; or how the model starts.

    For a recipe, also the FLOPs of training and the memory of a step in each process.

    Args:
        model: A preset (tiny, small, 830m, 1.4b, 2.8b, 3b, 6.8b, 13.1b), a recipe's YAML file or a shipped recipe's name, the
            folder of a run or a saved model, or "backends" to list the attention backends.
        start: Measure how large attention and MLP are at step 0, relative to the residual stream.
        processes: Number of GPUs among which a recipe's training is divided, one by default.
    """
    check_positive(processes=processes)
    from difftransformer.families import DifferentialFields
    from difftransformer.model import PRESETS, DiffTransformerConfig, count, preset

    if model == "backends":
        if start:
            raise ConfigError(
                "backends is not a model; name a preset, a recipe or a folder with config.json to use --start"
            )
        show_table(_backends())
        return 0
    stated, is_saved, shipped, loaded = None, False, shipped_recipes() | shipped_recipes("paper"), None
    is_recipe = not Path(model).is_dir() and (model in shipped or Path(model).suffix in (".yaml", ".yml"))
    if (processes or set) and not is_recipe:
        raise ConfigError(f"{model}: --processes and --set are for recipes; name one, such as paper-3b")
    if model in PRESETS:
        chosen = preset(model)
        config, source = DiffTransformerConfig(**chosen.fields), chosen.source
        stated = chosen.paper_parameters
    elif is_recipe:
        from ..studies import load_recipe

        loaded = load_recipe(model, set)
        config, source, is_saved = loaded.planned_config(), "recipe", loaded.start_from is not None
    else:
        config, source, is_saved = _saved_config(model), model, True
    if isinstance(config, DifferentialFields):
        if start:
            raise ConfigError(
                f"{model}: model_type is {config.model_type!r}, and --start takes 'difftransformer'; a model of another family "
                "starts from pretrained weights"
            )
        show_table(_family(model, config))
        return 0
    if not isinstance(config, DiffTransformerConfig):
        raise ConfigError(f"{model}: model_type is {config.model_type!r}; name the folder of a differential model")
    if start:
        _show_start(model, config, is_saved)
        return 0
    show_table(_sizes(model, source, config))
    if loaded is not None:
        show_table(_training(loaded, config, processes or 1))
    if line := _odd_width(config):
        show(line)
    if stated is not None:
        tied = count(config).parameters
        untied = tied + config.vocab_size * config.hidden_size
        text = f"The paper states {stated / 1e9:.3g}B. This shape has {tied / 1e9:.2f}B with a tied embedding"
        show(f"{text}, {untied / 1e9:.2f}B untied.")
    return 0


def _odd_width(config: "DiffTransformerConfig") -> str:
    """Advise on an MLP width that quantized kernels refuse; empty if they take it."""
    from ..studies.recipe import round_width

    for multiple in KERNEL_WIDTHS if config.intermediate_size % KERNEL_WIDTHS[0] else ():
        rounded = copy.copy(config)
        with suppress(ConfigError):
            round_width(rounded, multiple)
            width = config.intermediate_size
            return (
                f"Kernels of quantized weights want an intermediate_size that {KERNEL_WIDTHS[0]} divides; it is {width}. "
                f"model.multiple_of: {multiple} in a recipe makes it {rounded.intermediate_size}."
            )
    return ""


def _saved_config(folder: str) -> Any:
    from transformers import AutoConfig, DiffLlamaConfig

    from difftransformer.families.checkpoint_io import naming_config
    from difftransformer.families.diffllama import from_diffllama
    from difftransformer.families.llama import from_llama, has_llamas_layout
    from difftransformer.model import PRESETS, DiffTransformerConfig
    from difftransformer.train import checkpoints

    named = find_model(folder)
    path = (checkpoints(named) or [named])[-1] / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder!r} is neither a preset ({', '.join(PRESETS)}), nor a recipe ({', '.join(shipped_recipes())}, or a YAML "
            "file), nor a run or a folder with config.json"
        )
    with naming_config(path, "difftransformer"):
        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        if isinstance(config, DiffLlamaConfig):
            return DiffTransformerConfig.from_dict(from_diffllama(config).config)
        if has_llamas_layout(config):
            return DiffTransformerConfig.from_dict(from_llama(config, to="softmax").config)
        return config


def _show_start(name: str, config: "DiffTransformerConfig", is_saved: bool) -> None:
    """Print how large the branches of a model and its softmax twin are at step 0, and warn of too large ones."""
    from difftransformer.model.start_sizes import LARGEST_RATIO, TOKENS, drowning, start_sizes

    configs = {word: config.twin(word) for word in dict.fromkeys((config.attention_type, "softmax"))}
    branches_of = {word: start_sizes(one) for word, one in configs.items()}
    layers, whole = min(map(len, branches_of.values())) // 2, config.num_hidden_layers
    console.print(_start_table(branches_of, layers))
    measured = "all layers" if layers == whole else f"the first {f'{layers} of' if layers > 1 else 'of'} {whole} layers"
    std = f" (initializer_range {config.initializer_range:g})" if config.initialization == "normal" else ""
    show(f"{name} at step 0, {measured}: RMS on {TOKENS} random tokens. ratio: attention / stream.")
    show(f"initialization: {config.initialization}{std}, embedding_multiplier: {config.embedding_multiplier:.4g}")
    if is_saved:
        show("Measured with fresh weights: this is how the configuration starts, not what was trained.")
    for word, branches in branches_of.items():
        fine = f"no branch starts more than {LARGEST_RATIO:g} times as large as the residual stream that it joins"
        show(f"{word}: {drowning(configs[word], branches) or fine}.")


def _start_table(branches_of: "dict[str, list[Branch]]", layers: int) -> RichTable:
    table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("\nlayer", justify="right")
    for word in branches_of:
        for above, title in (("", "stream"), (word, "attention"), ("", "MLP"), ("", "ratio")):
            table.add_column(f"{above}\n{title}", justify="right", no_wrap=True)
    for layer in range(layers):
        cells = [str(layer)]
        for branches in branches_of.values():
            attention, mlp = branches[2 * layer : 2 * layer + 2]
            cells += [f"{size:.4f}" for size in (attention.stream, attention.output, mlp.output)]
            cells.append(f"{attention.ratio:.2f}")
        table.add_row(*cells)
    return table


def _sizes(name: str, source: str, config: "DiffTransformerConfig") -> "Table":
    from difftransformer.attention import variants
    from difftransformer.model import count, matching_width
    from difftransformer.model.card import size_rows

    from ..table import Table, columns

    twins = {}
    for word in variants():
        with suppress(ConfigError):  # heads that one of them cannot divide leave its column out
            twins[word] = config.twin(word)
    size = count(config.twin("softmax")).parameters
    equal = "FFN width of as many parameters as softmax"
    sizes = {word: size_rows(twin) | {equal: matching_width(twin, size)} for word, twin in twins.items()}
    first = sizes["softmax"]
    own = [label for label in first if label == "parameters" or len({one[label] for one in sizes.values()}) > 1]
    rows = [[word, *(f"{one[label]:,}" for label in own)] for word, one in sizes.items()]
    shared = ", ".join(f"{label} {first[label]:,}" for label in first if label not in own)
    notes = [f"The same for all: {shared}.", "Computed by formula; FLOPs of matrix products."]
    return Table("sizes", f"{name} ({source})", columns("attention type", *own), rows, notes)


def _training(recipe: "Recipe", config: "DiffTransformerConfig", processes: int) -> "Table":
    """Compute FLOPs and memory of training, for the recipe's model and its comparisons."""
    from difftransformer.model import count
    from difftransformer.train.memory import step_bytes
    from difftransformer.train.parallel import Mesh, Processes

    from ..table import Table, columns

    training, parallel = recipe.training, recipe.parallel
    tokens = training.steps * training.batch_tokens
    words = dict.fromkeys((config.attention_type, *recipe.compare.models))
    cells = []
    for twin in map(config.twin, words):
        Mesh(Processes(count=processes), parallel).check(twin, training)
        flops = count(twin, context_tokens=training.context_tokens).train_flops_per_token * tokens
        taken = step_bytes(twin, training, parallel, processes)
        parts = {f"{part}, GiB": f"{size / 2**30:,.2f}" for part, size in vars(taken).items()}
        cells.append({"FLOPs": f"{flops:.3g}", **parts, "together, GiB": f"{taken.total / 2**30:,.2f}"})
    rows = [[label, *(one[label] for one in cells)] for label in cells[0]]
    title = f"Training on {tokens:,} tokens, divided by {processes}"
    notes = ["GiB: of each process at the peak of a step with AdamW, where all weights are trained."]
    return Table("training", title, columns("", *words), rows, notes)


def _family(name: str, config: Any) -> "Table":
    from difftransformer.families import count_family

    from ..table import Table, columns

    rows = [[field.replace("_", " "), f"{value:,}"] for field, value in vars(count_family(config)).items()]
    titles = columns("", config.attention_type)
    return Table("sizes", f"{name} ({config.family})", titles, rows, ["FLOPs of matrix products."])


def _backends() -> "Table":
    from difftransformer.ops import BACKENDS

    from ..table import Table, names

    rows = [[name, one.description] for name, one in BACKENDS.items()]
    return Table("backends", "Attention backends", names("name", "description"), rows)

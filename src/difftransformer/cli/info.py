"""difftransformer info."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import ConfigError
from .console import console

if TYPE_CHECKING:
    from ..model import DiffTransformerConfig


def run(model: str) -> int:
    """Show parameters, FLOPs and bytes of a model and its twins, computed by formula.

    Args:
        model: A preset (tiny, small, 830m, 1.4b, 2.8b, 3b, 6.8b, 13.1b), the folder of a saved model, or
            "backends" to list the attention backends.
    """
    from transformers import AutoConfig

    from ..convert.checkpoint_io import naming_config
    from ..families import DifferentialFields
    from ..model import PRESETS, DiffTransformerConfig, count, preset

    if model == "backends":
        console.print(_backends())
        return 0
    if model in PRESETS:
        chosen = preset(model)
        config, source = DiffTransformerConfig(**chosen.fields), chosen.source
        stated = chosen.paper_parameters
    else:
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"{model!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with config.json")
        with naming_config(Path(model, "config.json"), "difftransformer"):
            config, source, stated = AutoConfig.from_pretrained(model, trust_remote_code=False), model, None
        if isinstance(config, DifferentialFields):
            console.print(_family(model, config))
            return 0
        if not isinstance(config, DiffTransformerConfig):
            raise ConfigError(f"{model}: model_type is {config.model_type!r}; name the folder of a differential model")
    console.print(_sizes(model, source, config))
    if stated is not None:
        tied = count(config).parameters
        untied = tied + config.vocab_size * config.hidden_size
        text = f"The paper states {stated / 1e9:.3g}B. This shape has {tied / 1e9:.2f}B with a tied embedding"
        console.print(f"{text}, {untied / 1e9:.2f}B untied.", highlight=False)
    return 0


def _sizes(name: str, source: str, config: "DiffTransformerConfig") -> Table:
    from ..attention import variants
    from ..model import count, matching_width
    from ..model.card import size_rows

    table = Table(title=f"{name} ({source})", caption="Computed by formula; FLOPs of matrix products.")
    table.add_column("")
    twins = [size_rows(config.twin(word)) for word in variants()]
    for word in variants():
        table.add_column(word, justify="right")
    for label in twins[0]:
        table.add_row(label, *(f"{rows[label]:,}" for rows in twins))
    size = count(config.twin()).parameters
    equal = (matching_width(config.twin(word), size) for word in variants())
    table.add_row("FFN width for as many parameters as softmax", *(f"{width:,}" for width in equal))
    return table


def _family(name: str, config: Any) -> Table:
    from ..families import count_family

    counts = count_family(config)
    table = Table("", config.attention_type, title=f"{name} ({config.family})", caption="FLOPs of matrix products.")
    for field, value in vars(counts).items():
        table.add_row(field.replace("_", " "), f"{value:,}")
    return table


def _backends() -> Table:
    from ..ops import BACKENDS

    table = Table("name", "description", title="Attention backends")
    for name, backend in BACKENDS.items():
        table.add_row(name, backend.description)
    return table

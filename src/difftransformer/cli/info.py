"""difftransformer info."""

from pathlib import Path

from rich.table import Table

from ..attention import variants
from ..errors import ConfigError
from ..model import PRESETS, DiffTransformerConfig, count, preset
from ..ops import BACKENDS
from .console import console


def run(model: str) -> int:
    """Show parameters, FLOPs and bytes of a model and its twin, by formula.

    Args:
        model: A preset (tiny, small, 830m, 1.4b, 2.8b, 3b, 6.8b, 13.1b), the folder of a saved model, or the word
            "backends" for the attention backends.
    """
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
        config, source, stated = DiffTransformerConfig.from_pretrained(model), model, None
    console.print(_sizes(model, source, config))
    if stated is not None:
        console.print(_beside_the_paper(config, stated), highlight=False)
    return 0


def _sizes(name: str, source: str, config: DiffTransformerConfig) -> Table:
    table = Table(title=f"{name} ({source})", caption="By formula; the cache in bf16, FLOPs of matrix products.")
    table.add_column("")
    twins = {word: config.twin(word) for word in variants()}
    for word in twins:
        table.add_column(word, justify="right")
    layouts = [twin.head_layout() for twin in twins.values()]
    counts = [count(twin) for twin in twins.values()]
    rows = {
        "layers": [str(config.num_hidden_layers)] * len(twins),
        "hidden size": [str(config.hidden_size)] * len(twins),
        "FFN width": [str(config.intermediate_size)] * len(twins),
        "vocabulary": [f"{config.vocab_size:,}"] * len(twins),
        "heads": [str(layout.num_heads) for layout in layouts],
        "key/value heads": [str(layout.num_key_value_heads) for layout in layouts],
        "width of a map": [str(layout.head_dim) for layout in layouts],
        "width of a value": [str(layout.value_head_dim) for layout in layouts],
        "parameters": [f"{c.parameters:,}" for c in counts],
        "of these, embedding": [f"{c.embedding_parameters:,}" for c in counts],
        "of these, attention": [f"{c.attention_parameters:,}" for c in counts],
        f"forward FLOPs/token at {counts[0].context_tokens:,}": [f"{c.forward_flops_per_token:,}" for c in counts],
        f"training FLOPs/token at {counts[0].context_tokens:,}": [f"{c.train_flops_per_token:,}" for c in counts],
        "KV bytes/token": [f"{c.kv_bytes_per_token:,}" for c in counts],
    }
    for label, values in rows.items():
        table.add_row(label, *values)
    return table


def _beside_the_paper(config: DiffTransformerConfig, stated: float) -> str:
    tied = count(config).parameters if config.tie_word_embeddings else None
    untied = (tied or 0) + config.vocab_size * config.hidden_size
    text = f"The paper states {stated / 1e9:.3g}B. This shape has {(tied or 0) / 1e9:.2f}B with a tied embedding"
    return f"{text}, {untied / 1e9:.2f}B untied."


def _backends() -> Table:
    table = Table(title="Attention backends")
    for column in ("name", "what it is"):
        table.add_column(column)
    for name, backend in BACKENDS.items():
        table.add_row(name, backend.description)
    return table

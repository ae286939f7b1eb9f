"""Model sizes: the papers' tables, and small ones for tests and demonstrations.

Every preset gives the heads of the plain Transformer. `attention_type` makes DIFF and its twin from the same entry.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

CL100K_VOCABULARY = 100_288  # tiktoken cl100k_base, padded (arXiv:2410.05258 Table 9)


def paper_ffn_width(hidden_size: int) -> int:
    """Return the inner width of SwiGLU, round(8/3 hidden_size) (arXiv:2410.05258 section 2.2)."""
    return round(8 * hidden_size / 3)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model size.

    Attributes:
        fields: Arguments of DiffTransformerConfig.
        source: Paper and table of the shape, or its purpose.
        paper_parameters: Number of parameters that the paper states, or None.
    """

    fields: dict[str, Any]
    source: str
    paper_parameters: float | None = None


def _preset(
    source: str,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
    stated: float | None = None,
    **fields: Any,
) -> Preset:
    fields |= {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return Preset(fields=fields | {"max_position_embeddings": positions}, source=source, paper_parameters=stated)


TABLE_9, TABLE_10 = "arXiv:2410.05258 Table 9", "arXiv:2410.05258 Table 10"
# Vocabulary, width, layers, heads of the plain Transformer (twice the differential heads of the paper's tables), positions,
# and the number of parameters that the paper states.
PRESETS: dict[str, Preset] = {
    "tiny": _preset("for tests", 258, 64, 2, 4, 256),
    "small": _preset("for one GPU or a patient CPU", 8192, 512, 8, 8, 1024),
    "830m": _preset(TABLE_10, CL100K_VOCABULARY, 1536, 24, 16, 2048, 0.83e9),
    "1.4b": _preset(TABLE_10, CL100K_VOCABULARY, 2048, 24, 16, 2048, 1.4e9),
    "2.8b": _preset(TABLE_10, CL100K_VOCABULARY, 2560, 32, 20, 2048, 2.8e9),
    "6.8b": _preset(TABLE_10, CL100K_VOCABULARY, 4096, 32, 32, 2048, 6.8e9),
    "13.1b": _preset(TABLE_10, CL100K_VOCABULARY, 5120, 40, 40, 2048, 13.1e9),
    "3b": _preset(TABLE_9, CL100K_VOCABULARY, 3072, 28, 24, 4096, 2.8e9, intermediate_size=8192),
}


def preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]

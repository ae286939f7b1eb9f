"""Model sizes: the papers' tables and small ones for tests and demonstrations. Torch is not needed to read them.

Every preset describes the plain Transformer's heads; `attention_type` makes DIFF and its twin of the same entry.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

CL100K_VOCABULARY = 100_288  # tiktoken cl100k_base, padded (arXiv:2410.05258 Table 9)


def paper_ffn_width(hidden_size: int) -> int:
    """Inner width of SwiGLU, round(8/3 hidden_size) (arXiv:2410.05258 section 2.2)."""
    return round(8 * hidden_size / 3)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model size.

    Attributes:
        fields: Arguments of DiffTransformerConfig.
        source: Where the shape comes from.
        paper_parameters: The size that the paper states, or None.
    """

    fields: dict[str, Any]
    source: str
    paper_parameters: float | None = None


def _scaling(hidden: int, layers: int, differential_heads: int, stated: float) -> Preset:
    return Preset(
        fields={
            "vocab_size": CL100K_VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": paper_ffn_width(hidden),
            "num_hidden_layers": layers,
            "num_attention_heads": 2 * differential_heads,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        source="arXiv:2410.05258 Table 10",
        paper_parameters=stated,
    )


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        fields={
            "vocab_size": 258,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
        source="for tests",
    ),
    "small": Preset(
        fields={
            "vocab_size": 8192,
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "max_position_embeddings": 1024,
        },
        source="for one GPU or a patient CPU",
    ),
    "830m": _scaling(1536, 24, 8, 0.83e9),
    "1.4b": _scaling(2048, 24, 8, 1.4e9),
    "2.8b": _scaling(2560, 32, 10, 2.8e9),
    "6.8b": _scaling(4096, 32, 16, 6.8e9),
    "13.1b": _scaling(5120, 40, 20, 13.1e9),
    "3b": Preset(
        fields={
            "vocab_size": CL100K_VOCABULARY,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
        source="arXiv:2410.05258 Table 9",
        paper_parameters=2.8e9,
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]

"""The model card: README.md of a saved model. Written once, and again only while nobody has changed it.

A card of ours holds a line with the sha256 of the rest. A card without that line, or with another sum, is a person's.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from .config import DiffTransformerConfig
from .counts import count

CARD_FILE = "README.md"
TRAINING_HEADING, NEXT_HEADING = "## Training\n", "## Citation\n"
LOADED_FROM = "Of the model that this one was loaded from:"
_SEAL = re.compile(r"<!-- Written by difftransformer; edit it freely: a changed card is kept\. sha256 (\w+) -->\n")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
PAPER = "https://arxiv.org/abs/2410.05258"
CITATION = """```bibtex
@article{ye2024differential,
  title={Differential Transformer},
  author={Ye, Tianzhu and Dong, Li and Xia, Yuqing and Sun, Yutao and Zhu, Yi and Huang, Gao and Wei, Furu},
  journal={arXiv preprint arXiv:2410.05258},
  year={2024}
}
```
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a card says of how a model was trained.

    Attributes:
        figures: Names and values, as they are to be read.
        recipe: The recipe as plain data.
    """

    figures: Sequence[tuple[str, str]]
    recipe: Mapping[str, Any]


def model_card(
    config: DiffTransformerConfig,
    *,
    name: str,
    architecture: str = "DiffTransformerForCausalLM",
    training: Training | str | None = None,
    license: str | None = None,
    stock: bool = False,
) -> str:
    """A card as text: what the model is, its layout and sizes, how it opens, how it was trained.

    Args:
        config: The model.
        name: Its title.
        architecture: Class that was saved.
        training: Recipe and figures, or the section that another card of ours has on them.
        license: Identifier such as "mit" or "apache-2.0"; left out where it is not known.
        stock: Whether the folder is a `diffllama` one, which opens without this package.

    Raises:
        ConfigError: the licence is no identifier.
    """
    if license is not None and not _LICENSE.fullmatch(license):
        raise ConfigError(f"license={license!r}: give an identifier in small letters, such as mit or apache-2.0")
    causal = architecture.endswith("ForCausalLM")
    front: dict[str, Any] = {"library_name": "transformers"}
    if causal:
        front["pipeline_tag"] = "text-generation"
    if license is not None:
        front["license"] = license
    front["tags"] = [
        "difftransformer",
        *config.attention.tags,
    ]
    parts = [f"# {name}\n\n{_summary(config, causal)}\n", _layout(config), _usage(architecture, stock)]
    if isinstance(training, str):
        parts.append(training)
    elif training is not None:
        parts.append(_training(training))
    parts.append(f"{NEXT_HEADING}\n{CITATION}")
    return _sealed(f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n", "\n".join(parts))


def is_ours(text: str) -> bool:
    """Whether a card was written here and not changed since."""
    seal = _SEAL.search(text)
    return seal is not None and seal[1] == _sum(text[: seal.start()] + text[seal.end() :])


def training_section(text: str) -> str | None:
    """What a card of ours says of training; None where it says nothing, or is a person's."""
    start, end = text.find("\n" + TRAINING_HEADING), text.rfind("\n" + NEXT_HEADING)
    return text[start + 1 : end] if is_ours(text) and 0 <= start < end else None


def inherited_training(folder: Path) -> str | None:
    """What the card in a folder says of training, for a model that was loaded from there and may have changed since."""
    path = folder / CARD_FILE
    section = training_section(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    if section is None or LOADED_FROM in section:
        return section
    return section.replace(TRAINING_HEADING, f"{TRAINING_HEADING}\n{LOADED_FROM}\n", 1)


def write_card(folder: Path, text: str) -> bool:
    """Write a card, unless a person's is there.

    Returns:
        Whether it was written.
    """
    path = folder / CARD_FILE
    if path.exists() and not is_ours(path.read_text(encoding="utf-8", errors="replace")):
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _sealed(front: str, body: str) -> str:
    seal = f"<!-- Written by difftransformer; edit it freely: a changed card is kept. sha256 {_sum(front + body)} -->\n"
    return front + seal + body


def _sum(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").encode()).hexdigest()


def _summary(config: DiffTransformerConfig, causal: bool) -> str:
    what = "decoder-only language model" if causal else "decoder without its output layer"
    kind = config.attention
    return f"A {what} with {kind.description} ({kind.label}, `{config.attention_type}`; [Differential Transformer]({PAPER}))."


def _layout(config: DiffTransformerConfig) -> str:
    layout, counts = config.head_layout(), count(config)
    options = {
        name: value
        for name, option in config.attention.config_options.items()
        if (value := getattr(config, name)) != option.default
    }
    if config.sliding_window is not None:
        options["sliding_window"] = config.sliding_window
    rows = {
        "attention type": f"`{config.attention_type}`",
        **{name.replace("_", " "): f"`{value}`" for name, value in options.items()},
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "FFN width": config.intermediate_size,
        "heads": layout.num_heads,
        "key/value heads": layout.num_key_value_heads,
        "width of a map": layout.head_dim,
        "width of a value": layout.value_head_dim,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "tied embedding": "yes" if config.tie_word_embeddings else "no",
        "parameters": counts.parameters,
        "of these, attention": counts.attention_parameters,
        "KV bytes/token in bf16": counts.kv_bytes_per_token,
    }
    return _table("## Layout", ((name, f"{v:,}" if isinstance(v, int) else v) for name, v in rows.items()))


def _usage(architecture: str, stock: bool) -> str:
    auto = "AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else "AutoModel"
    lines = ["```python"]
    if not stock:
        lines.append("import difftransformer  # makes the model type known to transformers")
    lines += [f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("FOLDER")', "```"]
    where = "It opens in stock transformers." if stock else "It opens once the package `difftransformer` is imported."
    return "## Use\n\n" + where + "\n\n" + "\n".join(lines) + "\n"


def _training(training: Training) -> str:
    recipe = yaml.safe_dump(_without_places(training.recipe), sort_keys=False)
    return f"{_table(TRAINING_HEADING.strip(), training.figures)}\n```yaml\n{recipe}```\n"


def _without_places(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without the folders of the machine that trained it: a card is made to be shown."""
    plain = dict(recipe)
    if isinstance(plain.get("data"), dict):
        data = {key: value for key, value in plain["data"].items() if key != "folder"}
        for key in ("source", "tokenizer"):
            if isinstance(data.get(key), str) and not data[key].startswith("hf:"):
                data[key] = Path(data[key]).name
        plain["data"] = data
    return plain


def _table(heading: str, rows: Any) -> str:
    lines = "".join(f"| {name} | {value} |\n" for name, value in rows)
    return f"{heading}\n\n| | |\n| --- | --- |\n{lines}"

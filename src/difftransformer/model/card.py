"""The model card: README.md of a saved model.

A card that this package writes contains a line with the sha256 of the rest. A card without that line, or with another sum,
was edited by hand and is never overwritten.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ..errors import ConfigError
from .config import DiffTransformerConfig
from .counts import Counts, count

CARD_FILE = "README.md"
TRAINING_HEADING, NEXT_HEADING = "## Training\n", "## Citation\n"
STARTS = ("depth_scaled_residual", "mimetic_attention", "small_first_logits")
LOADED_FROM = "Of the model that this one was loaded from:"
_SEAL = re.compile(r"<!-- Written by difftransformer; edit it freely: a changed card is kept\. sha256 (\w+) -->\n")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
HEADS = {  # the end of a class's name: what the model is, and its pipeline
    "ForCausalLM": ("decoder-only language model", "text-generation"),
    "ForMaskedLM": ("masked language model", "fill-mask"),
    "ForSequenceClassification": ("classifier of sequences", "text-classification"),
    "ForTokenClassification": ("classifier of tokens", "token-classification"),
    "ForQuestionAnswering": ("model of extractive question answering", "question-answering"),
    "": ("decoder without its output layer", None),
}
# Keys of a recipe: values that become names unless they are data sets of the hub, and what is left out.
PLACES, LEFT_OUT = ("source", "tokenizer", "start_from", "branch_from"), ("folder",)
HUB = ("hf:", "hf-stream:")
OpensWith = Literal["package", "code", "transformers"]
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
    """Training section of a card.

    Attributes:
        figures: Names and formatted values.
        recipe: The recipe as plain data.
    """

    figures: Sequence[tuple[str, str]]
    recipe: Mapping[str, Any]


def model_card(
    config: Any,
    *,
    name: str,
    architecture: str = "DiffTransformerForCausalLM",
    training: Training | str | None = None,
    license: str | None = None,
    opens_with: OpensWith = "package",
    counts: Counts | None = None,
) -> str:
    """Return the text of a card: summary, layout and sizes, how to open the model, and how it was trained.

    Args:
        config: Configuration of a model of this package, or of a family made differential.
        name: Title of the card.
        architecture: Name of the class that was saved.
        training: Recipe and figures, or the training section of another card.
        license: Licence identifier such as "mit" or "apache-2.0", if it is known.
        opens_with: What opens the folder: this package, remote code in it, or stock transformers.
        counts: Sizes of the model; None counts them by formula.

    Raises:
        ConfigError: The licence is not an identifier.
    """
    if license is not None and not _LICENSE.fullmatch(license):
        raise ConfigError(f"license={license!r}: give an identifier in small letters, such as mit or apache-2.0")
    head = next((name for name in HEADS if architecture.endswith(name)), "")
    what, pipeline = HEADS[head]
    front: dict[str, Any] = {"library_name": "transformers"}
    if pipeline:
        front["pipeline_tag"] = pipeline
    if license is not None:
        front["license"] = license
    front["tags"] = ["difftransformer", *config.attention.tags]
    parts = [f"# {name}\n\n{_summary(config, what)}\n", _layout(config, counts), _usage(head, opens_with)]
    if isinstance(training, str):
        parts.append(training)
    elif training is not None:
        recipe = yaml.safe_dump(_without_places(training.recipe), sort_keys=False)
        parts.append(f"{_table(TRAINING_HEADING.strip(), training.figures)}\n```yaml\n{recipe}```\n")
    parts.append(f"{NEXT_HEADING}\n{CITATION}")
    head, body = f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n", "\n".join(parts)
    seal = f"<!-- Written by difftransformer; edit it freely: a changed card is kept. sha256 {_sum(head + body)} -->\n"
    return head + seal + body


def is_ours(text: str) -> bool:
    """Whether a card was written by this package and not changed since."""
    seal = _SEAL.search(text)
    return seal is not None and seal[1] == _sum(text[: seal.start()] + text[seal.end() :])


def training_section(text: str) -> str | None:
    """Return the training section of a card, or None if it has none or was edited by hand."""
    start, end = text.find("\n" + TRAINING_HEADING), text.rfind("\n" + NEXT_HEADING)
    return text[start + 1 : end] if is_ours(text) and 0 <= start < end else None


def inherited_training(folder: Path) -> str | None:
    """Return the training section of a folder's card, for a model that was loaded from there and may have changed since."""
    section = training_section(read_card(folder) or "")
    if section is None or LOADED_FROM in section:
        return section
    return section.replace(TRAINING_HEADING, f"{TRAINING_HEADING}\n{LOADED_FROM}\n", 1)


def read_card(folder: Path) -> str | None:
    """Return the text of a folder's card, or None if there is none."""
    path = folder / CARD_FILE
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def write_card(folder: Path, text: str) -> bool:
    """Write a card unless the folder has one that was edited by hand. Return whether it was written."""
    card = read_card(folder)
    if card is not None and not is_ours(card):
        return False
    (folder / CARD_FILE).write_text(text, encoding="utf-8")
    return True


def save_card(model: Any, folder: Path, *, pushed: bool = False, counts: Counts | None = None) -> None:
    """Write the card of a model that was saved in a folder. Adapters and pushes to the hub get cards of PEFT and transformers.

    Args:
        model: Model of this package, or of a family made differential.
        folder: The folder.
        pushed: Whether the model was pushed to the hub.
        counts: Sizes of the model, for a family; None counts the parameters of a model of this package.
    """
    if folder.is_dir() and not getattr(model, "_hf_peft_config_loaded", False) and not pushed:
        card = model_card(
            model.config,
            name=folder.resolve().name,
            architecture=type(model).__name__,
            training=inherited_training(model.opened_from) if model.opened_from else None,
            opens_with="package" if model._auto_class is None else "code",
            counts=counts,
        )
        write_card(folder, card)


def size_rows(config: Any, counts: Counts | None = None) -> dict[str, int]:
    """Return layout and sizes of a model by name, computed by formula unless they are given."""
    layout, counts = config.head_layout(), counts or count(config)
    return {
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "FFN width": config.intermediate_size,
        "heads": layout.num_heads,
        "key/value heads": layout.num_key_value_heads,
        "width of a map": layout.head_dim,
        "width of a value": layout.value_head_dim,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "parameters": counts.parameters,
        "of these, embedding": counts.embedding_parameters,
        "of these, attention": counts.attention_parameters,
        f"forward FLOPs/token at {counts.context_tokens:,}": counts.forward_flops_per_token,
        f"training FLOPs/token at {counts.context_tokens:,}": counts.train_flops_per_token,
        "KV bytes/token in bf16": counts.kv_bytes_per_token,
    }


def _sum(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").encode()).hexdigest()


def _summary(config: Any, what: str) -> str:
    kind = config.attention
    what = what if getattr(config, "is_causal", True) else f"bidirectional {what.replace('decoder', 'encoder')}"
    return f"A {what} with {kind.description} ({kind.label}, `{config.attention_type}`; [Differential Transformer]({PAPER}))."


def _layout(config: Any, counts: Counts | None) -> str:
    options = {name: option.default for name, option in config.attention.config_options.items()}
    defaults = options | {"qk_norm": False, "sliding_window": None}
    chosen = {name: getattr(config, name, default) for name, default in defaults.items()}
    own = {"attention type": f"`{config.attention_type}`"}
    own |= {name.replace("_", " "): f"`{v}`" for name, v in chosen.items() if v != defaults[name]}
    if isinstance(config, DiffTransformerConfig):
        own["initialization"] = f"`{config.initialization}`"
        own |= {name.replace("_", " "): "yes" for name in STARTS if getattr(config, name)}
        own["embedding multiplier"] = f"{config.embedding_multiplier:g}"
    else:
        own["family"] = f"`{config.family}`: all but attention is the original's"
    own["tied embedding"] = "yes" if config.tie_word_embeddings else "no"
    rows = own | {name: f"{size:,}" for name, size in size_rows(config, counts).items()}
    return _table("## Layout", rows.items())


def _usage(head: str, opens_with: OpensWith) -> str:
    auto = f"AutoModel{head}"
    where = {
        "package": "It opens once the package `difftransformer` is imported.",
        "code": "It opens with the code in this folder, which needs torch and transformers alone, or with the package "
        "`difftransformer`, which is faster and does not run that code.",
        "transformers": "It opens in stock transformers.",
    }[opens_with]
    first = "import difftransformer  # makes the model type known to transformers\n" if opens_with == "package" else ""
    trust = ", trust_remote_code=True" if opens_with == "code" else ""
    code = f'{first}from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER"{trust})\n'
    return f"## Use\n\n{where}\n\n```python\n{code}```\n"


def _without_places(value: Any, key: str = "") -> Any:
    """Remove the folders of the training machine and the URLs of stores from a recipe: cards are published."""
    if isinstance(value, Mapping):
        return {name: _without_places(one, name) for name, one in value.items() if one is None or name not in LEFT_OUT}
    if isinstance(value, list):
        return [_without_places(one, key) for one in value]
    is_place = isinstance(value, str) and (key in PLACES or Path(value).is_absolute())
    return Path(value).name if is_place and not value.startswith(HUB) else value


def _table(heading: str, rows: Any) -> str:
    lines = "".join(f"| {name} | {value} |\n" for name, value in rows)
    return f"{heading}\n\n| | |\n| --- | --- |\n{lines}"

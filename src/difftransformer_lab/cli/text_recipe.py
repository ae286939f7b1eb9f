"""The recipe that `train TEXT` writes for a folder or a file of text."""

from json import dumps
from pathlib import Path

from difftransformer.errors import ConfigError, DataError

from ..recipe_files import read_recipe

SHARES = (0.1, 0.2, 0.3, 0.5)
"""Shares of the documents to hold out; the first that leaves some on both sides is taken."""
RECIPE = """\
# A small model of bytes, to see the whole way first; the guide "Train on my text" says what to change then.
name: {name}
model: {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4}}
data: {{source: {source}, tokenizer: byte, validation_share: {share}}}
training:
  steps: 300
  batch_tokens: 1024
  context_stages: [[0, 128]]
  optimizer: {{learning_rate: 2.0e-3}}
  schedule: {{warmup_steps: 30}}
  validate_every: 50
  validation_windows: 8
  checkpoint_every: 100
evaluation:
  - {{task: perplexity, options: {{text: validation, windows: 64, spread: true}}}}
compare: {{models: [diff, softmax], seeds: 3}}
"""


def is_text(path: Path) -> bool:
    """Whether a path is a folder, or a file of a kind that holds text."""
    from difftransformer.data.text import SUFFIXES

    return path.is_dir() or (path.is_file() and path.name.lower().endswith(SUFFIXES))


def write_recipe(text: Path) -> Path:
    """Write a recipe for a text to the current folder unless there is one, and return its path.

    Raises:
        ConfigError: The folder holds a model, or a file of the recipe's name is not of this text.
        DataError: The text is missing, empty or too short to hold out a part.
    """
    from difftransformer.data.text import check_split

    if (text / "config.json").is_file():
        raise ConfigError(f"{text} holds a model; to start from its weights, set start_from: {text} in a recipe")
    for share in SHARES:
        try:
            check_split(str(text), validation_share=share, seed=0)
            break
        except DataError:
            if share == SHARES[-1]:
                raise
    name = text.resolve().name.partition(".")[0] or "mine"
    path = Path(f"{name}.yaml")
    if path.exists():
        data = read_recipe(path).get("data")
        source = data.get("source") if isinstance(data, dict) else None
        if not isinstance(source, str) or Path(source).resolve() != text.resolve():
            raise ConfigError(
                f"{path} is there and not a recipe for {text} (data.source: {source}); rename it, or the text"
            )
    else:
        path.write_text(RECIPE.format(name=dumps(name), source=dumps(str(text)), share=share), encoding="utf-8")
    return path

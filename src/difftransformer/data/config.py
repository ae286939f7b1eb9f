"""The section `data` of a recipe."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..typed import ASIDE
from .shards import SourceConfig
from .synthetic import PREFIX, synthetic_task
from .tokenizer import BYTE_VOCABULARY, SPECIAL_TOKENS, load_tokenizer

DEFAULT_FOLDER = "shards"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, tokenizer and split of a run.

    Attributes:
        source: "python-stdlib", a folder, a file, or hf:NAME (see `iter_documents`); or synthetic:NAME, which has token ids of
            its own and takes `options` and `split_seed` alone.
        options: Options of a synthetic task (see `synthetic_task`).
        mixture: Sources that are read in place of `source`, each with its weight.
        tokenizer: "bpe" to train a byte-level BPE on the training text, "byte", the folder of a pretrained tokenizer, or
            "ids:N" for token ids from 0 to N - 1 that stand for no text.
        vocab_size: Number of tokens of a trained BPE.
        needle_words: How often the needle sentence of each training city is added to the text that the BPE is trained
            on, so that its words become tokens; 0 to add none.
        validation_share: Share of the documents held out for validation.
        split_seed: Seed of the split.
        folder: Folder for shards; each request gets a subfolder of its own. Or the URL of one that holds them, such as
            s3://bucket/shards.
    """

    source: str = "python-stdlib"
    options: dict[str, Any] = field(default_factory=dict)
    mixture: list[SourceConfig] = field(default_factory=list)
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    needle_words: int = 0
    validation_share: float = 0.02
    split_seed: int = 0
    folder: str = field(default=DEFAULT_FOLDER, metadata=ASIDE)

    def __post_init__(self) -> None:
        if self.source.startswith(PREFIX):
            self._check_synthetic()
        elif self.options:
            raise ConfigError(f"options={self.options}: only a source of the form {PREFIX}NAME has options")
        for one in self.mixture:
            if one.source.startswith(PREFIX):
                raise ConfigError(f"mixture: {one.source} has token ids of its own; make it the source")
        if not 0 < self.validation_share < 1:
            raise ConfigError(f"validation_share={self.validation_share}: give a share between 0 and 1")
        if self.tokenizer == "bpe" and self.vocab_size < BYTE_VOCABULARY:
            raise ConfigError(
                f"vocab_size={self.vocab_size}: a byte-level BPE has at least {BYTE_VOCABULARY} tokens; give more"
            )
        if self.needle_words < 0:
            raise ConfigError(f"needle_words={self.needle_words}: give 0 or more")
        for source, count in Counter(one.source for one in self.mixture).items():
            if count > 1:
                raise ConfigError(f"mixture: {source} is given twice; give each source once, with a weight")
        if self.mixture and self.source != "python-stdlib":
            raise ConfigError(f"source={self.source} is given beside a mixture; make it a source of the mixture")

    def _check_synthetic(self) -> None:
        synthetic_task(self.source, self.options)
        if self.split_seed < 0:
            raise ConfigError(f"split_seed={self.split_seed}: {self.source} is drawn by it; give 0 or more")
        for name in ("tokenizer", "vocab_size", "needle_words", "validation_share"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: {self.source} has token ids of its own; leave {name} out"
                )

    @property
    def request(self) -> dict[str, Any]:
        """Fields that decide the shards of a source."""
        fields = dataclasses.asdict(self)
        return {key: value for key, value in fields.items() if key not in ("folder", "mixture", "options")}

    @property
    def tokenizer_vocabulary(self) -> int:
        """Number of tokens, as far as it is known before the tokenizer is opened."""
        if self.source.startswith(PREFIX):
            return synthetic_task(self.source, self.options).vocab_size + SPECIAL_TOKENS
        is_made_up = self.tokenizer.partition(":")[0] in ("byte", "ids")
        return load_tokenizer(self.tokenizer).vocab_size if is_made_up else self.vocab_size

"""Tokenizers in the Hugging Face format: bytes, a byte-level BPE trained here, or any pretrained tokenizer.

Tokenizers add no special tokens by themselves. The name of a special token in a document is encoded as ordinary text, so a
document cannot forge a document boundary.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from ..errors import ConfigError, DataError
from ..files import write_text_atomically
from ..reading import read_json
from ..typed import short

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = 2  # end of text, pad
BYTE_VOCABULARY = 256 + SPECIAL_TOKENS
MOST_IDS = 2**24

# Names of the end-of-text token in published tokenizers, most reliable first, for those that do not configure it.
_KNOWN_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class Tokenizer:
    """A `tokenizers.Tokenizer` with a document separator.

    Args:
        backend: The tokenizer. Its truncation and padding are turned off.
        end_of_text: Token that separates documents.
        begin_of_text: Token that begins a prompt; `end_of_text` by default.
        pad: Token for padding; the same as `end_of_text` for a tokenizer without one.
        chat_template: Jinja template of a chat model, which is saved with the tokenizer.
        begins_texts: Whether the tokenizer, used as it is, begins each text with `begin_of_text`; `encode` never does.

    Raises:
        DataError: A token is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        end_of_text: str = END_OF_TEXT,
        begin_of_text: str | None = None,
        pad: str = PAD,
        chat_template: str | None = None,
        begins_texts: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend
        self.chat_template, self.begins_texts = chat_template, begins_texts
        self.end_of_text_token = end_of_text
        self.begin_of_text_token = begin_of_text or end_of_text
        self.pad_token = pad
        self.end_of_text = self._id_of(end_of_text)
        self.begin_of_text = self._id_of(self.begin_of_text_token)
        self.pad = self._id_of(pad)

    def _id_of(self, token: str) -> int:
        index = self.backend.token_to_id(token)
        if index is None:
            raise DataError(
                f"the tokenizer has no token {token!r}; name one of its special tokens as eos_token and pad_token "
                "in tokenizer_config.json"
            )
        return index

    @cached_property
    def vocab_size(self) -> int:
        """Number of embedding rows: the largest id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def first_other(self, tokenizer: "Tokenizer") -> tuple[int, str, str] | None:
        """Return the first id that stands for another token in another tokenizer, and the two tokens; None if there is none."""
        own, theirs = (
            {index: token for token, index in one.backend.get_vocab(with_added_tokens=True).items()}
            for one in (self, tokenizer)
        )
        return next(((i, own[i], theirs[i]) for i in sorted(own.keys() & theirs.keys()) if own[i] != theirs[i]), None)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding or recognising special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_sized(self, text: str) -> tuple[list[int], list[int], bool]:
        """Encode a text, and count how many of its bytes each token covers.

        These are not always the token's own bytes: a normaliser may compose, lower or drop characters. Dropped characters count
        with the token before them, else with the first token, or with the end of text if there is no token.

        Returns:
            The ids; the number of bytes for each id and then for the end of text, which sum to the size of the text; and
            whether decoding the ids restores the text.
        """
        encoding = self.backend.encode(text, add_special_tokens=False)
        try:
            spelt = [self.token_bytes[index] for index in encoding.ids]
        except DataError:  # tokens without bytes of their own
            spelt = []
        if b"".join(spelt) == text.encode():
            return encoding.ids, [*map(len, spelt), 0], True
        # Only where a token begins is reliable: the offsets of a composed character end with its first part.
        starts = [0, *(start for start, _ in encoding.offsets[1:])] if encoding.ids else []
        bounds = np.maximum.accumulate([*starts, len(text), len(text)] if starts else [0, len(text)])
        reached = np.cumsum([0, *(len(character.encode()) for character in text)])[bounds]
        return encoding.ids, np.diff(reached).tolist(), self.decode(encoding.ids) == text

    def encode_special(self, text: str) -> list[int]:
        """Encode the text of a chat template, where the name of a special token stands for the token."""
        return self._special_backend.encode(text, add_special_tokens=False).ids

    def encode_after(self, left: str, text: str, advice: str) -> list[int]:
        """Encode `text` as a continuation of `left`, which in some tokenizers differs from `text` alone.

        Raises:
            DataError: The tokenizer does not split between the two. The message ends with `advice`.
        """
        before, whole = self.encode(left), self.encode(left + text)
        if whole[: len(before)] != before:
            raise DataError(
                f"the tokenizer does not split {left[-20:] + text[:20]!r} before {text[:20]!r}, so a prompt that ends there "
                f"has other tokens than the whole text; {advice}"
            )
        return whole[len(before) :]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, in parallel if TOKENIZERS_PARALLELISM allows it."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def _special_backend(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.backend.to_str())

    @property
    def is_of_ids(self) -> bool:
        """Whether the tokens are numbers (see `id_tokenizer`). Every word of a text would be token 0."""
        return bool(self._settings["model"].get("unk_token") == "0")

    @property
    def normalizes(self) -> bool:
        """Whether a normaliser changes texts before they are divided into tokens."""
        return self.backend.normalizer is not None

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids. Special tokens appear by name, and invalid UTF-8 appears as U+FFFD."""
        return self.backend.decode([int(index) for index in ids], skip_special_tokens=False)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self.backend.to_str())
        return settings

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each of the `vocab_size` ids; empty for special tokens and unused ids.

        Raises:
            DataError: The tokenizer is not byte-level and has no byte fallback, so its tokens have no fixed bytes.
        """
        settings = self._settings
        parts = {part.get("type") for key in ("pre_tokenizer", "decoder") for part in _flatten(settings.get(key))}
        if "ByteLevel" in parts:
            byte_of = {character: value for value, character in enumerate(_byte_characters())}
        elif not settings["model"].get("byte_fallback"):
            raise DataError(
                f"the tokenizer (model {settings['model'].get('type')}, decoder parts {sorted(filter(None, parts))}) "
                "is neither byte-level nor has byte fallback, so its tokens have no fixed bytes; use such a tokenizer, "
                "or train a BPE"
            )
        else:
            byte_of = {}
        table = [b""] * self.vocab_size
        added = {token["id"]: token for token in settings["added_tokens"]}
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            if index in added:
                table[index] = b"" if added[index]["special"] else token.encode()
            elif byte_of and all(character in byte_of for character in token):
                table[index] = bytes(byte_of[character] for character in token)
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                table[index] = bytes([int(token[3:5], 16)])
            else:
                table[index] = token.replace("\u2581", " ").encode()
        return table

    def token_byte_lengths(self) -> npt.NDArray[np.int32]:
        """Return the number of bytes of each token, (vocab_size,) int32; 0 for special tokens."""
        return np.fromiter(map(len, self.token_bytes), dtype=np.int32, count=self.vocab_size)

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of everything that determines the ids of a text. Saving does not change it."""
        settings = self._settings
        identity = {key: settings.get(key) for key in ("model", "normalizer", "pre_tokenizer", "decoder")}
        identity["added_tokens"] = sorted((t["id"], t["content"], t["special"]) for t in settings["added_tokens"])
        identity["end_of_text"], identity["pad"] = self.end_of_text, self.pad
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path | str) -> Path:
        """Write a folder that `AutoTokenizer.from_pretrained` opens: `tokenizer.json` and `tokenizer_config.json`.

        Raises:
            DataError: The folder cannot be written to.
        """
        folder = Path(folder)
        configuration = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.begin_of_text_token,
            "eos_token": self.end_of_text_token,
            "pad_token": self.pad_token,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
        }
        try:
            write_text_atomically(folder / "tokenizer.json", self.backend.to_str(pretty=True) + "\n")
            write_text_atomically(folder / "tokenizer_config.json", json.dumps(configuration, indent=2) + "\n")
            if self.chat_template is not None:
                write_text_atomically(folder / CHAT_TEMPLATE_FILE, self.chat_template)
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot write the tokenizer ({error.strerror}); free some space or name another folder"
            ) from error
        return folder

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Open a folder with a `tokenizer.json`, or the file itself.

        The end-of-text token is the `eos_token` of `tokenizer_config.json` beside the file, or else the first known name in
        the vocabulary.

        Raises:
            DataError: There is no such file, it is not a tokenizer, or it has no end-of-text token.
        """
        path = Path(folder)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise DataError(f"{path}: no such tokenizer; name a folder with tokenizer.json, that file, or byte")
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(f"{path}: not a Hugging Face tokenizer ({error}); save it again or name another") from None
        named = _special_tokens(path.with_name("tokenizer_config.json"))
        end_of_text = named.get("eos_token") or next(
            (token for token in _KNOWN_END_OF_TEXT if backend.token_to_id(token) is not None), None
        )
        if end_of_text is None:
            raise DataError(
                f"{path}: no end of text: tokenizer_config.json beside it names no eos_token, and the vocabulary holds "
                f"none of {', '.join(_KNOWN_END_OF_TEXT)}; add eos_token to tokenizer_config.json"
            )
        pad = named.get("pad_token") or (PAD if backend.token_to_id(PAD) is not None else end_of_text)
        template = path.with_name(CHAT_TEMPLATE_FILE)
        chat_template = template.read_text(encoding="utf-8") if template.is_file() else named.get("chat_template")
        # A chat begins with the token that its template names.
        begin = named.get("bos_token") if "bos_token" in (chat_template or "") else None
        return cls(backend, end_of_text=end_of_text, begin_of_text=begin, pad=pad, chat_template=chat_template)


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids are the bytes; id 256 is the end of text and 257 is padding."""
    vocabulary = {character: value for value, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without merges splitting into words changes no id, but it keeps BPE fast.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return _with_special_tokens(backend)


def id_tokenizer(count: int) -> Tokenizer:
    """Return a tokenizer of the ids from 0 to `count` - 1, written as numbers; the end of text and padding follow.

    It is for data made of ids, such as synthetic tasks.
    """
    backend = tokenizers.Tokenizer(models.WordLevel({str(index): index for index in range(count)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_special_tokens(backend)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE in which every digit is a separate token.

    The same texts give the same tokenizer. The vocabulary is smaller than `vocab_size` if the texts have too few words for
    so many merges.

    Args:
        texts: Training documents.
        vocab_size: Total number of tokens, at least 258 (256 bytes, the end of text and padding).

    Raises:
        ConfigError: `vocab_size` is below 258.
    """
    if vocab_size < BYTE_VOCABULARY:
        raise ConfigError(
            f"vocab_size is {vocab_size}; a byte-level BPE needs at least {BYTE_VOCABULARY} "
            "(256 bytes, end of text, padding); raise it or use the byte tokenizer"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return _with_special_tokens(backend)


def load_tokenizer(spec: str) -> Tokenizer:
    """Open the tokenizer that a recipe names.

    Args:
        spec: `byte`; `ids:N` (see `id_tokenizer`); or the folder or `tokenizer.json` of a pretrained tokenizer.

    Raises:
        ConfigError: N is not a number above 0.
        DataError: There is no such tokenizer.
    """
    kind, colon, count = spec.partition(":")
    if kind == "ids" and colon:
        if not (count.isascii() and count.isdigit() and 0 < int(count) <= MOST_IDS):
            raise ConfigError(f"tokenizer={spec}: give ids:N with a number of ids from 1 to {MOST_IDS:,}")
        return id_tokenizer(int(count))
    return byte_tokenizer() if spec == "byte" else Tokenizer.load(spec)


def _with_special_tokens(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, PAD)])
    return Tokenizer(backend)


def _byte_characters() -> list[str]:
    """Return the character that byte-level tokenizers write for each byte: itself if printable, else one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, following = [], 0x100
    for value in range(256):
        characters.append(chr(value if value in printable else following))
        following += value not in printable
    return characters


def _flatten(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not part:
        return []
    inner = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return [part, *(leaf for child in inner for leaf in _flatten(child))]


def _special_tokens(path: Path) -> dict[str, str]:
    """Read `bos_token`, `eos_token`, `pad_token` and `chat_template` of a `tokenizer_config.json`, as far as it has them."""
    if not path.exists():
        return {}
    configuration = read_json(path, error=DataError, advice="save the tokenizer again")
    if not isinstance(configuration, dict):
        raise DataError(f"{path}: expected a JSON object, got {short(configuration)}; save the tokenizer again")
    named = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        token = configuration.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token and not isinstance(token, str):
            raise DataError(f"{path}: {key} is {short(token)}, expected a token's text; save the tokenizer again")
        if token:
            named[key] = token
    if isinstance(configuration.get("chat_template"), str):
        named["chat_template"] = configuration["chat_template"]
    return named

"""A judge that asks a local model of natural language inference (NLI) whether the document entails every sentence."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from difftransformer.data.records import files_sha256
from difftransformer.errors import ConfigError

from .base import Case, Judgment, Unjudged

_MOST_WINDOW_TOKENS = 512
_BATCH_WINDOWS = 16
_HASHED = ("config.json", "tokenizer.json")


class NliJudge:
    """A judge for which an answer is faithful if each of its sentences is entailed by some window of the document.

    Args:
        folder: Folder of a sequence-classification model of transformers in safetensors, with an entailment label.

    Raises:
        ConfigError: The model cannot be opened, or has no such label.
    """

    def __init__(self, folder: str) -> None:
        self.model, self.tokenizer = _opened(folder)
        labels = {int(index): str(label) for index, label in self.model.config.id2label.items()}
        words = ("entailment", "entails")
        entailments = [index for index, label in labels.items() if label.strip().casefold() in words]
        if len(entailments) != 1:
            raise ConfigError(
                f"{folder}: its labels are {', '.join(labels.values())}, none of them entailment; name a model of natural "
                "language inference whose id2label says which is"
            )
        self.entailment = entailments[0]
        positions = getattr(self.model.config, "max_position_embeddings", _MOST_WINDOW_TOKENS)
        self.window_tokens = min(_MOST_WINDOW_TOKENS, positions, self.tokenizer.model_max_length)
        hashed = (path for path in Path(folder).iterdir() if path.name in _HASHED or path.suffix == ".safetensors")
        self.name, self.identity = f"nli:{folder}", f"nli {files_sha256(hashed)}"
        self.rules: Sequence[str] = [
            f"An approximation: an answer counts as faithful when {folder} finds each of its sentences entailed by some "
            f"window of the document ({self.window_tokens} tokens with the sentence, overlapping by a quarter), entailment "
            "being the most probable label. The answer to a question is put behind the question."
        ]

    @torch.inference_mode()
    def judge(self, case: Case) -> Judgment:
        sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n+", case.answer.strip()) if part.strip()]
        if case.question is not None:
            sentences = [f"{case.question.strip()} {case.answer.strip()}"]
        faithful, reasons = True, []
        for sentence in sentences:
            probability, is_entailed = self._entailed(case.document, sentence)
            faithful &= is_entailed
            reasons.append(f"{'entailed' if is_entailed else 'NOT entailed'} ({probability:.2f}): {sentence}")
        return Judgment(faithful=faithful, reasoning="\n".join(reasons))

    def _entailed(self, document: str, sentence: str) -> tuple[float, bool]:
        """Return the largest probability of entailment over windows, and whether it is the top label of any window."""
        room = self.window_tokens - len(self.tokenizer(sentence, add_special_tokens=False)["input_ids"])
        if room < 16:
            raise Unjudged(f"{self.name}: a sentence longer than the model's window of {self.window_tokens} tokens")
        windows = self.tokenizer(
            document,
            sentence,
            truncation="only_first",
            max_length=self.window_tokens,
            stride=room // 4,
            return_overflowing_tokens=True,
            padding=True,
            return_tensors="pt",
        )
        windows.pop("overflow_to_sample_mapping", None)
        best, is_entailed = 0.0, False
        for start in range(0, len(windows["input_ids"]), _BATCH_WINDOWS):
            batch = {name: rows[start : start + _BATCH_WINDOWS] for name, rows in windows.items()}
            probabilities = self.model(**batch).logits.float().softmax(-1)
            best = max(best, float(probabilities[:, self.entailment].max()))
            is_entailed |= bool((probabilities.argmax(-1) == self.entailment).any())
        return best, is_entailed


def _opened(folder: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not Path(folder).is_dir():
        raise ConfigError(f"judge nli:{folder}: no such folder; name the folder of a saved model")
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True, **safe)
        tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
    except Exception as error:  # transformers, safetensors and tokenizers raise many classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"judge nli:{folder}: cannot be opened as a sequence classifier with its tokenizer ({reason}); name a folder with "
            "config.json, safetensors and tokenizer.json"
        ) from None
    return model.eval(), tokenizer

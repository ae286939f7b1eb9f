"""The explorer's page: maps packed into one HTML file with its style and script, which asks no server for anything.

A model is one block of base85 in the page, with a comma for each "<", a raw deflate stream of

    4 bytes     length of the JSON text, little-endian
    JSON        name, tokens, and for each layer its heads, its maps of a head and its lambdas
    n bytes     low bytes of all weights, which are counts of 1 / levels, or of the coarse steps below where levels is null
    n bytes     their high bytes

The weights are ordered (row, layer, head, map, key): row t has t + 1 keys. Rows of one length have weights of one size, which
compress well together.
"""

import base64
import html
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from difftransformer.attention import label
from difftransformer.data import Tokenizer
from difftransformer.errors import ConfigError
from difftransformer.files import write_text_atomically

from .capture import LayerMaps, capture

TOKENS, MOST_TOKENS = 128, 1024
FINE, COARSE = 2048, 503
"""Weights are rounded to 1/2048; in a model that would be larger than MOST_CHARACTERS, to 1 / (503 (1 + |lambda|)). Then the
errors of A1, A2 and A1 - lambda A2 are below 1e-3 with the head's own lambda."""
MOST_CHARACTERS = 1_400_000
DEFAULT_PROMPT = """\
The grass is green. The sky is blue. The sun is yellow.
The special magic Lisbon number is: 42
Here we go. There and back again.
The special magic Oslo number is: 63
The grass is green. The sky is blue.
The special magic Lisbon number is: """
DEFAULT_ANSWER = "42"
NEXT_TOKENS, ANSWER_TOKENS = 5, 8

_STYLE = "width: 100%; height: 900px; border: 0"
_FRAME = (
    f'<iframe srcdoc="{{}}" title="Attention maps" sandbox="allow-scripts allow-downloads" style="{_STYLE}"></iframe>'
)


@dataclass(frozen=True)
class Page:
    """A page of maps. A notebook shows it where it is the value of a cell."""

    html: str

    def save(self, path: Path | str) -> Path:
        """Write the page, and return its path. Its folder is made if it is missing."""
        path = Path(path)
        write_text_atomically(path, self.html)
        return path

    def _repr_html_(self) -> str:
        return _FRAME.format(html.escape(self.html))


def maps(
    model: Any,
    tokenizer: Any,
    prompt: str | None = None,
    beside: Any = None,
    *,
    answer: str | None = None,
    tokens: int = TOKENS,
    names: tuple[str, ...] = (),
) -> Page:
    """Draw the attention maps of every head for a text: A1, A2 and A1 - lambda A2, or the one map of other models.

    The text is one row that begins with the token that begins a text, like a document in training.

    Args:
        model: A causal language model with the interface of transformers.
        tokenizer: Its tokenizer, as transformers or `difftransformer.data` opens it.
        prompt: The text; None takes one in which a number must be found.
        beside: A second model to compare with, or a pair (model, tokenizer) if it has another tokenizer.
        answer: A part of the text that the models should find. It is marked, and the page opens with heads that read it; by
            default they are heads that read what the first model predicts.
        tokens: Most tokens of the text, up to 1024; the rest is cut off, which no map of a causal model depends on.
        names: What to call the models on the page; their architectures by default.

    Raises:
        ConfigError: The prompt has no token, tokens is out of range, or a token is not in the model's vocabulary.
        EvaluationError: See `capture.capture`.
    """
    if not 2 <= tokens <= MOST_TOKENS:
        raise ConfigError(f"tokens={tokens}: give 2 to {MOST_TOKENS}")
    text, answer = (DEFAULT_PROMPT, DEFAULT_ANSWER) if prompt is None else (prompt, answer)
    pairs = [(model, tokenizer)]
    if beside is not None:
        pairs.append(beside if isinstance(beside, tuple) else (beside, tokenizer))
    blocks = []
    for index, (network, own) in enumerate(pairs):
        ids, begins = _encoded(own, text)
        positions = getattr(network.config.get_text_config(), "max_position_embeddings", None) or tokens
        shown = ids[: min(tokens, positions)]
        _check_vocabulary(network, shown)
        layers, pieces = capture(network, torch.tensor([shown], device=network.device)), _pieces(own, shown)
        following, continued = _predicted(network, own, shown, positions)
        facts = {
            "name": names[index] if index < len(names) else type(network).__name__,
            "kind": label(getattr(network.config, "attention_type", None) or type(network).__name__),
            "tokens": pieces,
            "whole": len(ids),
            "begins": begins,
            "next": following,
            "answer": continued if len(shown) == len(ids) else None,
            "mark": _span(pieces[begins:], text, answer, int(begins)),
        }
        blocks.append(packed(layers, facts))
    return Page(_filled(blocks))


def packed(layers: list[LayerMaps], facts: Mapping[str, Any]) -> str:
    """Pack a model into a base85 block. Its JSON text holds `facts` and the layers."""
    rows = range(len(layers[0].rows))
    lambdas = [_short(one.lam) for one in layers]
    shapes = [
        {"heads": one.rows[0].shape[0], "maps": one.rows[0].shape[1], "lambda": lam}
        for one, lam in zip(layers, lambdas, strict=True)
    ]
    for fine in (FINE, None):
        parts = [
            np.rint(one.rows[t] * (fine or _coarse(lam, t))).ravel()
            for t in rows
            for one, lam in zip(layers, lambdas, strict=True)
        ]
        counts = np.concatenate(parts)
        planes = counts.astype("<u2").view(np.uint8).reshape(-1, 2)
        header = json.dumps({**facts, "levels": fine, "layers": shapes}, separators=(",", ":")).encode()
        weights = planes[:, 0].tobytes() + planes[:, 1].tobytes()
        both = [_deflated(weights, strategy) for strategy in (zlib.Z_FILTERED, zlib.Z_RLE)]  # sharp maps, flat ones
        stream = _deflated(len(header).to_bytes(4, "little") + header, zlib.Z_DEFAULT_STRATEGY, zlib.Z_SYNC_FLUSH)
        block = base64.b85encode(stream + min(both, key=len)).decode().replace("<", ",")
        if len(block) <= MOST_CHARACTERS:
            break
    return block


def _deflated(content: bytes, strategy: int, end: int = zlib.Z_FINISH) -> bytes:
    """Return a raw deflate stream, or with another `end` the first part of one."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    return stream.compress(content) + stream.flush(end)


def _coarse(lambdas: list[list[float]] | None, row: int) -> Any:
    """Return the coarse levels of a row, which can be multiplied with a row of maps, (H, maps, keys)."""
    own = np.array([head[min(row, len(head) - 1)] for head in lambdas or [[0.0]]])
    return np.ceil(COARSE * (1 + np.abs(own)))[:, None, None]


def _short(lam: Any) -> list[list[float]] | None:
    return None if lam is None else [[round(float(value), 4) for value in head] for head in lam]


def _filled(blocks: list[str]) -> str:
    here = Path(__file__).parent
    files = ("page.html", "../theme.css", "style.css", "explorer.js")
    page, theme, style, script = ((here / name).read_text(encoding="utf-8") for name in files)
    models = "\n".join(f'<script type="text/plain" class="packed">{block}</script>' for block in blocks)
    for place, content in (("/* style */", theme + style), ("<!-- models -->", models), ("/* script */", script)):
        page = page.replace(place, content, 1)
    return page


def _encoded(tokenizer: Any, text: str) -> tuple[list[int], bool]:
    """Return the ids of a text with the token that begins it, and whether there is such a token."""
    if isinstance(tokenizer, Tokenizer):
        begin, ids = tokenizer.begin_of_text, tokenizer.encode(text)
    else:
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise ConfigError("the prompt has no tokens; give a text")
    return ([*ids], False) if begin is None else ([begin, *ids], True)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.decode(ids)
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return the text of each token: what it adds to the text before it, since some tokenizers drop a space at the start."""
    pieces, before = [], ""
    for count in range(1, len(ids) + 1):
        whole = _decoded(tokenizer, ids[:count])
        added = whole[len(before) :] if whole.startswith(before) else ""
        pieces.append(added or _decoded(tokenizer, ids[count - 1 : count]))
        before = whole
    return pieces


@torch.no_grad()
def _predicted(network: Any, tokenizer: Any, ids: list[int], positions: int) -> tuple[list[list[Any]], str]:
    """Return the likeliest next tokens with their probabilities, and the model's continuation to the end of the line."""
    logits = network(input_ids=torch.tensor([ids], device=network.device), use_cache=False).logits[0].float()
    best = logits.softmax(-1).topk(min(NEXT_TOKENS, logits.shape[-1]))
    following = [
        [[_decoded(tokenizer, [token]), round(share, 3)] for token, share in zip(*row, strict=True)]
        for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    longer, before = [*ids], _decoded(tokenizer, ids)
    while len(longer) < min(positions, len(ids) + ANSWER_TOKENS):
        longer.append(int(logits[-1].argmax()))
        if "\n" in _decoded(tokenizer, longer)[len(before) :]:
            break
        logits = network(input_ids=torch.tensor([longer], device=network.device), use_cache=False).logits[0].float()
    return following, _decoded(tokenizer, longer)[len(before) :].split("\n")[0].strip()


def _span(pieces: list[str], text: str, answer: str | None, first: int) -> list[int] | None:
    """Return the first and the last token of the answer in the text, counted with `first` tokens before it."""
    if not answer or answer not in text:
        return None
    begin = text.index(answer)
    ends = np.cumsum([len(piece) for piece in pieces])
    start, stop = (int(np.searchsorted(ends, place, "right")) for place in (begin, begin + len(answer) - 1))
    if stop == len(pieces) or not text.startswith("".join(pieces[: stop + 1])):
        return None
    return [first + start, first + stop]


def _check_vocabulary(network: Any, ids: list[int]) -> None:
    rows = network.get_input_embeddings().num_embeddings
    if max(ids) >= rows:
        raise ConfigError(
            f"the tokenizer gives token {max(ids)}, and the model has {rows}; they do not belong together"
        )

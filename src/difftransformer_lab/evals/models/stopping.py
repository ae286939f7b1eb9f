"""Where a continuation ends, and its text up to there."""

from bisect import bisect_left
from collections.abc import Sequence

from difftransformer.data import Tokenizer


def stop_tokens(tokenizer: Tokenizer, ending: str | None = None) -> tuple[int, ...]:
    """Return the tokens that end a continuation: special tokens and, if given, tokens with `ending` in their text."""
    added = tokenizer.backend.get_added_tokens_decoder()
    stops = {index for index, token in added.items() if token.special}
    if ending is not None:
        stops |= {index for index in range(tokenizer.vocab_size) if ending in tokenizer.decode([index])}
    return tuple(sorted(stops))


def closing_tokens(tokenizer: Tokenizer, ending: str) -> tuple[int, ...]:
    """Return the tokens with text before `ending`, such as "}.\\n" in the tokenizers of many models.

    They end a continuation, and are part of it.
    """
    texts = (tokenizer.decode([index]).partition(ending) for index in range(tokenizer.vocab_size))
    return tuple(index for index, (before, end, _) in enumerate(texts) if end and before.strip())


def text_until(tokenizer: Tokenizer, ids: Sequence[int], ending: str | None = None) -> tuple[str, int]:
    """Return a continuation's text up to `ending`, and the number of its tokens that this takes.

    The ending may be spread over several tokens that are not stop tokens.
    """
    text = tokenizer.decode(ids)
    if ending is None or ending not in text:
        return text, len(ids)
    tokens = bisect_left(range(len(ids) + 1), True, key=lambda count: ending in tokenizer.decode(ids[:count]))
    return text.partition(ending)[0], tokens

"""Any causal language model of transformers as a `LanguageModel`."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Tokenizer
from ..errors import EvaluationError
from . import taps
from .lm_harness import run_harness
from .prefix import CHUNK_TOKENS, PrefixCache, can_be_cut, growing_cache, shared_tokens
from .segments import row_sums
from .task import Choice, Continuation, Harness, LastRow, Loss, Magnitudes, Maps, Quantized, Request, tokens_of

_WORTH_SHARING, _STEP_TOKENS = 0.25, 32
"""Prompts go one by one through the prefix cache instead of side by side from this share of common tokens on, and where that
saves more than the steps of decoding cost, each as much as so many tokens of a prompt."""

_WRITTEN_OUT_TOKENS = 4096
"""Most tokens of rows side by side where the maps are formed: n x n memory."""

UNBOUNDED = 2**31
"""A context that refuses nothing."""

Answers = Iterator[tuple[int, Any]]


class CausalLanguageModel:
    """Answers requests with a model: rows of one length side by side, or prompts that share a beginning one after another.

    No row is ever padded, so an answer depends on its request alone, to the rounding of the kernels.

    Args:
        model: A causal language model of transformers' form, on any device.
        tokenizer: Its tokenizer.
        context_tokens: Most tokens of a row; the model's positions where None.
        batch_tokens: Most tokens of rows side by side.
        prefix_caching: Whether keys and values of prompts that start the same are computed once.
        hf_tokenizer: The tokenizer as transformers gives it, for lm-eval.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        context_tokens: int | None = None,
        batch_tokens: int = 16_384,
        prefix_caching: bool = True,
        hf_tokenizer: Any = None,
    ) -> None:
        self.model, self.tokenizer, self.batch_tokens = model.eval(), tokenizer, batch_tokens
        self.prefix_caching, self.hf_tokenizer = prefix_caching, hf_tokenizer
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or UNBOUNDED
        self.context_tokens = int(context_tokens or positions)

    def answer(self, requests: Sequence[Request]) -> Answers:
        """See `LanguageModel.answer`.

        Raises:
            EvaluationError: a request longer than the context, or one that the model cannot answer.
        """
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            self._check(request)
            kind: Any = type(request)
            if isinstance(request, Quantized):
                kind = (kind, request.bits, request.granularity, request.weights, request.activations)
            groups[kind].append(index)
        for kind, indices in groups.items():
            answer = _ANSWERS[kind[0] if isinstance(kind, tuple) else kind]
            found = answer(self, [requests[index] for index in indices])
            while True:
                with torch.inference_mode():  # left while the caller has the answer
                    pair = next(found, None)
                if pair is None:
                    break
                yield indices[pair[0]], pair[1]

    def _check(self, request: Request) -> None:
        inner = request.request if isinstance(request, Quantized) else request
        longest = max(map(len, inner.rows)) if isinstance(inner, Magnitudes) else tokens_of(inner)
        if isinstance(inner, Continuation):
            longest += inner.tokens
        elif isinstance(inner, Choice):
            longest += max(map(len, inner.options))
        elif isinstance(inner, Loss):
            longest -= 1  # the last token is a target alone
        if longest > self.context_tokens:
            raise EvaluationError(
                f"a prompt with its answer takes {longest} tokens, and the model's context has {self.context_tokens}; "
                "ask for less"
            )

    def _losses(self, requests: Sequence[Loss]) -> Answers:
        for indices, ids in self._side_by_side([request.ids for request in requests]):
            rows = self._row_losses(ids)
            for index, row in zip(indices, rows, strict=True):
                yield index, row[requests[index].first - 1 :].tolist()

    def _row_losses(self, ids: Tensor) -> Tensor:
        """(B, T) to (B, T - 1), in parts of the row so that no more than a part's logits are ever held."""
        length, parts = ids.shape[1] - 1, []
        cache = growing_cache(self.model) if length > CHUNK_TOKENS else None
        for begin in range(0, length, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, length)
            options = {} if cache is None else {"past_key_values": cache}
            logits = self.model(input_ids=ids[:, begin:end], use_cache=cache is not None, **options).logits
            targets = ids[:, begin + 1 : end + 1]
            parts.append(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none"))
            parts[-1] = parts[-1].view_as(targets).cpu()
        return torch.cat(parts, 1)

    def _continuations(self, requests: Sequence[Continuation]) -> Answers:
        prompts = [request.prompt for request in requests]
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        steps = sum(request.tokens for request in requests)
        total, shared = sum(map(len, prompts)), shared_tokens(prompts[index] for index in order)
        if self.prefix_caching and shared >= max(_WORTH_SHARING * total, _STEP_TOKENS * steps):
            cache = self._prefix_cache()
            for index in order:
                yield index, self._continue_one(cache, requests[index])
            return
        for indices, ids in self._side_by_side(prompts):
            made = self._continue_rows(ids, [requests[index] for index in indices])
            yield from zip(indices, made, strict=True)

    def _continue_one(self, cache: PrefixCache, request: Continuation) -> list[int]:
        made: list[int] = []
        cache.start()
        while len(made) < request.tokens:
            token = int(cache.next_logits((*request.prompt, *made)).argmax())
            if request.ends(made, token):
                break
            made.append(token)
        return made

    def _continue_rows(self, ids: Tensor, requests: Sequence[Continuation]) -> list[list[int]]:
        """Rows side by side; one that is at its end leaves the batch."""
        made: list[list[int]] = [[] for _ in requests]
        # A model whose layers are of another kind makes the cache that it wants.
        cache = growing_cache(self.model) if can_be_cut(self.model) else None
        left, inputs = list(range(len(requests))), ids
        while left:
            outputs = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens = outputs.past_key_values, outputs.logits[:, -1].argmax(-1)
            going = []
            for place, (row, token) in enumerate(zip(left, tokens.tolist(), strict=True)):
                if not requests[row].ends(made[row], token):
                    made[row].append(token)
                    if len(made[row]) < requests[row].tokens:
                        going.append(place)
            if 0 < len(going) < len(left):
                kept = torch.tensor(going, device=tokens.device)
                cache.batch_select_indices(kept)
                tokens = tokens[kept]
            left, inputs = [left[place] for place in going], tokens.unsqueeze(1)
        return made

    def _choices(self, requests: Sequence[Choice]) -> Answers:
        cache = self._prefix_cache()
        for index in sorted(range(len(requests)), key=lambda index: requests[index].prompt):
            request = requests[index]
            cache.start()
            yield index, _walk(cache, request.prompt, request.options)

    def _last_rows(self, requests: Sequence[LastRow]) -> Answers:
        for indices, ids in self._side_by_side([request.prompt for request in requests]):
            weights = taps.last_row_weights(self.model, ids)
            for row, index in enumerate(indices):
                yield index, row_sums([layer[row] for layer in weights], requests[index].edges)

    def _maps(self, requests: Sequence[Maps]) -> Answers:
        for index, request in enumerate(requests):
            yield index, taps.head_maps(self.model, self._tensor([request.prompt]), request.layers, request.heads)

    def _magnitudes(self, requests: Sequence[Magnitudes]) -> Answers:
        for index, request in enumerate(requests):
            yield index, taps.magnitudes(self.model, [self._tensor([row]) for row in request.rows], request.largest)

    def _harness(self, requests: Sequence[Harness]) -> Answers:
        for index, request in enumerate(requests):
            yield index, run_harness(self.model, self.hf_tokenizer, request)

    def _quantized(self, requests: Sequence[Quantized]) -> Answers:
        first = requests[0]
        coarse = first.bits < taps.UNTOUCHED_BITS
        inner = CausalLanguageModel(
            self.model,
            self.tokenizer,
            context_tokens=self.context_tokens,
            batch_tokens=min(self.batch_tokens, _WRITTEN_OUT_TOKENS) if coarse else self.batch_tokens,
            # A step of a whole head or tensor would depend on which tokens are already cached.
            prefix_caching=self.prefix_caching and not (coarse and first.granularity != "row"),
            hf_tokenizer=self.hf_tokenizer,
        )
        with (
            taps.quantized_linears(self.model, first.weights, first.activations),
            taps.quantized_logits(self.model, first.bits, first.granularity),
        ):
            yield from inner.answer([request.request for request in requests])

    def _prefix_cache(self) -> PrefixCache:
        return PrefixCache(self.model, enabled=self.prefix_caching)

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self.model.device)

    def _side_by_side(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Rows of one length, at most batch_tokens of them at once: their places and ids (B, T)."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            by_length[len(row)].append(index)
        for length, indices in by_length.items():
            count = max(1, self.batch_tokens // max(1, length))
            for begin in range(0, len(indices), count):
                chosen = indices[begin : begin + count]
                yield chosen, self._tensor([rows[index] for index in chosen])


def _walk(cache: PrefixCache, prompt: tuple[int, ...], options: Sequence[tuple[int, ...]]) -> int:
    """The option that greedy decoding reaches among the tokens that lead to one; where one token does, nothing is computed."""
    left, path = list(range(len(options))), list(prompt)
    for place in range(max(map(len, options))):
        allowed = sorted({options[index][place] for index in left})
        best = int(cache.next_logits(path)[allowed].argmax()) if len(allowed) > 1 else 0
        chosen = allowed[best]
        path.append(chosen)
        left = [index for index in left if options[index][place] == chosen]
        if len(left) == 1:
            break
    return left[0]


_ANSWERS: dict[type, Callable[[CausalLanguageModel, Sequence[Any]], Answers]] = {
    Loss: CausalLanguageModel._losses,
    Continuation: CausalLanguageModel._continuations,
    Choice: CausalLanguageModel._choices,
    LastRow: CausalLanguageModel._last_rows,
    Maps: CausalLanguageModel._maps,
    Magnitudes: CausalLanguageModel._magnitudes,
    Harness: CausalLanguageModel._harness,
    Quantized: CausalLanguageModel._quantized,
}

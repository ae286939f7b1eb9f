"""Any causal language model of transformers as a `LanguageModel`."""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from difftransformer.data import Tokenizer
from difftransformer.errors import EvaluationError

from ..probes import LastRow, Magnitudes, Maps, Probe
from ..probes.magnitudes import magnitudes
from ..probes.maps import head_maps, last_row_weights, row_sums
from ..requests import Answers, Choice, Continuation, Loss, Predictions, Request, ScoredContinuation, TooLong
from .lengths import LengthDependence
from .prefix import CHUNK_TOKENS, PrefixCache, can_be_cut, common_prefixes, goes_on, growing_cache
from .quantized import UNTOUCHED_BITS, quantized_linears, quantized_logits

_WORTH_SHARING, _STEP_TOKENS = 0.25, 32
"""Use the prefix cache when prompts share at least this share of their tokens and the saving exceeds the cost of unbatched
decoding, where one step of decoding costs as much as this number of prompt tokens."""

_RUN_OVER_START = 4
"""A run of prompts with a common prefix ends when it has cost this many times what it costs to compute the prefix again."""

_WRITTEN_OUT_TOKENS = 4096
"""Most tokens of a batch where the maps are formed: n x n memory."""

_MOST_LOGITS = 2**28
"""Most logits of a batch: 1 GiB in fp32."""

logger = logging.getLogger(__name__)

Kinds = dict[type, Callable[[Sequence[Any]], Answers]]
"""What answers each kind of requests."""

UNBOUNDED = 2**31
"""A context that refuses nothing."""


class CausalLanguageModel:
    """Answers requests and probes with a model: rows of equal length in batches, or prompts with a common prefix in sequence.

    No prompt is padded, and rows of a model whose keys depend on their length are computed whole (`LengthDependence`), so an
    answer depends on its request only, up to the rounding of the kernels.

    Args:
        model: A causal language model with the interface of transformers, on any device.
        context_tokens: Most tokens of a row; None means the model's positions.
        batch_tokens: Most tokens of a batch.
        prefix_caching: Whether to compute keys and values of a common prefix only once.
        hf_tokenizer: The tokenizer as transformers opens it, for lm-eval.

    Attributes:
        bound: `context_tokens` where that is fewer than the model's positions, else None.
        is_whole: Whether every row is computed whole, for each of its tokens anew.
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
        self.bound = self.context_tokens if self.context_tokens < positions else None
        self._lengths = LengthDependence(self.model, self.context_tokens)
        self.is_whole = self._lengths.found
        if self.is_whole:
            logger.info("its keys depend on the length of a row: every row is computed whole, which takes longer")

    def answer(self, requests: Sequence[Request]) -> Answers:
        """Answer every request. See `LanguageModel`.

        Raises:
            EvaluationError: A request is longer than the context.
        """
        kinds: Kinds = {Loss: self._losses, Predictions: self._predictions, Choice: self._choices}
        kinds |= {Continuation: self._continuations, ScoredContinuation: self._continuations}
        yield from self._by_kind(requests, kinds)

    def parts(self, requests: Sequence[Any]) -> list[list[int]]:
        """Return the places of the requests that are computed together: in a batch, or one after the other with a prefix.

        Raises:
            EvaluationError: A request is longer than the context.
        """
        parts = []
        for kind, indices in self._groups(requests).items():
            own_parts = [[place] for place in range(len(indices))]
            chosen = [requests[index] for index in indices]
            if kind in (Loss, Predictions):
                own_parts = self._equal_lengths([request.ids for request in chosen], self._whole_tokens)
            elif kind is LastRow:
                own_parts = self._equal_lengths([request.prompt for request in chosen], self._last_row_tokens)
            elif kind is Choice and self.prefix_caching:
                own_parts = _runs(chosen)
            elif kind in (Continuation, ScoredContinuation):
                prompts = [request.prompt for request in chosen]
                own_parts = _runs(chosen) if self._shares(chosen) else self._equal_lengths(prompts)
            parts += [[indices[place] for place in part] for part in own_parts]
        return parts

    def probe(self, probes: Sequence[Probe]) -> Answers:
        """Answer every probe.

        Raises:
            EvaluationError: A probe is longer than the context, or the model's attention cannot be observed.
        """
        kinds: Kinds = {LastRow: self._last_rows, Maps: self._maps, Magnitudes: self._magnitudes}
        yield from self._by_kind(probes, kinds)

    def independently(self) -> AbstractContextManager[None]:
        """Let no pass depend on the rows of earlier ones, which some rotary tables remember."""
        return self._lengths.forgotten()

    @contextmanager
    def watched(self, tell: Callable[[float], None]) -> Iterator[None]:
        """Call `tell` whenever a layer has done its part, with the tokens of its rows divided by the number of layers."""
        decoder = getattr(self.model, "get_decoder", lambda: self.model)()
        # The first list holds the layers; lists inside layers, such as experts, come later.
        layers = next((part for part in decoder.modules() if isinstance(part, torch.nn.ModuleList)), ())

        def done(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and hidden.ndim == 3:
                tell(hidden.shape[0] * hidden.shape[1] / len(layers))

        hooks = [layer.register_forward_hook(done) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def quantized(self, bits: int, granularity: str, weights: str, activations: str) -> Iterator["CausalLanguageModel"]:
        """Open the same model under coarser numbers: see `quantized_logits` and `quantized_linears` for the arguments."""
        coarse = copy.copy(self)
        if bits < UNTOUCHED_BITS:
            coarse.batch_tokens = min(self.batch_tokens, _WRITTEN_OUT_TOKENS)
            # The step size of a whole head or tensor would depend on which tokens are already cached.
            coarse.prefix_caching = self.prefix_caching and granularity == "row"
        with quantized_linears(self.model, weights, activations), quantized_logits(self.model, bits, granularity):
            yield coarse

    def _groups(self, requests: Sequence[Any]) -> dict[type, list[int]]:
        """Return the places of the requests of each kind, none of them longer than the context."""
        groups: dict[type, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            tokens = getattr(request, "row_tokens", 0)  # a task of lm-eval has its own rows
            if tokens > self.context_tokens:
                raise TooLong(
                    f"a prompt with its answer takes {tokens} tokens, and the model's context has {self.context_tokens}"
                )
            groups[type(request)].append(index)
        return groups

    def _by_kind(self, requests: Sequence[Any], kinds: Kinds) -> Answers:
        groups = self._groups(requests)
        for kind in groups.keys() - kinds.keys():
            names = ", ".join(one.__name__ for one in kinds)
            raise EvaluationError(f"a {kind.__name__} cannot be answered; choose one of {names}")
        for kind, indices in groups.items():
            pairs = kinds[kind]([requests[index] for index in indices])
            while True:
                with torch.inference_mode(), self.independently():  # left while the caller has the answer
                    pair = next(pairs, None)
                if pair is None:
                    break
                yield indices[pair[0]], pair[1]

    def _losses(self, requests: Sequence[Loss]) -> Answers:
        for indices, ids in self._batches([request.ids for request in requests], self._whole_tokens):
            rows = self._row_losses(ids)
            for index, row in zip(indices, rows, strict=True):
                yield index, row[requests[index].first - 1 :].tolist()

    def _row_losses(self, ids: Tensor) -> Tensor:
        """Return losses (B, T - 1) of rows (B, T)."""
        parts, begin = [], 1
        for logits in self._row_logits(ids[:, :-1]):
            targets = ids[:, begin : begin + logits.shape[1]]
            losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
            parts.append(losses.view_as(targets).cpu())
            begin += logits.shape[1]
        return torch.cat(parts, 1)

    def _predictions(self, requests: Sequence[Predictions]) -> Answers:
        for indices, ids in self._batches([request.ids for request in requests], self._whole_tokens):
            tokens = torch.cat([logits.argmax(-1).cpu() for logits in self._row_logits(ids)], 1)
            for index, row in zip(indices, tokens, strict=True):
                yield index, row[list(requests[index].places)].tolist()

    def _row_logits(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the logits of rows (B, T), part by part, so that only one part is held at a time."""
        parts = self._parts_of(ids)
        if len(parts) == 1:
            yield from self.model(input_ids=ids, use_cache=False).logits.split(CHUNK_TOKENS, 1)
            return
        cache = growing_cache(self.model)
        for part in parts:
            yield self.model(input_ids=part, past_key_values=cache, use_cache=True).logits

    def _parts_of(self, ids: Tensor) -> Sequence[Tensor]:
        """Divide rows (B, T) into what is computed in one pass each."""
        is_divisible = ids.shape[1] > CHUNK_TOKENS and not self.is_whole and goes_on(self.model)
        parts: Sequence[Tensor] = ids.split(CHUNK_TOKENS, 1) if is_divisible else (ids,)
        return parts

    def _continuations(self, requests: Sequence[Continuation]) -> Answers:
        if self._shares(requests):
            cache = PrefixCache(self.model, enabled=True)
            for index in sorted(range(len(requests)), key=lambda index: requests[index].prompt):
                yield index, self._continue_one(cache, requests[index])
            return
        for indices, ids in self._batches([request.prompt for request in requests]):
            yield from zip(indices, self._continue_rows(ids, [requests[index] for index in indices]), strict=True)

    def _shares(self, requests: Sequence[Continuation]) -> bool:
        """Whether the prompts share so much that a common prefix is computed once, and their answers one by one."""
        prompts = sorted(request.prompt for request in requests)
        steps, total = sum(request.tokens for request in requests), sum(map(len, prompts))
        enough = max(_WORTH_SHARING * total, _STEP_TOKENS * steps)
        return self.prefix_caching and self._can_be_cut and sum(common_prefixes(prompts)) >= enough

    def _continue_one(self, cache: PrefixCache, request: Continuation) -> Any:
        made: list[int] = []
        cache.start()
        losses = None
        if isinstance(request, ScoredContinuation):
            logits = cache.continued_logits(request.prompt, request.right[:-1])
            losses = F.cross_entropy(logits, self._tensor([request.right])[0], reduction="none").tolist()
        while request.take(made, int(cache.next_logits((*request.prompt, *made)).argmax())):
            pass
        return made if losses is None else {"ids": made, "losses": losses}

    def _continue_rows(self, ids: Tensor, requests: Sequence[Continuation]) -> list[Any]:
        """Continue rows in a batch; a finished row leaves it."""
        made: list[list[int]] = [[] for _ in requests]
        right = [request.right for request in requests if isinstance(request, ScoredContinuation)]
        losses: list[list[float]] = []
        # A model with other kinds of layers creates its own cache.
        cache: Any = growing_cache(self.model) if self._can_be_cut else None
        left, inputs = list(range(len(requests))), ids
        while left:
            for part in self._parts_of(inputs):
                kept = {} if self.is_whole else {"past_key_values": cache}
                outputs = self.model(input_ids=part, use_cache=not self.is_whole, logits_to_keep=1, **kept)
                cache = outputs.get("past_key_values")
                if cache is None and not self.is_whole:
                    name = type(self.model).__name__
                    raise EvaluationError(f"{name} returns no cache, so it cannot continue a text; choose another task")
            tokens = outputs.logits[:, -1].argmax(-1)
            if right and not losses:
                losses = self._losses_of(right, ids, outputs.logits[:, -1:], cache)
            answers = enumerate(zip(left, tokens.tolist(), strict=True))
            going = [place for place, (row, token) in answers if requests[row].take(made[row], token)]
            rest = torch.tensor(going, device=tokens.device, dtype=torch.long)
            if 0 < len(going) < len(left) and not self.is_whole:
                cache.batch_select_indices(rest)
            left, made_now = [left[place] for place in going], tokens[rest].unsqueeze(1)
            inputs = torch.cat([inputs[rest], made_now], 1) if self.is_whole else made_now
        return [{"ids": one, "losses": of_right} for one, of_right in zip(made, losses, strict=True)] if right else made

    def _losses_of(self, right: Sequence[tuple[int, ...]], ids: Tensor, first: Tensor, cache: Any) -> list[list[float]]:
        """Return the losses of given continuations of rows (B, T), in one pass after the rows' own.

        Args:
            right: The continuations, of 1 token or more.
            ids: The rows.
            first: Logits (B, 1, V) after the rows.
            cache: Keys and values of the rows, which are left as they are.
        """
        lengths = sorted({len(one) for one in right})
        if self.is_whole and len(lengths) > 1:
            found: dict[int, list[float]] = {}
            for length in lengths:
                rows = [row for row, one in enumerate(right) if len(one) == length]
                own = self._losses_of([right[row] for row in rows], ids[rows], first[rows], cache)
                found |= dict(zip(rows, own, strict=True))
            return [found[row] for row in range(len(right))]
        most = lengths[-1]
        # What stands behind the end of a shorter one changes nothing before it.
        targets = self._tensor([[*one, *one[-1:] * (most - len(one))] for one in right])
        logits = first
        if most > 1 and self._can_be_cut:
            rest = self.model(input_ids=targets[:, :-1], past_key_values=cache, use_cache=True).logits
            cache.crop(1 - most)
            logits = torch.cat([first, rest], 1)
        elif most > 1:
            whole = torch.cat([ids, targets[:, :-1]], 1)
            logits = self.model(input_ids=whole, use_cache=False, logits_to_keep=most).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return [row[: len(one)] for row, one in zip(losses.tolist(), right, strict=True)]

    def _choices(self, requests: Sequence[Choice]) -> Answers:
        cache = PrefixCache(self.model, enabled=self.prefix_caching, whole=self.is_whole)
        for index in sorted(range(len(requests)), key=lambda index: requests[index].prompt):
            request = requests[index]
            cache.start()
            yield index, _walk(cache, request.prompt, request.options)

    def _last_rows(self, requests: Sequence[LastRow]) -> Answers:
        for indices, ids in self._batches([request.prompt for request in requests], self._last_row_tokens):
            weights = last_row_weights(self.model, ids, whole=self.is_whole)
            for row, index in enumerate(indices):
                yield index, row_sums([layer[row] for layer in weights], requests[index].edges)

    def _maps(self, requests: Sequence[Maps]) -> Answers:
        for index, request in enumerate(requests):
            yield index, head_maps(self.model, self._tensor([request.prompt]), request.layers, request.heads)

    def _magnitudes(self, requests: Sequence[Magnitudes]) -> Answers:
        for index, request in enumerate(requests):
            yield index, magnitudes(self.model, [self._tensor([row]) for row in request.rows], request.largest)

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self.model.device)

    @property
    def _can_be_cut(self) -> bool:
        return can_be_cut(self.model) and not self.is_whole

    @property
    def _last_row_tokens(self) -> int:
        return min(self.batch_tokens, _WRITTEN_OUT_TOKENS) if self.is_whole else self.batch_tokens

    @property
    def _whole_tokens(self) -> int:
        return min(self.batch_tokens, _MOST_LOGITS // self.model.config.get_text_config().vocab_size)

    def _batches(
        self, rows: Sequence[Sequence[int]], most_tokens: int | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield batches of rows of equal length: the places of the rows and their ids (B, T)."""
        for chosen in self._equal_lengths(rows, most_tokens):
            yield chosen, self._tensor([rows[index] for index in chosen])

    def _equal_lengths(self, rows: Sequence[Sequence[int]], most_tokens: int | None = None) -> list[list[int]]:
        """Return the places of the rows of each batch, of at most batch_tokens or `most_tokens`, or of one row."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            by_length[len(row)].append(index)
        batches = []
        for length, indices in by_length.items():
            count = max(1, (most_tokens or self.batch_tokens) // max(1, length))
            batches += [indices[begin : begin + count] for begin in range(0, len(indices), count)]
        return batches


def _runs(requests: Sequence[Continuation | Choice]) -> list[list[int]]:
    """Divide prompts, in the order of their tokens, into runs within which a common prefix is worth keeping."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].prompt)
    runs: list[list[int]] = []
    cost = 0
    for index, shared in zip(order, common_prefixes([requests[index].prompt for index in order]), strict=True):
        request = requests[index]
        steps = request.row_tokens - len(request.prompt)
        if not runs or cost >= _RUN_OVER_START * shared:
            runs.append([])
            cost = 0
        runs[-1].append(index)
        cost += len(request.prompt) - shared + _STEP_TOKENS * steps
    return runs


def _walk(cache: PrefixCache, prompt: tuple[int, ...], options: Sequence[tuple[int, ...]]) -> int:
    """Return the option that greedy decoding reaches among the tokens that lead to one; a single such token costs nothing."""
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

"""Models that are no networks: one that knows every answer, and some that know nothing."""

import math
import re
from collections import defaultdict

import torch

from difftransformer_lab.evals.probes import LastRow
from difftransformer_lab.evals.probes.maps import row_sums
from difftransformer_lab.evals.requests import Continuation, Loss, ScoredContinuation


class TensorModel:
    """Answers requests by three functions of whole tensors, which a test states in a line each."""

    context_tokens = 10**6

    def answer(self, requests):
        for kind in (Loss, Continuation, LastRow):
            by_length = defaultdict(list)
            for index, request in enumerate(requests):
                if isinstance(request, kind):
                    by_length[len(request.ids if kind is Loss else request.prompt)].append(index)
            for chosen in by_length.values():
                yield from zip(chosen, self._answers(kind, [requests[index] for index in chosen]), strict=True)

    probe = answer

    def _answers(self, kind, requests):
        if kind is Loss:
            ids = torch.tensor([request.ids for request in requests])
            return [
                row[request.first - 1 :]
                for row, request in zip(self.nll(ids[:, :-1], ids[:, 1:]).tolist(), requests, strict=True)
            ]
        prompts = torch.tensor([request.prompt for request in requests])
        if kind is Continuation:
            return self.continue_greedily(prompts, requests[0].tokens).tolist()
        rows = self.last_token_weights(prompts)
        return [row_sums([row], request.edges) for row, request in zip(rows, requests, strict=True)]


class Telling:
    """Beside another of these models: tells how likely right answers are, where that model only continues."""

    def answer(self, requests):
        for index, answer in super().answer(requests):
            if isinstance(requests[index], ScoredContinuation):
                right = torch.tensor([requests[index].right])
                answer = {"ids": answer, "losses": self.nll(right, right)[0].tolist()}
            yield index, answer


class Oracle(TensorModel):
    """Reads the prompt as text: the last line is the question, and its sentence stands in the context with the answer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def nll(self, input_ids, targets):
        return torch.zeros(targets.shape)

    def continue_greedily(self, prompts, tokens):
        rows = []
        for prompt in prompts.tolist():
            context, question = self.tokenizer.decode(prompt).rsplit("\n", 1)
            found = re.findall(rf"^{re.escape(question)} (\d+)$", context, re.MULTILINE)
            assert len(found) == 1, (question, found)
            rows.append(
                self.tokenizer.encode(f"{question} {found[0]}\n")[len(self.tokenizer.encode(question)) :][:tokens]
            )
        return torch.tensor(rows)

    def last_token_weights(self, prompts):
        raise AssertionError("retrieval asks for continuations alone")


class Guesser(Oracle):
    """Says a uniformly random number of as many digits."""

    def __init__(self, tokenizer, digits):
        super().__init__(tokenizer)
        self.digits = digits
        self.generator = torch.Generator().manual_seed(0)

    def continue_greedily(self, prompts, tokens):
        numbers = torch.randint(10**self.digits, (len(prompts),), generator=self.generator).tolist()
        question = "\nThe special magic Paris number is:"
        start = len(self.tokenizer.encode(question))
        texts = [self.tokenizer.encode(f"{question} {number:0{self.digits}d}")[start:] for number in numbers]
        return torch.tensor(texts)[:, :tokens]


class Uniform(TensorModel):
    """The same probability for every token of the vocabulary, the same weight for every position."""

    def __init__(self, vocab_size, heads=3):
        self.vocab_size, self.heads = vocab_size, heads

    def nll(self, input_ids, targets):
        return torch.full(targets.shape, math.log(self.vocab_size), dtype=torch.float64)

    def continue_greedily(self, prompts, tokens):
        raise AssertionError("loss and allocation ask for no continuation")

    def last_token_weights(self, prompts):
        batch, length = prompts.shape
        return torch.full((batch, self.heads, length), 1 / length)

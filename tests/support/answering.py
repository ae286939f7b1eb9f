"""Models that write a text of one's choosing after each prompt, and count what they were asked."""

from contextlib import contextmanager

import torch

from difftransformer.data import byte_tokenizer
from tests.support import tiny_folders


class Writer:
    """Continues a prompt with what a function of its text says, and then ends the text."""

    def __init__(self, write, context_tokens=100_000, tokenizer=None):
        self.tokenizer, self.write, self.context_tokens = tokenizer or byte_tokenizer(), write, context_tokens
        self.prompt_tokens = context_tokens
        self.prompts = []

    @contextmanager
    def quantized(self, bits, granularity, weights, activations):
        yield self

    def answer(self, requests):
        for index, request in enumerate(requests):
            prompt = self.tokenizer.decode(request.prompt)
            self.prompts.append(prompt)
            made = []
            for token in [*self.tokenizer.encode(self.write(prompt)), self.tokenizer.end_of_text]:
                if not request.take(made, token):
                    break
            yield index, made


def answers_to(model, requests):
    """Return all answers, in the order of the requests."""
    answers = dict(model.answer(requests))
    return [answers[index] for index in range(len(requests))]


def tiny_model(folder):
    """Save a network with the byte tokenizer into a folder, as a command opens it."""
    tiny_folders.saved(folder, max_position_embeddings=512)
    return str(folder)


def plain_choice(model, prompt, options):
    """Masks all logits but those that lead to an option, a token at a time, without any cache."""
    path = ()
    while path not in options:
        logits = model(input_ids=torch.tensor([(*prompt, *path)])).logits[0, -1]
        masked = torch.full_like(logits, -torch.inf)
        for option in options:
            if option[: len(path)] == path:
                masked[option[len(path)]] = logits[option[len(path)]]
        path = (*path, int(masked.argmax()))
    return options.index(path)

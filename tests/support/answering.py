"""Models that write a text of one's choosing after each prompt, and count what they were asked."""

from contextlib import contextmanager

import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data import byte_tokenizer


class Writer:
    """Continues a prompt with what a function of its text says, and then ends the text."""

    def __init__(self, write, context_tokens=100_000):
        self.tokenizer, self.write, self.context_tokens = byte_tokenizer(), write, context_tokens
        self.prompt_tokens = context_tokens
        self.prompts = []

    @contextmanager
    def quantized(self, bits, granularity, weights, activations):
        yield self

    def answer(self, requests):
        for index, request in enumerate(requests):
            prompt = self.tokenizer.decode(request.prompt)
            self.prompts.append(prompt)
            ids = [*self.tokenizer.encode(self.write(prompt)), self.tokenizer.end_of_text][: request.tokens]
            stops = [place for place, token in enumerate(ids) if request.ends(ids[:place], token)]
            yield index, ids[: stops[0]] if stops else ids


def answers_to(model, requests):
    """Return all answers, in the order of the requests."""
    answers = dict(model.answer(requests))
    return [answers[index] for index in range(len(requests))]


def tiny_model(folder):
    """Save a network with the byte tokenizer into a folder, as a command opens it."""
    torch.manual_seed(1)
    config = DiffTransformerConfig(
        vocab_size=258,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=257,
    )
    DiffTransformerForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return str(folder)

"""A decoder of transformers' form as a `LanguageModel`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..model import DiffTransformerForCausalLM
from ..model.nll import next_token_nll


class DecoderLanguageModel:
    """Answers the evaluations with a trained model, in parts of at most `batch_tokens` tokens.

    Args:
        model: The model, on any device.
        batch_tokens: Tokens of one forward pass.
    """

    def __init__(self, model: DiffTransformerForCausalLM, *, batch_tokens: int = 16_384) -> None:
        self.model, self.batch_tokens = model.eval(), batch_tokens

    @torch.inference_mode()
    def nll(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """See `LanguageModel.nll`."""
        device = self.model.device
        return torch.cat(
            [
                next_token_nll(self.model, inputs.to(device), outputs.to(device)).cpu()
                for inputs, outputs in zip(self._parts(input_ids), self._parts(targets), strict=True)
            ]
        )

    @torch.inference_mode()
    def continue_greedily(self, prompts: Tensor, tokens: int) -> Tensor:
        """See `LanguageModel.continue_greedily`. Every token asked for is made: an end of text does not stop a row."""
        return torch.cat([self._continue(part.to(self.model.device), tokens).cpu() for part in self._parts(prompts)])

    def _continue(self, prompts: Tensor, tokens: int) -> Tensor:
        cache, inputs, made = None, prompts, []
        for _ in range(tokens):
            outputs = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, inputs = outputs.past_key_values, outputs.logits.argmax(-1)
            made.append(inputs)
        return torch.cat(made, dim=1)

    @torch.inference_mode()
    def last_token_weights(self, prompts: Tensor) -> Tensor:
        """See `LanguageModel.last_token_weights`: A1 - lambda A2 for differential attention."""
        rows = []
        with self._eager():
            for part in self._parts(prompts):
                ids = part.to(self.model.device)
                before = self.model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1)
                last = self.model(
                    input_ids=ids[:, -1:],
                    past_key_values=before.past_key_values,
                    use_cache=True,
                    output_attentions=True,
                )
                rows.append(torch.cat([weights[:, :, -1] for weights in last.attentions], dim=1).float().cpu())
        return torch.cat(rows)

    def _parts(self, ids: Tensor) -> tuple[Tensor, ...]:
        return ids.split(max(1, self.batch_tokens // ids.shape[1]))

    @contextmanager
    def _eager(self) -> Iterator[None]:
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

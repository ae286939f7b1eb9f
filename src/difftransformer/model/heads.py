"""The model with other output layers, and the table of all its classes.

Classification of sequences and tokens and question answering are transformers' own heads over `DiffTransformerModel`, for
causal models and encoders. `DiffTransformerForMaskedLM` is for encoders (`is_causal=False`).
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from ..errors import ConfigError
from .config import DiffTransformerConfig
from .modeling import DiffTransformerForCausalLM, DiffTransformerModel
from .pretrained import DiffTransformerPreTrainedModel


class DiffTransformerForSequenceClassification(GenericForSequenceClassification, DiffTransformerPreTrainedModel):  # type: ignore[misc]
    """A linear layer on the hidden state of each row's last token that is not padding; a reward model with one label."""


class DiffTransformerForTokenClassification(GenericForTokenClassification, DiffTransformerPreTrainedModel):  # type: ignore[misc]
    """A linear layer on the hidden state of every token."""


class DiffTransformerForQuestionAnswering(GenericForQuestionAnswering, DiffTransformerPreTrainedModel):  # type: ignore[misc]
    """Logits of the first and the last token of an answer."""


class DiffTransformerForMaskedLM(DiffTransformerPreTrainedModel):
    """The encoder with the output layer that predicts masked tokens.

    Raises:
        ConfigError: config.is_causal is True.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: DiffTransformerConfig) -> None:
        if config.is_causal:
            raise ConfigError(
                "is_causal=True: a masked token must see the tokens after it; set is_causal=False, "
                "or use DiffTransformerForCausalLM"
            )
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute the logits of every token, and the loss if labels are given.

        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: See `DiffTransformerModel`.
            labels: (B, T) token ids of the masked places, -100 elsewhere. The loss is the mean in nats per masked token.
            **kwargs: output_attentions, output_hidden_states, cu_seq_lens_q, num_items_in_batch, return_dict.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


MODELS: dict[str, type[DiffTransformerPreTrainedModel]] = {  # by their Auto class
    "AutoModel": DiffTransformerModel,
    "AutoModelForCausalLM": DiffTransformerForCausalLM,
    "AutoModelForMaskedLM": DiffTransformerForMaskedLM,
    "AutoModelForSequenceClassification": DiffTransformerForSequenceClassification,
    "AutoModelForTokenClassification": DiffTransformerForTokenClassification,
    "AutoModelForQuestionAnswering": DiffTransformerForQuestionAnswering,
}

"""Classification, question answering and the masked language model, for decoders and bidirectional encoders."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto import modeling_auto

import difftransformer
from difftransformer import DiffTransformerForMaskedLM
from difftransformer.attention import VARIANTS
from difftransformer.errors import ConfigError
from difftransformer.model import count
from tests.support import independent_model
from tests.support.tiny_models import scramble, shape_of, tiny, tiny_config, tokens

HEADS = {
    "CausalLM": "CAUSAL_LM",
    "MaskedLM": "MASKED_LM",
    "SequenceClassification": "SEQUENCE_CLASSIFICATION",
    "TokenClassification": "TOKEN_CLASSIFICATION",
    "QuestionAnswering": "QUESTION_ANSWERING",
}
LABELS = {
    "CausalLM": {"labels": tokens(2, 7)},
    "SequenceClassification": {"labels": torch.tensor([2, 0])},
    "TokenClassification": {"labels": tokens(2, 7) % 3},
    "QuestionAnswering": {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([2, 6])},
}


def with_head(head, seed=0, **fields):
    torch.manual_seed(seed)
    return scramble(getattr(difftransformer, f"DiffTransformerFor{head}")(tiny_config(**fields)), seed).eval()


def encoder(attention_type):
    return with_head("MaskedLM", attention_type=attention_type, is_causal=False, embedding_multiplier=3.3)


@pytest.mark.parametrize("head", HEADS)
def test_transformers_tables_have_our_classes(head):
    names = getattr(modeling_auto, f"MODEL_FOR_{HEADS[head]}_MAPPING_NAMES")
    assert names["difftransformer"] == f"DiffTransformerFor{head}"
    auto = getattr(transformers, f"AutoModelFor{head}")
    made = auto.from_config(tiny_config(is_causal=head != "MaskedLM"))
    assert type(made) is getattr(difftransformer, f"DiffTransformerFor{head}")


@pytest.mark.parametrize("head", LABELS)
def test_the_twin_is_llama(head):
    """Outputs and loss of the plain Transformer with each head, against Llama's class with the multiplied embedding."""
    fields = {"attention_type": "softmax", "num_key_value_heads": 2, "tie_word_embeddings": False}
    ours = with_head(head, num_labels=3, embedding_multiplier=3.3, **fields)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "pad_token_id", "tie_word_embeddings", "rope_parameters", "num_labels")
    config = LlamaConfig(rms_norm_eps=1e-5, **{name: getattr(ours.config, name) for name in names})
    theirs = getattr(transformers, f"LlamaFor{head}")(config).eval()
    # Llama calls the base model of its question answering `transformer`.
    state = {
        name.replace("model.", f"{theirs.base_model_prefix}."): tensor * (3.3 if "embed" in name else 1)
        for name, tensor in ours.state_dict().items()
    }
    theirs.load_state_dict(state)
    ids = tokens(2, 7)
    ids[1, 5:] = 0  # padding on the right
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    found, expected = (model(**inputs, **LABELS[head]) for model in (ours, theirs))
    torch.testing.assert_close(found.loss, expected.loss)
    for name in expected:
        if name.endswith("logits"):
            real = ... if expected[name].dim() < 3 and name == "logits" else ids != 0
            torch.testing.assert_close(found[name][real], expected[name][real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("side", "attention_type"),
    [("left", "diff"), ("right", "diff"), *((side, kind) for side in ("both", "holes") for kind in VARIANTS)],
)
def test_a_padded_batch_equals_the_equations_row_by_row(side, attention_type):
    model, lengths, width = encoder(attention_type), (4, 7, 1), 9
    ids, mask = tokens(3, width), torch.zeros(3, width, dtype=torch.long)  # padding holds any tokens
    places = []
    for row, length in enumerate(lengths):
        place = torch.arange(length) + {"left": width - length, "right": 0, "both": 1, "holes": 1}[side]
        place[2:] += side == "holes"
        places.append(place)
        mask[row, place] = 1
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        for row, place in enumerate(places):
            real, everyone = ids[row, place], torch.ones(len(place), len(place), dtype=torch.bool)
            expected, _, _ = independent_model.run(
                model.state_dict(), shape_of(model.config), real, positions=place, allowed=everyone
            )
            assert (padded[row, place] - expected).abs().max() <= 1e-5 * expected.abs().max()
            if side != "holes":
                assert (padded[row, place] - model(real[None]).logits[0]).abs().max() <= 1e-5 * expected.abs().max()


def test_packed_rows_of_an_encoder():
    model, parts = encoder("diff"), [tokens(1, length, seed=length) for length in (4, 6)]
    packed = model(torch.cat(parts, 1), position_ids=torch.cat([torch.arange(4), torch.arange(6)])[None]).logits
    apart = torch.cat([model(part).logits for part in parts], 1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


def test_the_masked_loss_is_the_mean_over_masked_tokens():
    model, ids = encoder("diff"), tokens(2, 7)
    labels = torch.full_like(ids, -100)
    labels[0, 2], labels[1, 5], labels[1, 0] = 7, 9, 11
    out = model(ids, labels=labels)
    log_p = out.logits.log_softmax(-1)
    expected = -(log_p[0, 2, 7] + log_p[1, 5, 9] + log_p[1, 0, 11]) / 3
    torch.testing.assert_close(out.loss, expected)


def test_an_encoder_does_not_generate(tmp_path):
    encoder("diff").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is_causal=False: a language model that generates"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    model = tiny()
    model.config.is_causal = False
    with pytest.raises(ConfigError, match="neither has a cache nor generates"):
        model.generate(tokens(1, 3), max_new_tokens=2)
    assert model(tokens(1, 3)).past_key_values is None


def test_refusals():
    with pytest.raises(ConfigError, match="is_causal=True: a masked token must see"):
        DiffTransformerForMaskedLM(tiny_config())
    with pytest.raises(ConfigError, match="sliding_window=4 with is_causal=False"):
        tiny_config(is_causal=False, sliding_window=4)
    for cls in (type(tiny_config()), DiffTransformerForMaskedLM):
        with pytest.raises(ConfigError, match="`import difftransformer` registers"):
            cls.register_for_auto_class()


def test_every_token_of_an_encoder_sees_all():
    causal, encoder = (count(tiny_config(is_causal=value), context_tokens=64) for value in (True, False))
    layout = tiny_config().head_layout()
    seen = 2 * layout.map_flops_per_pair() * (64 - 65 / 2)  # two layers; the causal mean is 32.5 keys
    assert encoder.forward_flops_per_token - causal.forward_flops_per_token == seen


@pytest.mark.parametrize("head", [head for head in HEADS if head != "CausalLM"])
def test_saved_and_opened(head, tmp_path):
    model = with_head(head, is_causal=False, num_labels=3)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, f"AutoModelFor{head}").from_pretrained(tmp_path)
    ids = tokens(2, 7)
    assert all(torch.equal(*pair) for pair in zip(again(ids).to_tuple(), model(ids).to_tuple(), strict=True))
    card = (tmp_path / "README.md").read_text()
    assert f"from transformers import AutoModelFor{head}\n" in card
    assert "A bidirectional " in card

"""The embedding multiplier in everything that transformers does: against Llama, and equations, on multiplied embeddings."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerForSequenceClassification,
    DiffTransformerModel,
)
from difftransformer.attention import VARIANTS
from tests.support import independent_model
from tests.support.generation import WAYS, greedy
from tests.support.tiny_models import BASE, VOCABULARY, shape_of, tiny, tokens

FACTOR = 3.3
IDS = tokens(2, 9)


def multiplied(kind="softmax", **fields):
    fields = {"embedding_multiplier": FACTOR, "tie_word_embeddings": False} | fields
    return tiny(attention_type=kind, **fields).double()


def llama(model):
    """transformers' Llama, with the embedding of a softmax model times the factor; float64."""
    sizes = {name: BASE[name] for name in BASE if name != "initialization"}
    stock = LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=False)).double().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.embed_tokens.weight"] *= FACTOR
    stock.load_state_dict(state)
    return stock


def equations(model, ids):
    """Logits and hidden states by the equations, row by row."""
    found = [independent_model.run(model.state_dict(), shape_of(model.config), row)[:2] for row in ids]
    hidden = [torch.stack(rows) for rows in zip(*(states for _, states in found), strict=True)]
    return torch.stack([logits for logits, _ in found]), hidden


def close(a, b):
    return (a - b).abs().max() <= 1e-6 * b.abs().max()  # Llama rotates by angles in fp32


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", VARIANTS)
def test_logits_and_hidden_states_are_those_of_the_equations(kind, tied):
    """The first hidden state is what the first layer reads, as in transformers' Granite."""
    model = multiplied(kind, tie_word_embeddings=tied)
    expected, hidden = equations(model, IDS)
    found = model(IDS, output_hidden_states=True)
    assert (found.logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(found.hidden_states[0], FACTOR * model.get_input_embeddings()(IDS))
    for ours, theirs in zip(found.hidden_states, hidden, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    given = model(inputs_embeds=model.get_input_embeddings()(IDS))
    assert torch.equal(given.logits, found.logits)


def test_gradients_are_llamas_times_the_factor():
    model = multiplied()
    stock = llama(model)
    for network in (model, stock):
        network(IDS, labels=IDS).loss.backward()
    ours, theirs = dict(model.named_parameters()), dict(stock.named_parameters())
    for name, parameter in ours.items():
        scale = FACTOR if "embed" in name else 1
        assert close(parameter.grad, scale * theirs[name].grad), name


@torch.no_grad()
def test_generation():
    model, mask = multiplied(), torch.ones_like(IDS)
    embeddings = model.get_input_embeddings()(IDS)
    expected = greedy(llama(model), IDS, 12, attention_mask=mask)
    assert expected.unique().numel() > 3
    for way in WAYS.values():
        assert torch.equal(greedy(model, IDS, 12, attention_mask=mask, **way), expected)
        found = model.generate(inputs_embeds=embeddings, max_new_tokens=12, do_sample=False, **way)
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mean_resizing", [True, False])
def test_more_tokens(tied, mean_resizing):
    """Old tokens keep their logits, and a new one's row is multiplied and starts as embeddings do."""
    model = multiplied("diff", tie_word_embeddings=tied, hidden_size=256, initialization="fan_in")
    before = model(IDS).logits
    model.resize_token_embeddings(VOCABULARY + 40, mean_resizing=mean_resizing)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert close(model(IDS).logits[..., :VOCABULARY], before)
    new = torch.arange(VOCABULARY, VOCABULARY + 40)[None]
    rows = model.get_input_embeddings().weight[VOCABULARY:]
    assert torch.equal(model(new, output_hidden_states=True).hidden_states[0][0], FACTOR * rows)
    if not mean_resizing:
        for weight in (rows, model.lm_head.weight[VOCABULARY:]):
            assert weight.std().item() == pytest.approx(1 / 16, rel=5 / (2 * weight.numel()) ** 0.5)


@torch.no_grad()
def test_replaced_embeddings_are_multiplied():
    model = multiplied()
    new = torch.nn.Embedding(VOCABULARY, 32, dtype=torch.float64)
    model.set_input_embeddings(new)
    assert close(model(IDS).logits, llama(model)(IDS).logits)


@torch.no_grad()
def test_saved_and_opened_by_every_class(tmp_path):
    model = tiny(initialization="fan_in", embedding_multiplier=1.7)  # not the one of its width
    model.save_pretrained(tmp_path)
    expected = model.model(IDS).last_hidden_state
    for kind in (DiffTransformerForCausalLM, DiffTransformerModel, DiffTransformerForSequenceClassification):
        opened = kind.from_pretrained(tmp_path)
        assert opened.config.embedding_multiplier == 1.7
        assert torch.equal(opened.base_model(IDS).last_hidden_state, expected)
    stated = DiffTransformerForCausalLM.from_pretrained(tmp_path, embedding_multiplier=1.0)
    assert torch.equal(stated(IDS, output_hidden_states=True).hidden_states[0], model.get_input_embeddings()(IDS))


def test_configurations():
    fan_in, normal = (
        {"initialization": name, "hidden_size": 144, "num_attention_heads": 4} for name in ("fan_in", "normal")
    )
    assert DiffTransformerConfig(**fan_in).embedding_multiplier == 12
    assert DiffTransformerConfig(**normal).embedding_multiplier == 1
    for fields in (fan_in, normal):
        config = DiffTransformerConfig(**fields, embedding_multiplier=2.5)
        for again in (config.twin(), DiffTransformerConfig.from_dict(config.to_diff_dict())):
            assert (again.embedding_multiplier, again.initialization) == (2.5, fields["initialization"])

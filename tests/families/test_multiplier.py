"""Embedding multipliers in layouts without one: folded to the bit, or refused where the embedding is the output layer too."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerForCausalLM
from difftransformer.errors import ConfigError
from difftransformer.families import convert_folder, load_microsoft_state, microsoft_state, upcycle_folder
from difftransformer_lab.cli.main import main
from tests.support.public_modules import stock
from tests.support.tiny_models import tiny, tokens

FACTOR = 32**0.5  # not a power of two: products are rounded
KINDS = {"diffllama": {"attention_type": "diff", "head_norm": "plain"}, "llama": {"attention_type": "softmax"}}
IDS = tokens(2, 20)


def multiplied(to, **fields):
    return tiny(**KINDS[to] | {"embedding_multiplier": FACTOR, "tie_word_embeddings": False} | fields)


@torch.no_grad()
@pytest.mark.parametrize(
    ("to", "dtype", "tied"),
    [
        ("diffllama", torch.float32, True),
        ("diffllama", torch.bfloat16, False),
        ("llama", torch.float32, False),
        ("llama", torch.bfloat16, True),
    ],
)
def test_there_and_back_to_the_bit(to, dtype, tied, tmp_path):
    model = multiplied(to, tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "theirs", to=to, untie=tied)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert stock.config.model_type == to
    assert not stock.config.tie_word_embeddings
    first = model(IDS, output_hidden_states=True)
    assert torch.equal(stock.get_input_embeddings()(IDS), first.hidden_states[0])
    assert torch.equal(stock.lm_head.weight, model.lm_head.weight)
    if dtype == torch.float32:
        assert (stock(IDS).logits - first.logits).abs().max() < 1e-5 * first.logits.abs().max()

    convert_folder(tmp_path / "theirs", tmp_path / "back", to="difftransformer")
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back")
    assert (back.config.embedding_multiplier, back.config.tie_word_embeddings) == (1.0, False)
    assert torch.equal(back(IDS).logits, first.logits)
    convert_folder(tmp_path / "back", tmp_path / "again", to=to)
    names = ("config.json", "model.safetensors")
    assert all((tmp_path / "again" / n).read_bytes() == (tmp_path / "theirs" / n).read_bytes() for n in names)


@pytest.mark.parametrize("to", KINDS)
def test_tied_embeddings_are_refused_in_one_line(to, tmp_path, fails):
    multiplied(to, tie_word_embeddings=True).save_pretrained(tmp_path / "ours")
    for verb in ("convert", "export"):
        error = fails(verb, tmp_path / "ours", tmp_path / "theirs", "--to", to)
        assert "embedding_multiplier=5.65685 with tie_word_embeddings=True" in error
        assert "--untie" in error
        assert not (tmp_path / "theirs").exists()


@torch.no_grad()
def test_export_unties_and_its_card_says_so(tmp_path):
    model = multiplied("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "llama", "--untie"]) == 0
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    assert (stock(IDS).logits - model(IDS).logits).abs().max() < 1e-5 * model(IDS).logits.abs().max()
    card = (tmp_path / "theirs" / "README.md").read_text()
    assert "| tied embedding | no |" in card
    assert f"| parameters | {sum(p.numel() for p in stock.parameters()):,} |" in card


@torch.no_grad()
def test_untying_alone_keeps_the_function(tmp_path):
    model = multiplied("llama", tie_word_embeddings=True, embedding_multiplier=1.0)
    model.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "theirs", to="llama", untie=True)
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    assert stock.lm_head.weight is not stock.get_input_embeddings().weight
    assert torch.equal(stock.lm_head.weight, model.lm_head.weight)
    assert torch.equal(stock.get_input_embeddings().weight, model.lm_head.weight)


def test_untying_what_stays_tied_is_refused(tmp_path):
    stock().save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="--untie with --to difftransformer"):
        convert_folder(tmp_path / "theirs", tmp_path / "ours", to="difftransformer", untie=True)
    tiny().save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--untie"]) == 2


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
def test_microsofts_layout(kind, dtype):
    model = tiny(attention_type=kind, embedding_multiplier=FACTOR, tie_word_embeddings=False).to(dtype)
    state = microsoft_state(model)
    with pytest.raises(ConfigError, match=r"^embedding_multiplier=5\.65685: .*expected embedding_multiplier=1\.0$"):
        load_microsoft_state(state, model.config)
    plain = tiny(attention_type=kind, tie_word_embeddings=False).config
    back = load_microsoft_state(state, plain)
    assert torch.equal(back(IDS).logits, model(IDS).logits)
    assert all(torch.equal(tensor, state[name]) for name, tensor in microsoft_state(back).items())


@torch.no_grad()
def test_microsofts_layout_of_a_tied_model():
    model = tiny(embedding_multiplier=FACTOR)
    with pytest.raises(ConfigError, match="untie them"):
        microsoft_state(model)
    back = load_microsoft_state(microsoft_state(model, untie=True), tiny(tie_word_embeddings=False).config)
    assert torch.equal(back(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("to", ["diff", "softmax"])
def test_weights_of_another_layout_have_no_multiplier(to, tmp_path):
    """Whatever the default start of a new model is: config.json states the multiplier, and it is 1."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).save_pretrained(tmp_path / "llama")
    upcycle_folder(tmp_path / "llama", tmp_path / "upcycled", to=to)
    stock().save_pretrained(tmp_path / "diffllama")
    convert_folder(tmp_path / "diffllama", tmp_path / "converted", to="difftransformer")
    for name in ("upcycled", "converted"):
        document = json.loads((tmp_path / name / "config.json").read_text())
        assert (document["initialization"], document["embedding_multiplier"]) == ("normal", 1.0)

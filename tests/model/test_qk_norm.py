"""Models with QK norm: against transformers' Qwen3, and every way of running a model against its plain forward pass."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config, Qwen3ForCausalLM, StaticCache

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.attention import VARIANTS
from difftransformer.errors import ConfigError
from difftransformer.families import convert_folder
from difftransformer.families.llama import from_llama
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.probes.hooks import combined, observing_maps, written_out
from tests.support.tiny_models import BASE, tiny, tiny_config, tokens

SHAPE = {"num_attention_heads": 8, "head_dim": 6, "num_key_value_heads": 4, "qk_norm": True, "rms_norm_eps": 1e-3}


def model_of(kind, **fields):
    return tiny(attention_type=kind, **SHAPE | fields)


def close(a, b):
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("groups", [8, 2])
def test_the_twin_is_qwen3(groups):
    """The same weights by the same names: logits, loss, gradients and generated tokens."""
    ours = model_of("softmax", num_key_value_heads=groups, tie_word_embeddings=False).double()
    fields = {name: getattr(ours.config, name) for name in (*BASE, "num_key_value_heads", "head_dim", "rms_norm_eps")}
    rotary = {"rope_type": "default", "rope_theta": 10_000.0}
    config = Qwen3Config(**fields, rope_parameters=rotary, tie_word_embeddings=False, bos_token_id=None)
    theirs = Qwen3ForCausalLM(config).double().eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "labels": ids.where(mask.bool(), -100)}
    a, b = (model(ids, **given) for model in (ours, theirs))
    assert close(a.logits[mask.bool()], b.logits[mask.bool()])
    assert close(a.loss, b.loss)
    a.loss.backward(), b.loss.backward()
    for name, parameter in theirs.named_parameters():
        assert close(ours.get_parameter(name).grad, parameter.grad), name
    greedy = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(ids[1:], **greedy), theirs.generate(ids[1:], **greedy))


@pytest.mark.parametrize("kind", VARIANTS)
@torch.no_grad()
def test_caches_padding_and_packed_documents(kind):
    model, ids = model_of(kind), tokens(2, 13)
    whole = model(ids).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        parts = [
            model(ids[:, a:b], past_key_values=cache, cache_position=torch.arange(a, b)).logits
            for a, b in ((0, 7), (7, 8), (8, 13))
        ]
        assert close(torch.cat(parts, 1), whole)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), 1)
    mask = (torch.arange(16) >= 3).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert close(model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:], whole)
    documents = torch.arange(13).repeat(2)[None]
    assert close(model(ids.view(1, -1), position_ids=documents).logits.view(whole.shape), whole)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert close(model(ids).logits, whole)


@pytest.mark.parametrize("kind", VARIANTS)
@torch.no_grad()
def test_probes_see_the_maps_of_normed_queries_and_keys(kind):
    model, ids, found = model_of(kind, num_key_value_heads=8), tokens(1, 9), {}

    def observe(layer, first, second, lam, allowed):
        found[layer] = combined(first, second, lam)

    with written_out(model) as layers, observing_maps(layers, observe):
        model(ids, use_cache=False)
    model.set_attn_implementation("eager")
    maps = model(ids, output_attentions=True).attentions
    assert all(close(found[layer], expected) for layer, expected in enumerate(maps))


@pytest.mark.parametrize("kind", ["softmax", "grouped_diff_v2"])
@torch.no_grad()
def test_it_is_saved_opened_and_exported(kind, tmp_path):
    model, ids = model_of(kind), tokens(1, 9)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["qk_norm"] is True
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--with-code"]) == 0
    for folder in ("saved", "out"):
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert opened.config == DiffTransformerConfig.from_pretrained(tmp_path / "saved")
        assert torch.equal(opened(ids).logits, model(ids).logits)
        assert "| qk norm | `True` |" in (tmp_path / folder / "README.md").read_text()


def test_a_start_and_the_configuration():
    """Gains start at 1, the twin has the norm too, and configurations saved before it have none."""
    config = tiny_config(**SHAPE)
    assert config.twin().qk_norm
    for twin in (config, config.twin()):
        layers = DiffTransformerForCausalLM(twin).model.layers
        assert all(bool((norm.weight == 1).all()) for x in layers for norm in (x.self_attn.q_norm, x.self_attn.k_norm))
        assert {x.self_attn.q_norm.eps for x in layers} == {1e-3}
    document = config.to_dict()
    del document["qk_norm"]
    assert not DiffTransformerConfig.from_dict(document).qk_norm
    with pytest.raises(ConfigError, match="qk_norm: expected bool, got 'no'"):
        tiny_config(qk_norm="no")


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        ("diff", "diffllama", "qk_norm=True: DiffLlama has no norm of queries and keys; it can express False only"),
        ("softmax", "llama", "qk_norm=True: Llama can express False only; export --with-code"),
    ],
)
def test_layouts_without_it_refuse_in_one_line(kind, layout, words, tmp_path):
    tiny(attention_type=kind, qk_norm=True).save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match=words) as caught:
        convert_folder(tmp_path / "saved", tmp_path / "no", to=layout)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "no").exists()


def test_a_converted_llama_has_none():
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    assert from_llama(config, to="diff").config["qk_norm"] is False
    with pytest.raises(ConfigError, match="qk_norm is not an option of --to 'diff'; leave it out"):
        from_llama(config, to="diff", qk_norm=True)

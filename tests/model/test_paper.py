"""The model against the paper's equations, Hugging Face's Llama and closed formulas."""

import pytest
import torch
from paper_model import logits as paper_logits
from small_models import SHAPES, VOCABULARY, make_config, make_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM, DiffTransformerModel
from difftransformer.errors import ConfigError
from difftransformer.model import PRESETS, count, preset


def relative_error(found, expected):
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("implementation", ["difftransformer", "eager", "sdpa"])
def test_logits_equal_the_papers(shape, implementation, window):
    model = make_model(shape, sliding_window=window)
    model.set_attn_implementation(implementation)
    ids = torch.randint(1, VOCABULARY, (2, 19), generator=torch.Generator().manual_seed(1))
    found = model(ids).logits
    for row in range(2):
        assert relative_error(found[row], paper_logits(model.state_dict(), model.config, ids[row])) < 1e-5


def test_the_twin_is_llama():
    model = make_model("softmax-gqa")
    config = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=True,
            rope_parameters=dict(config.rope_parameters),
        )
    ).eval()
    problems = llama.load_state_dict(model.state_dict(), strict=False)
    assert not problems.unexpected_keys
    ids = torch.randint(1, VOCABULARY, (2, 30))
    assert torch.allclose(model(ids).logits, llama(ids).logits, atol=2e-5)


@pytest.mark.parametrize("head_dim", [8, 16])
def test_diff_and_its_twin_differ_by_six_head_dim_a_layer(head_dim):
    config = DiffTransformerConfig(
        vocab_size=40, hidden_size=8 * head_dim, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4
    )
    diff, twin = DiffTransformerForCausalLM(config), DiffTransformerForCausalLM(config.twin("softmax"))
    assert diff.num_parameters() - twin.num_parameters() == 3 * 6 * head_dim
    assert count(config).parameters - count(config.twin("softmax")).parameters == 3 * 6 * head_dim
    nothing_else = {n for n in diff.state_dict() if "lambda" not in n and "head_norm" not in n}
    assert nothing_else == set(twin.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_counts_equal_the_module(shape, tied):
    config = make_config(shape, tie_word_embeddings=tied)
    model = DiffTransformerForCausalLM(config)
    counts = count(config, context_tokens=24, cache_itemsize=4)
    assert counts.parameters == sum(p.numel() for p in model.parameters())
    assert counts.attention_parameters == sum(p.numel() for n, p in model.named_parameters() if "self_attn" in n)
    cache = DynamicCache()
    model(torch.randint(VOCABULARY, (1, 24)), past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert counts.kv_bytes_per_token * 24 == held


def test_flops_equal_pytorchs_counter(shape):
    # The reference backend forms whole maps: T keys for a query where causality leaves (T + 1) / 2.
    length = 32
    config = make_config(shape, num_hidden_layers=2)
    model = DiffTransformerForCausalLM(config)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(VOCABULARY, (1, length)), use_cache=False)
    counts = count(config, context_tokens=length)
    unseen = config.num_hidden_layers * config.head_layout().map_flops_per_pair() * (length - (length + 1) / 2)
    assert counter.get_total_flops() == length * (counts.forward_flops_per_token + unseen)
    assert counts.train_flops_per_token == 3 * counts.forward_flops_per_token


@pytest.mark.parametrize("name", ["830m", "1.4b", "2.8b", "6.8b", "13.1b"])
@pytest.mark.parametrize("attention_type", ["diff", "softmax"])
def test_the_scaling_sizes_are_the_papers(name, attention_type):
    config = DiffTransformerConfig(attention_type=attention_type, **preset(name).fields)
    assert abs(count(config).parameters / preset(name).paper_parameters - 1) < 0.01
    with torch.device("meta"):
        built = DiffTransformerForCausalLM(config)
    assert count(config).parameters == built.num_parameters()


def test_table_9s_shape_does_not_have_the_stated_size():
    config = DiffTransformerConfig(**preset("3b").fields)
    tied = count(config).parameters
    untied = count(DiffTransformerConfig(**{**preset("3b").fields, "tie_word_embeddings": False})).parameters
    assert (round(tied / 1e9, 2), round(untied / 1e9, 2)) == (3.48, 3.79)
    assert preset("3b").paper_parameters == 2.8e9
    assert config.head_layout().num_heads == 12
    assert config.twin("softmax").head_layout().num_heads == 24


def test_an_unknown_preset_names_the_known():
    with pytest.raises(ConfigError, match=r"'70b' is unknown.*13\.1b"):
        preset("70b")
    assert set(PRESETS) >= {"tiny", "small", "830m", "1.4b", "2.8b", "3b", "6.8b", "13.1b"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 5, "hidden_size": 80}, "num_attention_heads=5 is odd"),
        ({"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 3}, "num_key_value_heads=3 is odd"),
        ({"hidden_size": 65}, "hidden_size=65 is not a multiple"),
        ({"head_dim": 8}, "must not be halved"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"num_key_value_heads": 6, "num_attention_heads": 8}, "not a multiple of num_key_value_heads"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"attention_type": "dif"}, "choose one of softmax, diff"),
        ({"initialization": "zeros"}, "choose one of normal, mimetic"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_impossible_models_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        DiffTransformerConfig(**{"vocab_size": 9, "hidden_size": 64, "num_attention_heads": 4, **fields})


def test_fresh_models_start_as_stated(shape):
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(make_config(shape, hidden_size=64, num_hidden_layers=24))
    state = model.state_dict()
    matrices = torch.cat([t.flatten() for n, t in state.items() if t.dim() == 2])
    assert abs(matrices.std().item() - 0.02) < 0.001
    assert all(torch.equal(t, torch.ones_like(t)) for n, t in state.items() if "norm" in n)
    lambdas = [t for n, t in state.items() if "lambda" in n]
    assert len(lambdas) == (4 * 24 if shape.startswith("diff") else 0)
    if lambdas:
        assert abs(torch.cat(lambdas).std().item() - 0.1) < 0.01
        starts = [layer.self_attn.lambda_init for layer in model.model.layers]
        # arXiv:2410.05258 section 2.1 for l = 1, 2, 3, 12
        expected = {0: 0.2, 1: 0.3555, 2: 0.4707, 11: 0.7779}
        assert {i: round(starts[i], 4) for i in expected} == expected


@pytest.mark.parametrize("name", ["diff-gqa", "softmax-gqa"])
def test_mimetic_models_start_as_lookups(name):
    config = make_config(name, initialization="mimetic")
    attention = DiffTransformerForCausalLM(config).model.layers[2].self_attn
    layout = config.head_layout()
    shared = layout.num_heads // layout.num_key_value_heads
    q = attention.q_proj.weight.view(layout.num_heads, layout.query_width, -1)
    k = attention.k_proj.weight.view(layout.num_key_value_heads, layout.key_width, -1)
    v = attention.v_proj.weight.view(layout.num_key_value_heads, layout.value_head_dim, -1)
    o = attention.o_proj.weight.T.reshape(layout.num_heads, layout.value_head_dim, -1)
    assert torch.equal(q[::shared], k)
    assert torch.equal(o, v.repeat_interleave(shared, 0))
    assert abs(q.std().item() - 64**-0.5) < 0.01


def test_the_base_model_is_the_language_model_without_its_head(model, tmp_path):
    ids = torch.randint(1, VOCABULARY, (1, 7))
    model.save_pretrained(tmp_path)
    base = DiffTransformerModel.from_pretrained(tmp_path).eval()
    assert torch.equal(model.lm_head(base(ids).last_hidden_state), model(ids).logits)


def test_shapes_cover_what_they_say():
    assert {make_config(name).head_layout().num_heads for name in SHAPES} == {2, 3, 4, 8}

"""The model that vLLM would run, on a stand-in for vLLM, against our Hugging Face model, by a folder that it saved."""

import importlib
import importlib.metadata
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from difftransformer import DiffTransformerForCausalLM
from difftransformer.errors import ConfigError
from difftransformer.serving import MODEL_CLASS, register
from difftransformer.serving.heads import ServedHeads
from tests.support import fresh, stub_vllm
from tests.support.tiny_models import scramble, tiny_config, tokens

LENGTH = 9
SHAPES = {
    "MHA": {},
    "GQA": {"num_key_value_heads": 2, "num_attention_heads": 8},
    "wide heads": {"head_dim": 16},
    "window": {"sliding_window": 4, "num_key_value_heads": 2},
}
OPTIONS = {
    "lambda by head": {"attention_type": "diff", "lambda_form": "head"},
    "lambda constant, plain norm": {"attention_type": "diff", "lambda_form": "constant", "head_norm": "plain"},
    "no norm, lambda_init stated": {"attention_type": "diff", "head_norm": "none", "lambda_init": 0.3},
    "shared key": {"attention_type": "diff", "shared_key": True, "num_key_value_heads": 2, "num_attention_heads": 8},
    "own keys, narrow value": {"attention_type": "diff_v2", "shared_key": False, "num_key_value_heads": 2},
    "narrow value": {"attention_type": "diff", "value_head_dim": 8, "num_key_value_heads": 2},
    "upcycled": {
        "attention_type": "diff",
        "num_differential_heads": 4,
        "num_differential_key_value_heads": 2,
        "value_head_dim": 8,
        "head_norm": "none",
        "lambda_init": 0.0,
    },
    "grouped, shared keys": {
        "attention_type": "grouped_diff",
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "grouped, own keys": {"attention_type": "grouped_diff", "num_attention_heads": 10, "head_dim": 8},
    "gated, shared noise": {
        "attention_type": "grouped_diff_v2",
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "shared noise without a gate": {
        "attention_type": "grouped_diff_v2",
        "num_attention_heads": 5,
        "head_dim": 8,
        "output_gate": False,
    },
    "QK norm": {"attention_type": "softmax", "qk_norm": True, "rms_norm_eps": 1e-2, "num_key_value_heads": 2},
    "QK norm of two maps": {"attention_type": "diff", "qk_norm": True, "num_key_value_heads": 2},
    "QK norm, shared noise": {
        "attention_type": "grouped_diff",
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "qk_norm": True,
    },
    "dex on some heads": {"attention_type": "dex", "dex_heads": [[0, 2], [1, 3]]},
    "dex on all heads": {"attention_type": "dex", "num_key_value_heads": 2},
    "multiplied": {"attention_type": "diff", "embedding_multiplier": 3.3},
    "multiplied, untied": {"attention_type": "softmax", "initialization": "fan_in", "tie_word_embeddings": False},
    "V2 with a wide value and a norm": {"attention_type": "diff_v2", "value_head_dim": 24, "head_norm": "gain"},
}


def served(folder, config, monkeypatch):
    """vLLM's way: find the class by its registered name, build it from the configuration, give it the file's tensors."""
    registry = stub_vllm.install(monkeypatch)
    register()
    module, _, name = registry.models[config.architectures[0]].partition(":")
    model = getattr(importlib.import_module(module), name)(
        vllm_config=types.SimpleNamespace(
            model_config=types.SimpleNamespace(hf_config=config), cache_config=None, quant_config=None
        )
    ).eval()
    with safe_open(folder / "model.safetensors", "pt") as file:
        loaded = model.load_weights((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
    wanted = {
        key for key, _ in model.named_parameters() if not (config.tie_word_embeddings and key.startswith("lm_head"))
    }
    assert loaded == wanted
    return model


def check(fields, tmp_path, monkeypatch):
    theirs = scramble(DiffTransformerForCausalLM(tiny_config(**fields))).eval()
    theirs.save_pretrained(tmp_path)
    config = type(theirs.config).from_pretrained(tmp_path)
    ids = tokens(1, LENGTH)
    with torch.no_grad():
        expected = theirs(ids).logits[0]
        # A prefill, then one token after the other.
        for split in ([LENGTH], [4, 1, 1, 1, 1, 1]):
            model, parts, at = served(tmp_path, config, monkeypatch), [], 0
            for count in split:
                positions = torch.arange(at, at + count)
                hidden = model(input_ids=ids[0, at : at + count], positions=positions)
                parts.append(model.compute_logits(hidden))
                at += count
            error = (torch.cat(parts) - expected).abs().max() / expected.abs().max()
            assert error < 1e-5
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ["softmax", "diff", "diff_v2"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_our_model(kind, shape, tied, tmp_path, monkeypatch):
    check({"attention_type": kind, "tie_word_embeddings": tied, **SHAPES[shape]}, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, tmp_path, monkeypatch):
    check(OPTIONS[name], tmp_path, monkeypatch)


@torch.no_grad()
def test_the_first_pipeline_rank_alone_multiplies(tmp_path, monkeypatch):
    """Token ids and given embeddings on the first rank; what another rank receives is passed on as it is."""
    config = tiny_config(embedding_multiplier=3.3, num_hidden_layers=1)
    whole = scramble(DiffTransformerForCausalLM(config)).eval()
    whole.save_pretrained(tmp_path)
    ids, positions = tokens(1, LENGTH)[0], torch.arange(LENGTH)
    expected = whole.model(ids[None]).last_hidden_state[0]
    embeddings = whole.get_input_embeddings()(ids)
    for given in ({"input_ids": ids}, {"input_ids": None, "inputs_embeds": embeddings}):
        model = served(tmp_path, config, monkeypatch)
        assert torch.equal(model.embed_input_ids(ids), embeddings)
        torch.testing.assert_close(model(positions=positions, **given), expected, atol=1e-5, rtol=1e-5)
    model = served(tmp_path, config, monkeypatch)
    group = sys.modules["vllm.distributed"].get_pp_group()
    monkeypatch.setattr(group, "is_first_rank", False)
    received = {"hidden_states": 3.3 * embeddings, "residual": torch.zeros_like(embeddings)}
    later = model(input_ids=None, positions=positions, intermediate_tensors=received)
    torch.testing.assert_close(later, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "diff", "diff_v2", "dex", "grouped_diff", "grouped_diff_v2"])
def test_nothing_is_cached_twice(kind, tmp_path, monkeypatch):
    heads = {"num_attention_heads": 10, "head_dim": 8} if kind.startswith("grouped") else {}
    model = check({"attention_type": kind, "num_key_value_heads": 2, **heads}, tmp_path, monkeypatch)
    attention = model.model.layers[0].self_attn.attn
    assert (
        attention.keys[0].numel() + attention.values[0].numel() == model.config.head_layout().cached_values_per_token()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_type": "softmax", "num_key_value_heads": 2},
        {"attention_type": "diff", "num_attention_heads": 8, "num_key_value_heads": 4},
        {"attention_type": "diff_v2", "num_key_value_heads": 2},
        {"attention_type": "grouped_diff", "num_attention_heads": 10, "num_key_value_heads": 4, "head_dim": 8},
        {"attention_type": "grouped_diff", "num_attention_heads": 10, "head_dim": 8},
    ],
)
def test_two_ranks_have_the_heads_of_one(fields):
    """Each rank gets half of every projection's rows."""
    config = tiny_config(**fields)
    layout = config.head_layout()
    rows = (
        layout.query_groups * layout.query_width,
        layout.cache_heads * layout.key_width,
        layout.num_key_value_heads * layout.value_head_dim,
    )
    draw = torch.Generator().manual_seed(0)
    projected = [torch.randn(3, count, generator=draw) for count in rows]

    def attended(heads, parts):
        query, key, value = (states.view(3, -1, heads.head_size) for states in heads.arrange(*parts))
        shared = query.shape[1] // key.shape[1]
        assert (query.shape[1], key.shape[1]) == (heads.query_heads, heads.key_value_heads)
        weights = torch.einsum("nhw,mhw->hnm", query, key.repeat_interleave(shared, 1)).softmax(-1)
        out = torch.einsum("hnm,mhw->nhw", weights, value.repeat_interleave(shared, 1))
        return [states for states in heads.separate(out.flatten(1)) if states is not None]

    ranks = [
        attended(ServedHeads.of(config, 2), [states.chunk(2, 1)[rank] for states in projected]) for rank in range(2)
    ]
    for number, expected in enumerate(attended(ServedHeads.of(config), projected)):
        torch.testing.assert_close(torch.cat([rank[number] for rank in ranks], 1), expected)


def test_the_heads_that_vllm_plans_for(tmp_path, monkeypatch):
    model = check({"attention_type": "diff", "num_key_value_heads": 2}, tmp_path, monkeypatch)
    attention = model.model.layers[0].self_attn.attn
    registry = stub_vllm.install(monkeypatch)
    register()
    convertor = registry.convertors["difftransformer"](model.config, model.config)
    planned = convertor.get_total_num_attention_heads(), convertor.get_total_num_kv_heads(), convertor.get_head_size()
    assert planned == (attention.num_heads, attention.num_kv_heads, attention.head_size) == (4, 1, 16)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not served"),
        ({"is_causal": False}, "is_causal=False is not served"),
    ],
)
def test_refusals(fields, words, monkeypatch):
    stub_vllm.install(monkeypatch)
    module = importlib.import_module(MODEL_CLASS.partition(":")[0])
    with pytest.raises(ConfigError, match=words) as caught:
        module.check_served(tiny_config(**fields))
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_divide_among_ranks():
    config = tiny_config(attention_type="diff", num_key_value_heads=2)
    with pytest.raises(ConfigError, match="vLLM: 1 cached heads do not divide among 2 tensor-parallel ranks"):
        ServedHeads.of(config, 2)


def test_registering_twice_is_one_entry_and_imports_no_model(monkeypatch):
    registry = stub_vllm.install(monkeypatch)
    register()
    register()
    assert registry.models == {"DiffTransformerForCausalLM": MODEL_CLASS}
    assert MODEL_CLASS.partition(":")[0] not in sys.modules


def test_the_entry_point_names_the_function():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    stated = project["entry-points"]["vllm.general_plugins"]
    (point,) = (importlib.metadata.EntryPoint(*item, group="vllm.general_plugins") for item in stated.items())
    assert point.load() is register


def test_nothing_else_imports_vllm():
    code = "import sys, difftransformer, difftransformer.serving; assert 'vllm' not in sys.modules"
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr

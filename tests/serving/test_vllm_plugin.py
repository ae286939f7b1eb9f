"""The model that vLLM would run, on a stand-in for vLLM, against our Hugging Face model, by a folder that it saved."""

import importlib
import importlib.metadata
import subprocess
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
from tests.support import stub_vllm
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


@pytest.mark.parametrize(("kind", "ratio"), [("softmax", 1), ("diff_v2", 1), ("diff", 2)])
def test_what_is_cached(kind, ratio, tmp_path, monkeypatch):
    model = check({"attention_type": kind, "num_key_value_heads": 2}, tmp_path, monkeypatch)
    attention = model.model.layers[0].self_attn.attn
    cached = attention.keys[0].numel() + attention.values[0].numel()
    assert cached == ratio * model.config.head_layout().cached_values_per_token()


@pytest.mark.parametrize(
    ("fields", "ranks", "words"),
    [
        ({"attention_type": "grouped_diff"}, 1, "attention_type='grouped_diff' is not served"),
        ({"attention_type": "diff", "value_head_dim": 6}, 1, "value_head_dim=6 is not a multiple of head_dim=8"),
        ({"attention_type": "diff", "hidden_act": "gelu"}, 1, "hidden_act='gelu' is not served"),
        ({"attention_type": "diff", "is_causal": False}, 1, "is_causal=False is not served"),
        ({"attention_type": "diff", "num_key_value_heads": 2}, 2, "1 key/value heads do not divide among 2"),
    ],
)
def test_refusals(fields, ranks, words, monkeypatch):
    stub_vllm.install(monkeypatch)
    module = importlib.import_module(MODEL_CLASS.partition(":")[0])
    with pytest.raises(ConfigError, match=words) as caught:
        module.check_served(tiny_config(**fields), ranks)
    assert "\n" not in str(caught.value)


def test_a_foreign_tensor_is_named(tmp_path, monkeypatch):
    theirs = DiffTransformerForCausalLM(tiny_config())
    theirs.save_pretrained(tmp_path)
    model = served(tmp_path, theirs.config, monkeypatch)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.odd\.weight is not a tensor of this model"):
        model.load_weights([("model.layers.0.odd.weight", torch.zeros(1))])


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
    subprocess.run([sys.executable, "-c", code], check=True)

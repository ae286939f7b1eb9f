"""What our vLLM plug-in is without vLLM; test_vllm.py runs vLLM's engine."""

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

from difftransformer.errors import ConfigError
from difftransformer.families import family_config
from difftransformer.serving import MODEL_CLASS, register
from difftransformer.serving.heads import ServedHeads, check_served
from tests.support.tiny_models import tiny_config


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


def test_heads_that_do_not_divide_among_ranks():
    config = tiny_config(attention_type="diff", num_key_value_heads=2)
    with pytest.raises(ConfigError, match="vLLM: 1 cached heads do not divide among 2 tensor-parallel ranks"):
        ServedHeads.of(config, 2)


@pytest.fixture
def vllm_model(monkeypatch):
    """The module, with stand-ins for all that it imports from vLLM."""
    spec = importlib.util.find_spec("difftransformer.serving.vllm_model")
    for name in re.findall(r"^from (vllm\S*) import", Path(spec.origin).read_text(), re.MULTILINE):
        stand_in = types.ModuleType(name)
        stand_in.__getattr__ = lambda name: type(name, (), {"__init__": lambda self, *_, **__: None})
        monkeypatch.setitem(sys.modules, name, stand_in)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("chosen", [[0, 3], [1]])
def test_two_ranks_extend_the_heads_of_one(vllm_model, chosen):
    """Also where a rank has none of the heads that DEX extends."""
    config = tiny_config(attention_type="dex", dex_heads=[chosen] * 2)
    draw = torch.Generator().manual_seed(0)
    lam, proj = torch.randn(len(chosen), generator=draw), torch.randn(len(chosen), 8, 8, generator=draw)
    heads = torch.randn(3, 4, 8, generator=draw)

    def extended(ranks, rank):
        layer = vllm_model.ServedAttention.__new__(vllm_model.ServedAttention)
        torch.nn.Module.__init__(layer)
        layer.heads = ServedHeads.of(config, ranks)
        layer.first_head = rank * layer.heads.heads
        layer._add_extension(chosen)
        layer.dex_lambda.copy_(lam)
        layer.dex_proj.copy_(proj)
        return layer._extend(heads.chunk(ranks, 1)[rank])

    whole = extended(1, 0)
    torch.testing.assert_close(torch.cat([extended(2, rank) for rank in range(2)], 1), whole)
    kept = [head for head in range(4) if torch.equal(whole[:, head], heads[:, head])]
    assert kept == [head for head in range(4) if head not in chosen]


@pytest.mark.parametrize("fields", [{"hidden_act": "gelu"}, {"is_causal": False}])
def test_refusals(fields):
    ((name, value),) = fields.items()
    with pytest.raises(ConfigError, match=f"vLLM: {name}={value!r} is not served"):
        check_served(tiny_config(**fields))


def test_attention_types_that_are_refused():
    with pytest.raises(ConfigError, match="vLLM: attention_type='xsa' is not served; choose one of softmax, diff"):
        ServedHeads.of(tiny_config(attention_type="xsa"))
    assert ServedHeads.of(tiny_config(attention_type="diff_gate")).layout.output_gate


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("phi3", {"pad_token_id": 0}, "vLLM: family='phi3' is not served; serve it with transformers"),
        ("qwen3", {"attention_bias": True}, "a qwen3 with attention_bias or sliding windows is not served"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, "attention_bias or sliding windows is not"),
    ],
)
def test_families_that_are_refused(family, fields, words):
    with pytest.raises(ConfigError, match=words):
        ServedHeads.of(family_config(family)(**fields))


def test_registering_twice_is_one_entry_with_the_heads_of_the_op(monkeypatch):
    models, convertors = {}, {}
    registry = types.SimpleNamespace(get_supported_archs=models.keys, register_model=models.__setitem__)
    base = type("Base", (), {"__init__": lambda self, config: setattr(self, "hf_text_config", config)})
    table = {"MODEL_ARCH_CONFIG_CONVERTORS": convertors, "ModelArchConfigConvertorBase": base}
    for name, contents in (
        ("vllm", {"ModelRegistry": registry}),
        ("vllm.transformers_utils", {}),
        ("vllm.transformers_utils.model_arch_config_convertor", table),
    ):
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    register()
    register()
    assert set(models.values()) == {MODEL_CLASS}
    assert set(models) >= {"DiffTransformerForCausalLM", "DifferentialQwen3ForCausalLM"}
    planned = convertors["difftransformer"](tiny_config(attention_type="diff", num_key_value_heads=2))
    heads = planned.get_total_num_attention_heads(), planned.get_total_num_kv_heads(), planned.get_head_size()
    assert heads == (4, 1, 16)


def test_the_entry_point_names_the_function():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    stated = project["entry-points"]["vllm.general_plugins"]
    (point,) = (importlib.metadata.EntryPoint(*item, group="vllm.general_plugins") for item in stated.items())
    assert point.load() is register

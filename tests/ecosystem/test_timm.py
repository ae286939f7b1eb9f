"""timm's DiffAttention itself: its weights in our layer, and ours in it, give its outputs and gradients.

`make .venv/.ready-tools` puts the wheel into .venv/tools/wheels, where transformers does not find it: it would import timm, and
timm needs a torchvision that is built for the same torch. DiffAttention needs none of it.
"""

import importlib.util
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch

from difftransformer.attention import DifferentialAttention
from difftransformer.attention.differential import LAMBDA_VECTORS
from difftransformer.errors import ConfigError
from difftransformer.families import load_timm_attention, timm_attention_state
from tests.ecosystem.conftest import UNDER_CI

ROOT = Path(__file__).parents[2]
WHEEL = next((ROOT / ".venv/tools/wheels").glob("timm-*.whl"), None)


@pytest.fixture
def diff_attention(monkeypatch):
    """The class. The package's own __init__ imports every model, and a norm's module one class of torchvision."""
    if WHEEL is None:
        (pytest.fail if UNDER_CI else pytest.skip)("timm is not downloaded")
    monkeypatch.syspath_prepend(WHEEL)
    places = importlib.util.find_spec("timm").submodule_search_locations
    stubs = {name: ModuleType(name) for name in ("timm", "torchvision", "torchvision.ops", "torchvision.ops.misc")}
    stubs["timm"].__path__ = list(places)
    stubs["torchvision.ops.misc"].FrozenBatchNorm2d = torch.nn.BatchNorm2d
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("timm.layers.diff_attention").DiffAttention
    for name in [name for name in sys.modules if name.startswith("timm.")]:
        del sys.modules[name]


FORMS = [*product((False, True), (False, True), (False, True), (0, 5), (False, True))]


def drawn(diff_attention, qkv_bias, qk_norm, proj_bias, depth, fused):
    """A module of timm in float64, its lambdas in fp32 as it makes them, with every parameter away from its start."""
    options = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "proj_bias": proj_bias, "depth": depth}
    module = diff_attention(32, 4, dtype=torch.float64, **options)
    module.fused_attn = fused
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def run(module, x, **call):
    """Outputs of x, and the gradient of x; gradients of parameters stay on them."""
    x = x.clone().requires_grad_()
    out = module(x, **call)
    out = out[0] if isinstance(out, tuple) else out
    module.zero_grad()
    out.backward(torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1)))
    return out, x.grad


def held_gradients(layer):
    """The gradients of our layer's parameters, joined and named as timm's are."""
    for parameter in layer.parameters():
        parameter.data = parameter.grad
    return timm_attention_state(layer)


@pytest.mark.parametrize("call", ["all", "mask", "causal"])
def test_outputs_and_gradients(diff_attention, call):
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    mask = (torch.rand(9, 9) < 0.7) | torch.eye(9, dtype=torch.bool)
    theirs, ours = {
        "all": ({}, {"is_causal": False}),
        "mask": ({"attn_mask": mask}, {"is_causal": False, "attn_mask": mask}),
        "causal": ({"is_causal": True}, {}),
    }[call]
    for form in FORMS:
        module = drawn(diff_attention, *form)
        layer = load_timm_attention(module.state_dict(), layer_index=form[3])
        back = timm_attention_state(layer)
        assert back.keys() == module.state_dict().keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in module.state_dict().items())
        for got, expected in zip(run(layer, x, **ours), run(module, x, **theirs), strict=True):
            assert (got - expected).abs().max() < 1e-10
        held = held_gradients(layer)
        for name, parameter in module.named_parameters():
            bound = 1e-10 if parameter.dtype == torch.float64 else 1e-6 * (1 + parameter.grad.abs().max())
            assert (held[name] - parameter.grad).abs().max() < bound, name


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_a_new_layer_of_ours_in_timm(diff_attention, qk_norm):
    layer = DifferentialAttention(32, 4, layer_index=3, qk_norm=qk_norm)
    module = diff_attention(32, 4, depth=3, qk_norm=qk_norm, proj_bias=False, dtype=torch.float64)
    module.load_state_dict(timm_attention_state(layer))
    layer.double()
    for name in LAMBDA_VECTORS:  # timm computes lambda in fp32
        getattr(layer, name).data = getattr(layer, name).float()
    layer.lambda_value = layer.lambda_value.float()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    assert (module(x) - layer(x, is_causal=False)[0]).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dual_lambda": True}, "dual_lambda=True"),
        ({"scale_norm": True}, "scale_norm=True"),
        ({"qk_norm": True, "norm_layer": torch.nn.LayerNorm}, "norm_layer=LayerNorm"),
    ],
)
def test_options_that_our_layer_lacks(diff_attention, options, words):
    with pytest.raises(ConfigError, match=words):
        load_timm_attention(diff_attention(32, 4, **options).state_dict(), layer_index=0)

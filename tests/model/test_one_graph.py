"""torch.compile of single layers: all of them share one graph, and compute what they compute without it."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, DiffLlamaConfig, StaticCache

from difftransformer import DifferentialEncoderLayer, DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.attention import VARIANTS
from difftransformer.families import accelerate, family_config

# torch.compile hides this warning of its own, unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")

LAYERS = 9  # more than the graphs that torch.compile keeps for one function
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
}
OTHERS = {
    "lambda by head": {"attention_type": "diff", "lambda_form": "head"},
    "lambda as a scalar": {"attention_type": "diff", "lambda_form": "scalar", "head_norm": "plain"},
    "constant lambda": {"attention_type": "diff", "lambda_form": "constant", "qk_norm": True},
    "some heads of DEX": {"attention_type": "dex", "dex_heads": [[i % 4, (i + 1) % 4] for i in range(LAYERS)]},
    "a norm of the twin": {"attention_type": "softmax", "softmax_head_norm": "gain"},
}
FAMILIES = ("cohere", "gemma3_text", "mistral", "olmo2", "phi3", "qwen3")
QUICK = ("gemma3_text", "phi3")


def ids(length=16):
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(4))


def model_of(**options):
    torch.manual_seed(3)
    return DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES | options))


def compiled(model, backend="eager"):
    """A copy whose layers are compiled singly, and the counter of its graphs."""
    torch.compiler.reset()
    counter, one = CompileCounterWithBackend(backend), copy.deepcopy(model)
    for layer in one.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    return one, counter


def trained(model, length=16, call=None):
    """The loss and the gradients of a training step."""
    model.train().zero_grad()
    loss = (model if call is None else call)(ids(length), labels=ids(length), use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_one_graph(model, backend, **tolerance):
    one, counter = compiled(model, backend)
    torch.testing.assert_close(trained(one), trained(model), **{"rtol": 0, "atol": 0} | tolerance)
    assert counter.frame_count == 1


@pytest.mark.parametrize("attention_type", ["diff", "diff_v2"])
def test_layers_share_one_graph(attention_type):
    assert_one_graph(model_of(attention_type=attention_type), "eager")


@pytest.mark.slow
@pytest.mark.parametrize("options", [*({"attention_type": name} for name in VARIANTS), *OTHERS.values()], ids=str)
def test_layers_of_any_kind_share_one_graph(options):
    assert_one_graph(model_of(**options), "eager")


@pytest.mark.parametrize("attention_type", ["diff", pytest.param("diff_v2", marks=pytest.mark.slow)])
def test_gradients_are_traced_too(attention_type):
    """With and without the norm, which is an operator of its own."""
    assert_one_graph(model_of(attention_type=attention_type), "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
def test_code_that_is_generated():
    assert_one_graph(model_of(attention_type="diff"), "inductor", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]
)
def test_layers_of_families_share_one_graph(family):
    torch.manual_seed(3)
    kinds = {"layer_types": ["full_attention"] * LAYERS} if family == "gemma3_text" else {}
    config = family_config(family)(**SIZES | kinds, attention_type="diff")
    assert_one_graph(AutoModelForCausalLM.from_config(config), "eager")


def test_accelerated_layers_share_one_graph():
    torch.manual_seed(3)
    assert_one_graph(accelerate(AutoModelForCausalLM.from_config(DiffLlamaConfig(**SIZES))), "eager")


def test_layers_of_an_encoder_share_one_graph():
    torch.compiler.reset()
    counter, x = CompileCounterWithBackend("eager"), torch.randn(2, 8, 32)
    for index in range(LAYERS):
        layer = DifferentialEncoderLayer(32, 4, 32, layer_index=index, batch_first=True).eval()
        assert torch.equal(torch.compile(layer, backend=counter, fullgraph=True)(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("attention_type", ["diff", pytest.param("diff_v2", marks=pytest.mark.slow)])
def test_with_a_cache_there_are_two(attention_type):
    """One for the prompt, one for a new token."""
    model = model_of(attention_type=attention_type).eval()
    one, counter = compiled(model)
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=32)
        for part in ids().split([13, 1, 1, 1], 1):
            last = one(part, past_key_values=cache).logits[:, -1]
    assert counter.frame_count == 2
    torch.testing.assert_close(last, model(ids()).logits[:, -1], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("attention_type", ["diff", "diff_v2", "dex"])
def test_a_whole_model_with_free_lengths(attention_type):
    torch.compiler.reset()
    model, counter = (model_of(attention_type=attention_type, num_hidden_layers=2), CompileCounterWithBackend("eager"))
    whole = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (17, 23, 40):
        expected = trained(model, length)
        torch.testing.assert_close(trained(model, length, call=whole), expected, rtol=0, atol=0)
    assert counter.frame_count == 1

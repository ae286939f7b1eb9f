"""Numbers of layers as buffers: their values are exact, whatever fills or casts the buffers of a model."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DiffLlamaConfig, LlamaConfig, PreTrainedModel

from difftransformer import DiffTransformerForCausalLM
from difftransformer.attention import DifferentialAttention, DifferentialExtension, DifferentialOptions
from difftransformer.families import accelerate, family_config, restore
from tests.support.tiny_models import tiny

# arXiv:2410.05258 section 2.1: of layers 0, 1 and 2
INIT = [0.8 - 0.6 * math.exp(-0.3 * index) for index in range(3)]


def layer(**options):
    return DifferentialAttention(32, 2, layer_index=1, **options)


def assert_exact(one, dtype=torch.float32, index=1):
    for name, number in (("lambda_value", INIT[index]), ("head_scale", 1 - INIT[index])):
        buffer = getattr(one, name)
        assert torch.equal(buffer, torch.tensor(number, dtype=dtype, device=buffer.device)), name


def to_empty(one):
    with torch.device("meta"):
        made = layer()
    return made.to_empty(device="cpu")


def loaded_on_meta(one):
    with torch.device("meta"):
        made = layer()
    made.load_state_dict(one.state_dict(), assign=True)
    return made


CHANGES = {
    "nothing": (lambda one: one, torch.float32),
    "to bf16": (lambda one: one.to(torch.bfloat16), torch.float32),
    "from bf16": (lambda one: one.to(torch.bfloat16).float(), torch.float32),
    "from fp16 to float64": (lambda one: one.half().double(), torch.float64),
    "memory without values": (to_empty, torch.float32),
    "weights assigned to meta": (loaded_on_meta, torch.float32),
    "a pickle": (lambda one: pickle.loads(pickle.dumps(one)), torch.float32),
    "a copy that is cast": (lambda one: copy.deepcopy(one).bfloat16(), torch.float32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_stay_exact(change):
    made, dtype = CHANGES[change]
    one = made(layer())
    assert_exact(one, dtype)
    assert not {"lambda_value", "head_scale"} & one.state_dict().keys()


def test_a_layer_that_is_made_in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert_exact(layer(), torch.float64)
    finally:
        torch.set_default_dtype(before)


def test_buffers_that_are_cast_in_place():
    """FSDP1 does so in mixed precision."""
    one, x = layer(), torch.randn(1, 5, 32)
    expected = one(x)[0]
    for buffer in one.buffers():
        buffer.data = buffer.bfloat16()
    assert torch.equal(one(x)[0], expected)


def test_weights_in_float64_that_are_assigned():
    """They leave the buffers in fp32."""
    one, x = layer().double(), torch.randn(1, 5, 32, dtype=torch.float64)
    made = layer()
    made.load_state_dict(one.state_dict(), assign=True)
    assert torch.equal(made(x)[0], one(x)[0])


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("head_norm", ["gain", "plain", "none"])
def test_the_factor_is_not_rounded(head_norm, backend):
    """PyTorch rounds a 0-dim tensor in fp32 to bf16 before it multiplies a tensor in bf16 by it: 1/3 by 0.0013 of it."""
    torch.manual_seed(0)
    options = DifferentialOptions(head_norm=head_norm, lambda_init=0.0, head_scale=1 / 3)
    one, x = layer(options=options, backend=backend).bfloat16(), torch.randn(1, 200, 32).bfloat16()
    with torch.no_grad():
        one.o_proj.weight.copy_(torch.eye(32))
        third = one(x)[0].double()
        one.head_scale = 1.0
        whole = one(x)[0].double()
    assert (third.abs().sum() / whole.abs().sum() * 3 - 1).abs() < 3e-4  # the mean of 6,400 roundings


def test_a_number_is_assigned():
    one = layer()
    one.lambda_value = 0.5
    assert one.to(torch.bfloat16).lambda_value == 0.5
    dex = DifferentialExtension(32, 4, dex_heads=[1, 3]).to(torch.bfloat16)
    assert torch.equal(dex.dex_index, torch.tensor([1, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_models_that_are_opened(dtype, tmp_path):
    tiny(attention_type="diff", num_hidden_layers=3).save_pretrained(tmp_path)
    opened = DiffTransformerForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for index, one in enumerate(opened.model.layers):
        assert_exact(one.self_attn, wide, index)


def test_a_family_that_is_opened(tmp_path):
    config = family_config("qwen3")(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, attention_type="diff",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for index, one in enumerate(opened.model.layers):
        assert_exact(one.self_attn.differential, torch.float32, index)


class TheirModel(PreTrainedModel):
    """A model of others with our layer, which knows nothing of its buffers."""

    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(DifferentialAttention(32, 2, layer_index=index) for index in range(3))
        self.post_init()

    def _init_weights(self, module):
        pass


def test_a_model_of_others_that_is_opened(tmp_path):
    TheirModel(LlamaConfig()).save_pretrained(tmp_path)
    for index, one in enumerate(TheirModel.from_pretrained(tmp_path).layers):
        assert_exact(one, index=index)


def test_an_accelerated_diffllama():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**sizes, num_key_value_heads=4))
    assert_exact(accelerate(accelerate(model)).to(torch.bfloat16).model.layers[1].self_attn)
    assert not [name for name, _ in restore(model).named_buffers() if "self_attn" in name]
    assert_exact(accelerate(model.double()).model.layers[1].self_attn, torch.float64)

"""transformers' models with softmax attention on this package's op: the same outputs in every use, and nothing left behind."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    Qwen2Config,
    StaticCache,
)

from difftransformer import accelerate, restore
from difftransformer.errors import ConfigError
from difftransformer.families import attention_function
from tests.support.tiny_models import VOCABULARY, tokens

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "eos_token_id": None, "pad_token_id": 0}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "mistral with a window": lambda: MistralConfig(**GROUPED, sliding_window=5),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=None
    ),
}


def network(name, implementation="eager"):
    """A small model with sharp maps."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


def pair(name):
    """A model with its attention written out by transformers, and the same one accelerated."""
    model = network(name)
    fast = copy.deepcopy(model)
    fast.set_attn_implementation("sdpa")
    return model, accelerate(fast)


def assert_close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.fixture
def masks(monkeypatch):
    """Shapes of the masks that the op gets, None where it gets none."""
    seen = []
    theirs = attention_function.softmax_attention

    def watched(*arguments, attn_mask, **options):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return theirs(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention_function, "softmax_attention", watched)
    return seen


@pytest.mark.parametrize("name", CONFIGS)
class TestSameOutputs:
    @torch.no_grad()
    @pytest.mark.parametrize("side", ["none", "left", "right"])
    def test_whole_rows(self, name, side, masks):
        (model, fast), ids = pair(name), tokens(3, 17)
        mask = torch.ones_like(ids)
        if side != "none":
            mask[1, slice(0, 6) if side == "left" else slice(11, None)] = 0
        places = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        found, expected = (m(ids, **places).logits for m in (fast, model))
        assert_close(found[mask.bool()], expected[mask.bool()])
        assert len(masks) == 2

    @torch.no_grad()
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_in_parts_over_a_cache(self, name, kind, masks):
        (model, fast), ids = pair(name), tokens(2, 21)
        expected = model(ids).logits
        cache = DynamicCache(config=fast.config) if kind == "dynamic" else StaticCache(fast.config, max_cache_len=32)
        begin, found = 0, []
        for length in (3, 9, 1, 7, 1):
            found.append(fast(ids[:, begin : begin + length], past_key_values=cache).logits)
            begin += length
        assert_close(torch.cat(found, 1), expected)

    def test_gradients(self, name):
        models = pair(name)
        ids = tokens(2, 13)
        for model in models:
            model(ids, labels=ids).loss.backward()
        for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
            assert_close(ours.grad, theirs.grad, 3e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
    def test_generation(self, name, options):
        (model, fast), ids = pair(name), tokens(2, 8)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        given = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, **options}
        found, expected = fast.generate(ids, **given), model.generate(ids, **given)
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_part_behind_a_cache_needs_no_mask(masks):
    _, fast = pair("llama")
    cache = DynamicCache(config=fast.config)
    for part in tokens(1, 24).split(8, 1):
        fast(part, past_key_values=cache)
    assert masks == [None] * 6


@torch.no_grad()
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_masks_of_the_caller(form):
    (model, fast), ids = pair("llama"), tokens(2, 9)
    allowed = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) > 0.4
    allowed |= torch.eye(9, dtype=torch.bool)
    allowed &= torch.ones(9, 9, dtype=torch.bool).tril()
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    found = fast(ids, attention_mask=allowed if form == "bool" else additive).logits
    assert_close(found, model(ids, attention_mask=additive).logits)


@torch.no_grad()
def test_no_mask_behind_a_cache_where_the_op_cannot_say_the_rest():
    """Then transformers' own function must get the mask that aligns the last query with the last key."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, heads, length, 8, generator=generator) for heads, length in ((4, 3), (2, 7), (2, 7))
    )
    layer = nn.Module()
    layer.is_causal, layer.num_key_value_groups, layer.training = True, 2, False
    bias = torch.randn(1, 4, 3, 7, generator=generator)
    found = attention_function.attention(layer, query, key, value, None, scaling=0.5, position_bias=bias)[0]
    scores = 0.5 * query @ key.repeat_interleave(2, 1).mT + bias
    scores = scores.masked_fill(torch.ones(3, 7, dtype=torch.bool).triu(5), -torch.inf)
    assert_close(found, (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2))


@torch.no_grad()
def test_both_directions():
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES)).eval()
    model.set_attn_implementation("eager")
    fast = copy.deepcopy(model)
    fast.set_attn_implementation("sdpa")
    accelerate(fast)
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    assert_close(fast(ids).last_hidden_state, model(ids).last_hidden_state)
    mask[1, 7:] = 0
    found, expected = (m(ids, attention_mask=mask).last_hidden_state[mask.bool()] for m in (fast, model))
    assert_close(found, expected)


@torch.no_grad()
def test_compiled_whole():
    model, fast = pair("llama")
    torch._dynamo.reset()
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    ids = tokens(2, 13)
    assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)


@torch.no_grad()
def test_low_precision_is_as_close_as_transformers_own():
    model, ids = network("llama"), tokens(2, 40)
    expected = model(ids).logits
    low = copy.deepcopy(model).bfloat16()
    theirs = (low(ids).logits.float() - expected).abs().max()
    low.set_attn_implementation("sdpa")
    ours = (accelerate(low)(ids).logits.float() - expected).abs().max()
    assert ours <= 2 * theirs


def test_restored_and_saved_as_it_was(tmp_path):
    model = network("llama", "sdpa")
    model.save_pretrained(tmp_path / "before")
    accelerate(accelerate(model))
    assert model.config._attn_implementation == "difftransformer"
    model.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes()
    restore(model)
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_parts_keep_what_is_not_sdpa():
    """As an encoder of images beside the text model, where the model itself has no attention."""
    text, vision = {"model_type": "llama", **GROUPED}, {"model_type": "clip_vision_model", "hidden_size": 32}
    vision |= {
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCABULARY - 1)
    asked = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=asked).eval()
    parts = [model.config, model.config.text_config, model.config.vision_config]
    expected = model(tokens(1, 9)).logits
    accelerate(model)
    assert [part._attn_implementation for part in parts] == ["eager", "difftransformer", "eager"]
    assert_close(model(tokens(1, 9)).logits, expected)
    restore(model)
    assert [part._attn_implementation for part in parts] == ["eager", "sdpa", "eager"]


@torch.no_grad()
def test_within_another_module():
    model, fast = pair("llama")
    outer = nn.ModuleDict({"inner": restore(fast)})
    assert accelerate(outer) is outer
    assert fast.config._attn_implementation == "difftransformer"
    assert_close(fast(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_dropout_goes_through_transformers_own(masks):
    _, fast = pair("gpt2")
    fast.train()(tokens(1, 9))
    assert masks == []


def test_refused():
    with pytest.raises(ConfigError, match=r"attn_implementation='eager'.*set_attn_implementation\('sdpa'\)"):
        accelerate(network("llama"))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ConfigError, match="BloomForCausalLM"):
        accelerate(bloom)

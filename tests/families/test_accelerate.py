"""DiffLlama accelerated: what it computes and how it is used stay the same, and `restore` leaves nothing behind."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DiffLlamaModel,
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from difftransformer import accelerate, restore
from difftransformer.errors import ConfigError
from difftransformer.families import acceleration
from tests.support.tiny_models import VOCABULARY, tiny, tokens

HEADS = {"multi-head": (8, 8), "grouped": (8, 4), "two keys": (8, 2), "free width": (4, 4)}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def llama(heads="grouped", implementation="sdpa", seed=0, kind=DiffLlamaForCausalLM, layers=3, **fields):
    """A small model with sharp maps and lambdas that differ from layer to layer."""
    queries, keys = HEADS[heads]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": queries, "num_key_value_heads": keys, "max_position_embeddings": 256}
    sizes |= {"head_dim": 12 if heads == "free width" else 4, "eos_token_id": None, "pad_token_id": 0}
    config = DiffLlamaConfig(**sizes, attn_implementation=implementation, **fields)
    torch.manual_seed(seed)
    model = kind(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "lambda" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise if "embed" in name else 1.5 * noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def pair(**fields):
    """A model and the same model accelerated."""
    model = llama(**fields)
    return model, accelerate(copy.deepcopy(model))


def assert_close(x, expected, tolerance=None):
    tolerance = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    assert (x - expected).abs().max() <= tolerance * expected.abs().max()


def generated(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 12, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options)


@pytest.fixture
def count_calls(monkeypatch):
    """How often the op was called."""
    calls = []
    op = acceleration.normed_differential_attention

    def counted(*args, **options):
        calls.append(options)
        return op(*args, **options)

    monkeypatch.setattr(acceleration, "normed_differential_attention", counted)
    return calls


class TestLogits:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("heads", HEADS)
    @torch.no_grad()
    def test_equal(self, heads, implementation, dtype, count_calls):
        model, fast = (m.to(dtype) for m in pair(heads=heads, implementation=implementation))
        ids = tokens(2, 37)
        expected = model(ids).logits
        assert not count_calls
        tolerance = TOLERANCE[torch.float32] if implementation == "eager" else None  # its softmax is in fp32 always
        assert_close(fast(ids).logits, expected, tolerance)
        assert_close(fast(ids, use_cache=False).logits, expected, tolerance)
        assert len(count_calls) == 6
        assert all(options["is_causal"] for options in count_calls)

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("side", ["left", "right", "holes"])
    @torch.no_grad()
    def test_padding(self, implementation, side, count_calls):
        model, fast = pair(implementation=implementation)
        ids, mask = tokens(3, 20), torch.ones(3, 20, dtype=torch.long)
        where = {"left": slice(0, 7), "right": slice(13, 20), "holes": slice(4, 9)}[side]
        mask[1, where] = 0
        real = mask.bool()
        assert_close(fast(ids, attention_mask=mask).logits[real], model(ids, attention_mask=mask).logits[real])
        assert len(count_calls) == 3

    @torch.no_grad()
    def test_packed_documents(self):
        model, fast = pair()
        ids, positions = tokens(1, 20), torch.cat((torch.arange(8), torch.arange(12)))[None]
        given = {"position_ids": positions, "use_cache": False}
        assert_close(fast(ids, **given).logits, model(ids, **given).logits)
        assert_close(fast(ids, **given).logits[:, :8], fast(ids[:, :8]).logits)

    @pytest.mark.parametrize("additive", [False, True])
    @torch.no_grad()
    def test_masks_of_the_caller(self, additive, count_calls):
        """Neither causal nor the same in all rows."""
        (model, fast), ids = pair(), tokens(2, 11)
        mask = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(3)) < 0.6
        mask |= torch.eye(11, dtype=torch.bool)
        if additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        assert_close(fast(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
        assert len(count_calls) == 3

    @torch.no_grad()
    def test_not_causal_without_a_mask(self, count_calls):
        (model, fast), ids = pair(), tokens(2, 11)
        assert_close(fast(ids, is_causal=False).logits, model(ids, is_causal=False).logits)
        assert not any(options["is_causal"] for options in count_calls)

    @torch.no_grad()
    def test_long_rope_and_biases(self):
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
        (model, fast), ids = pair(rope_parameters=rope, attention_bias=True), tokens(1, 90)
        assert_close(fast(ids).logits, model(ids).logits)

    @torch.no_grad()
    def test_bf16_is_no_further_from_fp32(self):
        """Errors to the fp32 model, at most twice those of the untouched model in bf16."""
        (model, fast), ids = pair(heads="multi-head"), tokens(4, 64)
        expected = model(ids).logits
        error = (model.bfloat16()(ids).logits.float() - expected).abs().max()
        assert (fast.bfloat16()(ids).logits.float() - expected).abs().max() <= 2 * error
        assert fast(ids).logits.dtype == torch.bfloat16

    @torch.no_grad()
    def test_autocast(self, count_calls):
        (model, fast), ids = pair(), tokens(2, 24)
        expected = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            theirs, ours = model(ids).logits.float(), fast(ids).logits.float()
            cache = model(ids[:, :10]).past_key_values  # their keys stay in fp32 there
            rest = fast(ids[:, 10:], past_key_values=cache).logits.float()
        error = (theirs - expected).abs().max()
        assert 0 < (ours - expected).abs().max() <= 2 * error
        assert (rest - expected[:, 10:]).abs().max() <= 2 * error
        assert len(count_calls) == 6


class TestThroughTheirOwnCode:
    """What the op cannot say gives what DiffLlama gives."""

    @torch.no_grad()
    def test_maps(self, count_calls):
        (model, fast), ids = pair(implementation="eager"), tokens(1, 9)
        expected, found = (m(ids, output_attentions=True).attentions for m in (model, fast))
        assert len(found) == 3
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert not count_calls

    @torch.no_grad()
    def test_biased_masks(self, count_calls):
        (model, fast), ids = pair(), tokens(1, 9)
        bias = torch.randn(1, 1, 9, 9, generator=torch.Generator().manual_seed(0))
        by_head = torch.rand(1, 8, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.8
        for mask in (bias, by_head):
            assert torch.equal(fast(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
        assert not count_calls

    @torch.no_grad()
    def test_an_implementation_that_is_set_later(self, count_calls):
        model, fast = pair()
        ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
        mask[1, :3] = 0
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        AttentionInterface.register("another", sdpa_attention_forward)
        AttentionMaskInterface.register("another", sdpa_mask)
        fast.set_attn_implementation("another")
        assert_close(fast(ids, attention_mask=mask).logits[mask.bool()], expected)
        assert not count_calls
        fast.set_attn_implementation("sdpa")
        assert_close(fast(ids, attention_mask=mask).logits[mask.bool()], expected)
        assert len(count_calls) == 3


class TestGeneration:
    @pytest.mark.parametrize(
        ("heads", "implementation", "padded"),
        [
            ("multi-head", "sdpa", False),
            ("multi-head", "eager", False),
            ("grouped", "sdpa", True),
            ("grouped", "eager", True),
        ],
    )
    def test_same_tokens(self, heads, implementation, padded, count_calls):
        model, fast = pair(heads=heads, implementation=implementation)
        ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
        if padded:
            mask[1, :4] = 0
        expected = generated(model, ids, mask)
        assert expected[:, 9:].unique().numel() > 5
        for way in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            assert torch.equal(generated(fast, ids, mask, **way), expected)
        assert len(count_calls) == 3 * 12 * 3

    @pytest.mark.parametrize("way", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}])
    def test_beams(self, way):
        model, fast = pair()
        ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
        mask[0, :2] = 0
        assert torch.equal(
            generated(fast, ids, mask, num_beams=3, **way), generated(model, ids, mask, num_beams=3, **way)
        )

    @pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1, 0)])
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    @torch.no_grad()
    def test_caches_go_back_and_forth(self, kind, order):
        """Parts of one text through the model and its accelerated copy in turn, into one cache."""
        models = pair()
        ids = tokens(2, 23)
        expected = models[0](ids).logits
        config = models[0].config
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=30)
        parts = [
            models[which](part, past_key_values=cache).logits
            for which, part in zip(order, ids.split((9, 1, 6, 7), 1), strict=True)
        ]
        assert_close(torch.cat(parts, 1), expected)
        assert cache.layers[0].keys.shape[:2] == (2, 4)


class TestTraining:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("heads", HEADS)
    def test_gradients_of_all_parameters(self, heads, dtype):
        model, fast = (m.to(dtype).train() for m in pair(heads=heads))
        ids, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
        mask[1, :5] = 0
        labels = ids.masked_fill(mask == 0, -100)
        for m in (model, fast):
            m(ids, attention_mask=mask, labels=labels).loss.backward()
        theirs, ours = (dict(m.named_parameters()) for m in (model, fast))
        assert theirs.keys() == ours.keys()
        largest = max(parameter.grad.abs().max() for parameter in theirs.values())
        for name, parameter in theirs.items():
            assert parameter.grad.abs().max() > 0, name
            error, own = (ours[name].grad - parameter.grad).abs().max(), parameter.grad.abs().max()
            # Their lambda is rounded to fp32 in its gradient too.
            assert error <= (5e-5 if dtype == torch.float32 else 1e-7) * own + 1e-9 * largest, name

    def test_gradient_checkpointing(self):
        model, fast = (m.train() for m in pair())
        getattr(fast, "activation_checkpointing_enable", fast.gradient_checkpointing_enable)()
        ids = tokens(2, 16)
        for m in (model, fast):
            m(ids, labels=ids).loss.backward()
        ours, theirs = (m.model.layers[0].self_attn.k_proj.weight.grad for m in (fast, model))
        assert_close(ours, theirs)


class TestInPlace:
    def test_restored_to_the_bit(self):
        model, ids = llama(), tokens(2, 15)
        with torch.no_grad():
            expected = model(ids).logits
        before = [(name, type(m), sorted(vars(m)), id(m)) for name, m in model.named_modules()]
        assert accelerate(accelerate(model)) is model
        assert type(model.model.layers[0].self_attn) is acceleration.AcceleratedDiffLlamaAttention
        assert isinstance(model.model.layers[0].self_attn, DiffLlamaAttention)
        with torch.no_grad():
            model(ids)
        assert restore(restore(model)) is model
        assert [(name, type(m), sorted(vars(m)), id(m)) for name, m in model.named_modules()] == before
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)

    def test_copies_and_pickles_stay_accelerated(self, count_calls):
        (model, fast), ids = pair(), tokens(1, 6)
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            count_calls.clear()
            with torch.no_grad():
                assert_close(other(ids).logits, model(ids).logits)
            assert len(count_calls) == 3
            other.model.layers[0].self_attn.q_proj.weight.data.zero_()
        with torch.no_grad():
            assert_close(fast(ids).logits, model(ids).logits)

    def test_saved_as_it_was(self, tmp_path):
        model, fast = pair()
        for name, m in (("theirs", model), ("ours", fast)):
            m.save_pretrained(tmp_path / name)
        files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
        assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
        for file in files:
            assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
        loaded = DiffLlamaForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(loaded.model.layers[0].self_attn) is DiffLlamaAttention

    @torch.no_grad()
    def test_within_other_modules(self):
        model, base = llama(), llama(kind=DiffLlamaModel)
        ids = tokens(1, 9)
        expected = model(ids).logits, base(ids).last_hidden_state
        accelerate(nn.ModuleDict({"inner": model}))
        accelerate(base)
        assert_close(model(ids).logits, expected[0])
        assert_close(base(ids).last_hidden_state, expected[1])
        assert type(base.layers[2].self_attn) is acceleration.AcceleratedDiffLlamaAttention

    @torch.no_grad()
    def test_compiled_whole(self):
        model, fast = pair(layers=1)
        torch._dynamo.reset()
        compiled, ids = torch.compile(fast, fullgraph=True, backend="aot_eager"), tokens(2, 13)
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        expected, found = (m(ids, use_cache=False, attention_mask=mask).logits[mask.bool()] for m in (model, compiled))
        assert_close(found, expected)

    @torch.no_grad()
    def test_compiled_decoding(self):
        (model, fast), ids = pair(layers=1), tokens(2, 12)
        expected = model(ids).logits
        cache = StaticCache(model.config, max_cache_len=16)
        fast(ids[:, :8], past_key_values=cache)
        torch._dynamo.reset()
        compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
        for at in range(8, 12):
            assert_close(compiled(ids[:, at : at + 1], past_key_values=cache).logits[:, 0], expected[:, at])


EMPTY = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=0)


class TestRefused:
    @pytest.mark.parametrize("model", [nn.Linear(2, 2), LlamaModel(EMPTY), "model", None])
    def test_nothing_to_accelerate(self, model):
        with pytest.raises(ConfigError, match="holds no DiffLlama; pass a DiffLlamaForCausalLM"):
            accelerate(model)

    def test_our_own_model(self):
        with pytest.raises(ConfigError, match="uses the attention operator already"):
            accelerate(tiny())

    def test_other_masks(self):
        with pytest.raises(ConfigError, match=r"flex_attention.*set_attn_implementation\('sdpa'\)"):
            accelerate(llama(implementation="flex_attention"))

    @pytest.mark.parametrize("way", ["hook", "subclass"])
    def test_layers_that_others_changed(self, way):
        class Other(DiffLlamaAttention):
            pass

        model = llama()
        layer = model.model.layers[1].self_attn
        if way == "hook":
            layer.forward = layer.forward
        else:
            layer.__class__ = Other
        with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn .* whose forward was replaced"):
            accelerate(model)
        assert type(model.model.layers[0].self_attn) is DiffLlamaAttention

"""Weights: how they start, what a cast leaves alone, and what comes back from a file."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tests.support.oracle import relative_error
from tests.support.tiny_models import VOCABULARY, tiny, tiny_config, tokens

TYPES = ("diff", "diff_v2", "grouped_diff", "dex", "softmax")
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
NARROWINGS = {
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(dtype=float16)": lambda model: model.to(dtype=torch.float16),
    "half()": lambda model: model.half(),
    "bfloat16()": lambda model: model.bfloat16(),
    "to(device, bfloat16)": lambda model: model.to("cpu", torch.bfloat16),
}


def lambdas_of(model):
    return {name: p for name, p in model.named_parameters() if name.rpartition(".")[2] in LAMBDAS}


def exact_inverse_frequencies(config):
    width = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    return torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)


class TestNames:
    def test_a_checkpoint_is_a_contract(self, tmp_path):
        model = tiny(tie_word_embeddings=False, num_key_value_heads=2)
        model.save_pretrained(tmp_path)
        expected = {
            "model.embed_tokens.weight": (VOCABULARY, 32),
            "model.norm.weight": (32,),
            "lm_head.weight": (VOCABULARY, 32),
        }
        for layer in range(2):
            at = f"model.layers.{layer}."
            expected |= {
                at + "self_attn.q_proj.weight": (32, 32),
                at + "self_attn.k_proj.weight": (16, 32),
                at + "self_attn.v_proj.weight": (16, 32),
                at + "self_attn.o_proj.weight": (32, 32),
                at + "self_attn.head_norm.weight": (16,),
                at + "mlp.gate_proj.weight": (48, 32),
                at + "mlp.up_proj.weight": (48, 32),
                at + "mlp.down_proj.weight": (32, 48),
                at + "input_layernorm.weight": (32,),
                at + "post_attention_layernorm.weight": (32,),
            } | {at + "self_attn." + name: (8,) for name in LAMBDAS}
        stored = load_file(tmp_path / "model.safetensors")
        assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected

    def test_a_tied_head_is_stored_once(self, tmp_path):
        tiny().save_pretrained(tmp_path)
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


class TestRoundTrip:
    @pytest.mark.parametrize(
        ("kind", "tied", "initialization"),
        [*((kind, tied, "normal") for kind in TYPES for tied in (True, False)), ("diff", True, "mimetic")],
    )
    def test_fp32(self, kind, tied, initialization, tmp_path):
        model = tiny(attention_type=kind, tie_word_embeddings=tied, initialization=initialization)
        model.save_pretrained(tmp_path)
        before = torch.get_rng_state()
        loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn
        assert not loaded.training
        weights, expected = loaded.state_dict(), model.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        ids = tokens(2, 9)
        assert torch.equal(loaded(ids).logits, model(ids).logits)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("stored", [torch.float32, "narrow"])
    def test_low_precision(self, dtype, stored, tmp_path):
        """Lambdas come back bit for bit in fp32, whether the file was narrow or the loading narrows."""
        model = tiny()
        lambdas = {name: p.detach().clone() for name, p in lambdas_of(model).items()}
        assert len(lambdas) == 8
        rounded = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
        if stored == "narrow":
            model.to(dtype)
        model.save_pretrained(tmp_path)
        file = load_file(tmp_path / "model.safetensors")
        for load in (
            {"dtype": dtype},
            {"dtype": "auto"} if stored == "narrow" else {"dtype": str(dtype).removeprefix("torch.")},
        ):
            loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path, **load)
            for name, tensor in loaded.state_dict().items():
                if name in lambdas:
                    assert file[name].dtype == tensor.dtype == torch.float32
                    assert torch.equal(tensor, lambdas[name]), name
                else:
                    assert tensor.dtype == dtype
                    assert torch.equal(tensor, rounded[name]), name
            inverse = loaded.model.rotary_emb.inv_freq
            assert inverse.dtype == torch.float32
            assert relative_error(inverse, exact_inverse_frequencies(loaded.config)) < 1e-6
            assert loaded(tokens(1, 5)).logits.dtype == dtype

    def test_base_model_and_head(self, tmp_path):
        """A checkpoint of the language model gives the decoder, and the reverse a model with the decoder's weights."""
        model = tiny()
        model.save_pretrained(tmp_path / "whole")
        base = AutoModel.from_pretrained(tmp_path / "whole")
        ids = tokens(1, 6)
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
        base.save_pretrained(tmp_path / "base")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert torch.equal(again(ids).logits, model(ids).logits)

    def test_configuration(self, tmp_path):
        heads = {"num_differential_heads": 3, "num_differential_key_value_heads": 1, "value_head_dim": 10}
        rope = {"rope_type": "default", "rope_theta": 77.0}
        others = {"sliding_window": 7, "initialization": "mimetic", "attn_backend": "chunked", "rope_parameters": rope}
        config = tiny_config(**heads, **others)
        config.save_pretrained(tmp_path)
        loaded = DiffTransformerConfig.from_pretrained(tmp_path)
        assert loaded.to_dict() == config.to_dict()
        assert loaded.head_layout() == config.head_layout()


class TestCasts:
    @pytest.mark.parametrize("name", NARROWINGS)
    def test_lambdas_and_frequencies_stay(self, name):
        model = tiny()
        lambdas = {key: p.detach().clone() for key, p in lambdas_of(model).items()}
        parameters = dict(model.named_parameters())
        inverse = model.model.rotary_emb.inv_freq.clone()
        model = NARROWINGS[name](model)
        for key, parameter in model.named_parameters():
            assert parameter is parameters[key]  # an optimizer still holds it
            if key in lambdas:
                assert parameter.dtype == torch.float32
                assert torch.equal(parameter, lambdas[key])
            else:
                assert parameter.dtype in (torch.bfloat16, torch.float16)
        assert torch.equal(model.model.rotary_emb.inv_freq, inverse)
        assert relative_error(inverse, exact_inverse_frequencies(model.config)) < 1e-6

    def test_gradients_of_lambdas_are_not_narrowed(self):
        model = tiny()
        model(tokens(1, 6), labels=tokens(1, 6)).loss.backward()
        model.bfloat16()
        for parameter in model.parameters():
            assert parameter.grad.dtype == parameter.dtype

    def test_widening_goes_both_ways(self):
        model = tiny()
        lambdas = {key: p.detach().clone() for key, p in lambdas_of(model).items()}
        model.double()
        assert all(p.dtype == torch.float64 for p in model.parameters())
        assert model.model.layers[0].self_attn.lam().dtype == torch.float64
        model.float()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert all(torch.equal(p, lambdas[key]) for key, p in lambdas_of(model).items())
        model.double().half()
        assert all(p.dtype == torch.float32 for p in lambdas_of(model).values())

    def test_long_positions_are_not_blurred(self):
        """In bf16 neighbours at position 1000 would have one angle."""
        model = tiny().to(torch.bfloat16)
        positions = torch.tensor([[1000, 1001]])
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), positions)
        angles = positions[0, :, None] * exact_inverse_frequencies(model.config)
        assert cos.dtype == torch.float32
        assert (cos[0] - angles.cos()).abs().max() < 1e-4
        assert (sin[0] - angles.sin()).abs().max() < 1e-4


class TestStart:
    def test_lambda_init(self):
        """arXiv:2410.05258 section 2.1; the values of layers 1 to 12 worked out apart."""
        values = (0.200, 0.356, 0.471, 0.556, 0.619, 0.666, 0.701, 0.727, 0.746, 0.760, 0.770, 0.778)
        model = DiffTransformerForCausalLM(tiny_config(num_hidden_layers=12))
        for layer, value in zip(model.model.layers, values, strict=True):
            assert layer.self_attn.lambda_init == pytest.approx(value, abs=5e-4)
            with torch.no_grad():
                for name in LAMBDAS:
                    getattr(layer.self_attn, name).zero_()
            assert layer.self_attn.lam().item() == pytest.approx(value, abs=5e-4)

    @pytest.mark.parametrize("change", ["a layer is removed", "a constant is assigned"])
    def test_constants_that_a_folder_does_not_hold(self, change, tmp_path):
        model = tiny(num_hidden_layers=3)
        if change == "a layer is removed":
            model.model.layers, model.config.num_hidden_layers = model.model.layers[1:], 2
        else:
            model.model.layers[0].self_attn.lambda_value = 0.3
        with pytest.warns(UserWarning, match=r"layer 0 has lambda_value=0\.3\d*, and the saved folder opens with 0\.2"):
            model.save_pretrained(tmp_path)

    def test_missing_weights_start_anew(self, tmp_path):
        """Only they: a file without lambdas keeps the rest, and draws lambdas rather than leaving memory as it was."""
        model = tiny()
        kept = {name: t for name, t in model.state_dict().items() if "lambda" not in name and name != "lm_head.weight"}
        model.save_pretrained(tmp_path, state_dict=kept)
        loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
        drawn = torch.cat([p.detach() for p in lambdas_of(loaded).values()])
        assert drawn.std().item() == pytest.approx(0.1, rel=0.5)
        for name, tensor in kept.items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("attention_type", ["diff", "softmax"])
def test_a_model_of_images_around_the_model_is_saved_and_opened_again(attention_type, tmp_path):
    """transformers starts each module of a model inside another one. A weight that the file lacks starts as when built."""
    text = tiny_config(attention_type=attention_type, initialization="fan_in", depth_scaled_residual=True)
    widths = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    images = CLIPVisionConfig(image_size=8, patch_size=4, **widths)
    config = LlavaConfig(text_config=text, vision_config=images, image_token_index=3)
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    before = torch.get_rng_state()
    opened = LlavaForConditionalGeneration.from_pretrained(tmp_path / "whole")
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    words = tokens(2, 9) % 50 + 4
    assert torch.equal(opened(input_ids=words).logits, model(input_ids=words).logits)

    lacking = "model.language_model.layers.1.mlp.down_proj.weight"
    state = {name: tensor for name, tensor in model.state_dict().items() if name != lacking}
    model.save_pretrained(tmp_path / "part", state_dict=state)
    drawn = LlavaForConditionalGeneration.from_pretrained(tmp_path / "part").state_dict()
    bound = text.intermediate_size**-0.5 / (2 * text.num_hidden_layers) ** 0.5
    assert 0.95 * bound < drawn[lacking].abs().max() <= bound
    assert drawn[lacking].std() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert all(torch.equal(drawn[name], tensor) for name, tensor in state.items())

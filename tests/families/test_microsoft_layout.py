"""Microsoft's modules in and out: their equations in float64 against our layers, to the bit where rows only move."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from difftransformer import DiffTransformerForCausalLM
from difftransformer.attention import DifferentialAttention, DifferentialAttentionV2, DifferentialOptions
from difftransformer.errors import CheckpointError, ConfigError, ShapeError
from difftransformer.families import (
    convert_folder,
    load_microsoft_attention,
    load_microsoft_state,
    microsoft_attention_state,
    microsoft_state,
)
from tests.support.public_modules import (
    draw,
    language_model,
    microsoft_naive_v1,
    microsoft_v1,
    microsoft_v2,
    tables,
    v1_module_shapes,
    v2_module_shapes,
    whole_shapes,
)
from tests.support.tiny_models import VOCABULARY, tiny_config, tokens

V1 = {
    "MHA": v1_module_shapes(32, 4, 4),
    "GQA": v1_module_shapes(64, 8, 2),
    "one key head": v1_module_shapes(32, 2, 1),
    "free head_dim": v1_module_shapes(32, 3, 3, head_dim=6),
}
V2 = {
    "MHA": v2_module_shapes(32, 4, 4, 8),
    "GQA": v2_module_shapes(64, 8, 2, 8),
    "odd heads": v2_module_shapes(24, 3, 1, 4),
    "free head_dim": v2_module_shapes(32, 2, 2, 6),
}


def output(layer, x):
    with torch.no_grad():
        return layer(x[None], position_embeddings=tables(len(x), layer.layout.head_dim))[0][0]


class TestLayers:
    @pytest.mark.parametrize("depth", [0, 3])
    @pytest.mark.parametrize("case", V1)
    def test_v1(self, case, depth):
        state = {name: tensor.double() for name, tensor in draw(V1[case], seed=depth).items()}
        layer = load_microsoft_attention(state, layer_index=depth)
        x = torch.randn(9, layer.embed_dim, dtype=torch.float64)
        assert (output(layer, x) - microsoft_v1(state, x, depth)).abs().max() < 1e-12

    @pytest.mark.parametrize("case", V1)
    def test_the_naive_v1(self, case):
        """With grouped keys its weights mean another function than the flash modules'."""
        state = {name: tensor.double() for name, tensor in draw(V1[case]).items()}
        layer = load_microsoft_attention(state, layer_index=1, module="naive")
        x = torch.randn(9, layer.embed_dim, dtype=torch.float64)
        assert (output(layer, x) - microsoft_naive_v1(state, x, 1)).abs().max() < 1e-12
        flash = output(load_microsoft_attention(state, layer_index=1), x)
        grouped = layer.layout.num_heads * 2 * layer.layout.head_dim > len(state["k_proj.weight"])
        assert ((output(layer, x) - flash).abs().max() > 0.1) == grouped

    @pytest.mark.parametrize("case", V2)
    def test_v2(self, case):
        state = {name: tensor.double() for name, tensor in draw(V2[case]).items()}
        layer = load_microsoft_attention(state, layer_index=1)
        assert isinstance(layer, DifferentialAttentionV2)
        x = torch.randn(9, layer.embed_dim, dtype=torch.float64)
        assert (output(layer, x) - microsoft_v2(state, x)).abs().max() < 1e-12

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("shapes", [V1["MHA"], V1["GQA"], V2["GQA"], V2["odd heads"]])
    def test_there_and_back_to_the_bit(self, shapes, dtype):
        state = {name: tensor.to(dtype) for name, tensor in draw(shapes).items()}
        layer = load_microsoft_attention(state, layer_index=2)
        again = microsoft_attention_state(layer)
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
        third = load_microsoft_attention(again, layer_index=2).state_dict()
        assert all(torch.equal(third[name], tensor) for name, tensor in layer.state_dict().items())

    def test_the_layer_holds_copies_and_learns(self):
        state = draw(V1["MHA"])
        before = {name: tensor.clone() for name, tensor in state.items()}
        layer = load_microsoft_attention(state, layer_index=0)
        layer(torch.randn(1, 5, 32))[0].sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1)
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())

    def test_narrow_weights_keep_lambda_in_fp32(self):
        state = {name: tensor.bfloat16() for name, tensor in draw(V1["MHA"]).items()}
        layer = load_microsoft_attention(state, layer_index=0)
        assert layer.q_proj.weight.dtype == torch.bfloat16
        assert layer.lambda_q1.dtype == torch.float32
        assert torch.equal(layer.lambda_q1, state["lambda_q1"].float())

    def test_modules_of_before_the_gain(self):
        state = {name: tensor.double() for name, tensor in draw(V1["MHA"]).items() if name != "subln.weight"}
        layer = load_microsoft_attention(state, layer_index=1)
        assert layer.options.head_norm == "plain"
        x = torch.randn(7, 32, dtype=torch.float64)
        assert (output(layer, x) - microsoft_v1(state, x, 1)).abs().max() < 1e-12
        # Today's module has a gain: ones are the same function.
        assert torch.equal(microsoft_attention_state(layer)["subln.weight"], torch.ones(8, dtype=torch.float64))


def changed(state, change):
    """Take a tensor out of a state, or give some another shape."""
    if isinstance(change, str):
        del state[change]
    else:
        state.update({name: torch.ones(shape) for name, shape in change.items()})


class TestRefusals:
    @pytest.mark.parametrize(
        ("shapes", "change", "error", "words"),
        [  # a change is a tensor that is taken out, or the shape that it gets
            (V1, "k_proj.weight", CheckpointError, ("k_proj.weight", "missing")),
            (V1, "lambda_k2", CheckpointError, ("lambda_k2", "missing")),
            (V1, {"bias": (1,)}, CheckpointError, ("bias", "not part")),
            (V1, {"q_proj.weight": (30, 32)}, ShapeError, ("q_proj.weight", "30", "8")),
            (V1, {"v_proj.weight": (16, 32)}, ShapeError, ("v_proj.weight", "(32, 32)")),
            (V1, {"out_proj.weight": (32, 8)}, ShapeError, ("out_proj.weight", "(32, 32)")),
            (V1, {"subln.weight": (4,)}, ShapeError, ("subln.weight", "(4,)", "(8,)")),
            (V2, "o_proj.weight", CheckpointError, ("o_proj.weight", "missing")),
            (V2, {"q_proj.weight": (60, 32)}, ShapeError, ("q_proj.weight", "60", "8")),
            (V2, {"v_proj.weight": (16, 32)}, ShapeError, ("v_proj.weight", "(32, 32)")),
            (V2, {"subln.weight": (16,)}, CheckpointError, ("subln.weight", "not part")),
        ],
    )
    def test_states(self, shapes, change, error, words):
        state = draw(shapes["MHA"])
        changed(state, change)
        with pytest.raises(error) as caught:
            load_microsoft_attention(state, layer_index=0)
        assert all(word in str(caught.value) for word in words), caught.value

    def test_unknown_modules(self):
        for state, module in ((draw(V1["GQA"]), "eager"), (draw(V2["GQA"]), "naive")):
            with pytest.raises(ConfigError, match=f"module='{module}': give 'flash', or 'naive' for V1"):
                load_microsoft_attention(state, layer_index=0, module=module)

    def test_heads_that_no_op_has(self):
        state = draw(V1["MHA"] | {"k_proj.weight": (24, 32), "v_proj.weight": (24, 32)})
        with pytest.raises(ConfigError, match="num_heads=4 is not a multiple of num_key_value_heads=3"):
            load_microsoft_attention(state, layer_index=0)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"lambda_form": "head"}, ("lambda_form='head'", "'layer'")),
            ({"lambda_form": "constant"}, ("lambda_form='constant'", "'layer'")),
            ({"lambda_form": "scalar"}, ("lambda_form='scalar'", "'layer'")),
            ({"lambda_value": 0.2}, ("lambda_value=0.2", "None")),
            ({"head_scale": 0.8}, ("head_scale=0.8", "None")),
            ({"shared_key": True}, ("shared_key=True", "False")),
            ({"head_norm": "none"}, ("head_norm='none'", "'gain'")),
            ({"lambda_init": 0.5}, ("lambda_init=0.5", "0.2")),
            ({"lambda_form": "token"}, ("head_norm='gain'", "'none'")),
            ({"lambda_form": "token", "head_norm": "none"}, ("shared_key=False", "True")),
            ({"lambda_form": "token", "head_norm": "none", "shared_key": True}, ("value_head_dim=8", "4")),
            ({"head_dim": 6}, ("head_dim=6", "expected head_dim=4")),
            ({"value_head_dim": 4}, ("value_head_dim=4", "8")),
            ({"head_norm_eps": 1e-6}, ("head_norm_eps=1e-06", "1e-05")),
        ],
    )
    def test_layers(self, fields, words):
        sizes = {name: fields[name] for name in fields if name.endswith(("head_dim", "eps"))}
        options = DifferentialOptions(**{name: fields[name] for name in fields if name not in sizes})
        with pytest.raises(ConfigError) as caught:
            microsoft_attention_state(DifferentialAttention(32, 4, options=options, **sizes))
        assert all(word in str(caught.value) for word in words), caught.value

    def test_biases(self):
        layer = DifferentialAttention(32, 4)
        layer.v_proj = torch.nn.Linear(32, 32)
        with pytest.raises(ConfigError, match=r"v_proj\.bias"):
            microsoft_attention_state(layer)

    def test_a_plain_transformer(self):
        with pytest.raises(ConfigError, match="attention_type='softmax'"):
            microsoft_state(DiffTransformerForCausalLM(tiny_config(attention_type="softmax")))


MODELS = {
    "MHA": ({"hidden_size": 32, "num_attention_heads": 8}, {"heads": 4, "groups": 4}),
    "GQA": ({"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 4}, {"heads": 8, "groups": 2}),
    "free head_dim": ({"hidden_size": 32, "num_attention_heads": 4, "head_dim": 6}, {"heads": 2, "groups": 2}),
}


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", MODELS)
def test_from_microsoft_through_diffllama_and_back(case, tied, tmp_path):
    """Microsoft (float64, from the equations) -> ours -> stock DiffLlama -> ours: the same logits in fp32."""
    fields, heads = MODELS[case]
    hidden = fields["hidden_size"]
    config = tiny_config(**fields, tie_word_embeddings=tied, num_hidden_layers=2)
    attention = v1_module_shapes(hidden, heads["heads"], heads["groups"], config.head_dim)
    state = draw(whole_shapes(attention, hidden=hidden, layers=2, tied=tied), seed=7)
    ids = tokens(12)
    expected = language_model(state, ids, microsoft_v1, 2)
    assert expected.std() > 0.3

    ours = load_microsoft_state(state, config)
    ours.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "diffllama", to="diffllama")
    convert_folder(tmp_path / "diffllama", tmp_path / "back", to="difftransformer")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "diffllama")
    assert type(stock).__module__.startswith("transformers.models.diffllama")
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back")
    for model in (ours, stock, back):
        assert (model(ids[None]).logits[0] - expected).abs().max() < 1e-5
    if case != "free head_dim":  # their class has no such setting
        again = microsoft_state(ours)
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


@torch.no_grad()
def test_a_whole_v2_model():
    config = tiny_config(attention_type="diff_v2", hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    state = draw(whole_shapes(v2_module_shapes(64, 8, 2, 8), hidden=64, layers=2), seed=3)
    ids = tokens(12)
    expected = language_model(state, ids, lambda w, x, _: microsoft_v2(w, x), 2)
    model = load_microsoft_state(state, config)
    assert (model(ids[None]).logits[0] - expected).abs().max() < 1e-5
    again = microsoft_state(model)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


class TestWholeModelRefusals:
    STATE = whole_shapes(v1_module_shapes(32, 2, 2), hidden=32, layers=2)

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ("model.layers.1.mlp.up_proj.weight", CheckpointError, ("layers.1.mlp.up_proj", "missing")),
            ("model.layers.1.self_attn.subln.weight", CheckpointError, ("subln.weight is missing",)),
            ({"score.weight": (2,)}, CheckpointError, ("score.weight", "not part")),
            (
                {"model.layers.2.self_attn.q_proj.weight": (32, 32)},
                CheckpointError,
                ("layers.2.self_attn.q_proj.weight", "not part"),
            ),
            (
                {"model.embed_tokens.weight": (60, 32)},
                ShapeError,
                ("embed_tokens.weight", "(60, 32)", f"({VOCABULARY}, 32)"),
            ),
        ],
    )
    def test_states(self, change, error, words):
        state = draw(self.STATE)
        changed(state, change)
        with pytest.raises(error) as caught:
            load_microsoft_state(state, tiny_config())
        assert all(word in str(caught.value) for word in words), caught.value

    def test_a_gain_where_the_configuration_has_none(self):
        with pytest.raises(CheckpointError, match="subln"):
            load_microsoft_state(draw(self.STATE), tiny_config(head_norm="plain"))
        state = {name: t for name, t in draw(self.STATE).items() if "subln" not in name}
        assert load_microsoft_state(state, tiny_config(head_norm="plain"))

    def test_a_separate_output_layer_where_the_configuration_ties_it(self):
        """One of them would be lost, unless they are equal."""
        state = draw(whole_shapes(v1_module_shapes(32, 2, 2), hidden=32, layers=2, tied=False))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, though"):
            load_microsoft_state(state, tiny_config(tie_word_embeddings=True))
        equal = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
        ids = tokens(12)
        found = load_microsoft_state(equal, tiny_config(tie_word_embeddings=True))(ids[None]).logits[0]
        assert (found - language_model(equal, ids, microsoft_v1, 2)).abs().max() < 1e-5

    def test_a_window(self):
        """Microsoft's modules see all positions."""
        config = tiny_config(sliding_window=8)
        with pytest.raises(ConfigError, match="sliding_window=8: Microsoft's module sees all positions; expected None"):
            microsoft_state(DiffTransformerForCausalLM(config))
        with pytest.raises(ConfigError, match="sliding_window=8"):
            load_microsoft_state(draw(self.STATE), config)

    def test_an_eps_that_theirs_has_not(self):
        with pytest.raises(ConfigError, match="head_norm_eps=1e-06"):
            load_microsoft_state(draw(self.STATE), tiny_config(head_norm_eps=1e-6))

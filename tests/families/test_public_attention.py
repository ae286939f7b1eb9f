"""Attention of Phi-4-mini-flash, Motif-2.6B and Motif-2-12.7B against their equations in float64."""

import pytest
import torch

from difftransformer.attention import DifferentialAttention, DifferentialOptions, GroupedDifferentialAttention
from difftransformer.errors import CheckpointError, ConfigError, ShapeError
from difftransformer.families import (
    load_motif_attention,
    load_phi4flash_attention,
    microsoft_attention_state,
    motif_attention_state,
    phi4flash_attention_state,
)
from difftransformer.families.motif import motif_lambda_init
from tests.support.public_modules import (
    draw,
    grouped_motif,
    motif,
    phi4flash,
    phi4flash_shapes,
    tables,
    v1_module_shapes,
)


def doubled(state):
    return {name: tensor.double() for name, tensor in state.items()}


def motif_state(biased=False, heads=4, groups=2, seed=0):
    shapes = v1_module_shapes(32, heads, groups, output="o_proj")
    if biased:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if "_proj" in name}
    return draw(shapes, seed)


class TestPhi4Flash:
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (4, 1)])
    def test_equations(self, heads, groups, window):
        state = doubled(draw(phi4flash_shapes(32, heads, groups)))
        layer = load_phi4flash_attention(state, layer_index=5)
        x = torch.randn(9, 32, dtype=torch.float64)
        with torch.no_grad():
            out = layer(x[None], window=window)[0][0]
        assert (out - phi4flash(state, x, 5, window)).abs().max() < 1e-12

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_there_and_back_to_the_bit(self, dtype):
        state = {name: tensor.to(dtype) for name, tensor in draw(phi4flash_shapes(32, 4, 2)).items()}
        again = phi4flash_attention_state(load_phi4flash_attention(state, layer_index=1))
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())

    def test_a_layer_without_bias_gets_zeros(self):
        layer = DifferentialAttention(32, 4, num_key_value_heads=2, layer_index=1).double()
        state = phi4flash_attention_state(layer)
        assert not state["Wqkv.bias"].any()
        x = torch.randn(9, 32, dtype=torch.float64)
        with torch.no_grad():
            assert (layer(x[None])[0][0] - phi4flash(state, x, 1)).abs().max() < 1e-12

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda s: s.pop("Wqkv.weight"), CheckpointError, ("Wqkv.weight", "missing")),
            (lambda s: s.pop("inner_cross_attn.subln.weight"), CheckpointError, ("subln.weight", "missing")),
            (lambda s: s.pop("inner_cross_attn.lambda_q1"), CheckpointError, ("lambda_q1", "missing")),
            (lambda s: s.update(A_log=torch.ones(3)), CheckpointError, ("A_log", "not part")),
            (lambda s: s.update({"Wqkv.weight": torch.ones(32, 32)}), ShapeError, ("another layer's keys",)),
            (lambda s: s.update({"Wqkv.weight": torch.ones(50, 32)}), ShapeError, ("Wqkv.weight has 50 rows",)),
            (lambda s: s.update({"Wqkv.bias": torch.ones(5)}), ShapeError, ("Wqkv.bias", "(5,)", "(64,)")),
            (lambda s: s.update({"out_proj.weight": torch.ones(32, 30)}), ShapeError, ("out_proj.weight has 30",)),
        ],
    )
    def test_refusals(self, change, error, words):
        state = draw(phi4flash_shapes(32, 4, 2))
        change(state)
        with pytest.raises(error) as caught:
            load_phi4flash_attention(state, layer_index=0)
        assert all(word in str(caught.value) for word in words), caught.value

    def test_layers_that_it_lacks(self):
        with pytest.raises(ConfigError, match=r"head_dim=6: .* expected head_dim=4"):
            phi4flash_attention_state(DifferentialAttention(32, 4, head_dim=6))
        with pytest.raises(ConfigError, match="head_norm='none'"):
            phi4flash_attention_state(DifferentialAttention(32, 4, options=DifferentialOptions(head_norm="none")))


class TestMotif:
    @pytest.mark.parametrize("depth", [0, 4])
    @pytest.mark.parametrize("biased", [False, True])
    def test_equations(self, biased, depth):
        state = doubled(motif_state(biased))
        layer = load_motif_attention(state, layer_index=depth)
        assert (layer.lambda_init < 0) == (depth == 0)
        x = torch.randn(9, 32, dtype=torch.float64)
        with torch.no_grad():
            out = layer(x[None], position_embeddings=tables(9, layer.layout.head_dim))[0][0]
        assert (out - motif(state, x, depth)).abs().max() < 1e-12

    @pytest.mark.parametrize("biased", [False, True])
    def test_there_and_back_to_the_bit(self, biased):
        state = motif_state(biased)
        again = motif_attention_state(load_motif_attention(state, layer_index=3))
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())

    def test_eps_is_kept(self):
        assert load_motif_attention(motif_state(), layer_index=0, head_norm_eps=1e-6).head_norm.eps == 1e-6

    def test_refusals(self):
        with pytest.raises(
            ShapeError, match=r"o_proj\.weight has 24 columns, expected twice the head_dim = 8 for every"
        ):
            load_motif_attention(motif_state() | {"o_proj.weight": torch.ones(32, 24)}, layer_index=0)
        with pytest.raises(CheckpointError, match=r"subln\.weight is missing"):
            load_motif_attention(
                {name: t for name, t in motif_state().items() if name != "subln.weight"}, layer_index=0
            )
        with pytest.raises(ConfigError, match=r"lambda_init=0.200000: .* expected -0.009915"):
            motif_attention_state(DifferentialAttention(32, 4))
        options = DifferentialOptions(lambda_init=motif_lambda_init(0), head_norm="plain")
        assert torch.equal(
            motif_attention_state(DifferentialAttention(32, 4, options=options))["subln.weight"], torch.ones(8)
        )


def grouped_state(signal=8, noise=2, groups=2, biased=False, d=4, seed=0):
    rows = {"q_proj": (signal + noise) * d, "k_proj": 2 * groups * d, "v_proj": 2 * groups * d}
    shapes = {f"{name}.weight": (count, 20) for name, count in rows.items()}
    shapes |= {"o_proj.weight": (20, 2 * signal * d), "subln.weight": (2 * d,)}
    shapes |= {f"lambda_{which}": (d,) for which in ("q1", "k1", "q2", "k2")}
    if biased:
        shapes |= {f"{name}.bias": (count,) for name, count in (rows | {"o_proj": 20}).items()}
    return draw(shapes, seed)


class TestGroupedMotif:
    @pytest.mark.parametrize("depth", [0, 4])
    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize(("signal", "noise", "groups"), [(8, 2, 2), (9, 3, 1), (8, 4, 2)])
    def test_equations(self, signal, noise, groups, biased, depth):
        state = doubled(grouped_state(signal, noise, groups, biased))
        layer = load_motif_attention(state, layer_index=depth)
        assert isinstance(layer, GroupedDifferentialAttention)
        x = torch.randn(9, 20, dtype=torch.float64)
        with torch.no_grad():
            out = layer(x[None], position_embeddings=tables(9, 4))[0][0]
        assert (out - grouped_motif(state, x, depth)).abs().max() < 1e-12

    def test_the_published_shapes(self):
        """hidden_size 4096, 40 heads, 16 key/value heads, 8 noise heads, head_dim 128."""
        rows = {"q_proj": 40 * 128, "k_proj": 16 * 128, "v_proj": 16 * 128}
        with torch.device("meta"):
            state = {f"{name}.weight": torch.empty(count, 4096) for name, count in rows.items()}
            state |= {"o_proj.weight": torch.empty(4096, 64 * 128), "subln.weight": torch.empty(256)}
            state |= {f"lambda_{which}": torch.empty(128) for which in ("q1", "k1", "q2", "k2")}
            layout = load_motif_attention(state, layer_index=0).layout
        assert (layout.num_heads, layout.num_noise_heads, layout.num_key_value_heads) == (32, 8, 8)
        assert (layout.head_dim, layout.value_head_dim, layout.cached_values_per_token()) == (128, 256, 32 * 128)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("biased", [False, True])
    def test_there_and_back_to_the_bit(self, biased, dtype):
        state = {name: tensor.to(dtype) for name, tensor in grouped_state(biased=biased).items()}
        again = motif_attention_state(load_motif_attention(state, layer_index=3))
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda s: s.pop("k_proj.weight"), CheckpointError, ("k_proj.weight", "missing")),
            (lambda s: s.pop("subln.weight"), CheckpointError, ("subln.weight", "missing")),
            (lambda s: s.update(extra=torch.ones(1)), CheckpointError, ("extra", "not part")),
            (lambda s: s.update({"v_proj.weight": torch.ones(8, 20)}), ShapeError, ("v_proj.weight", "(8, 20)")),
            (lambda s: s.update({"q_proj.weight": torch.ones(42, 20)}), ShapeError, ("q_proj.weight has 42 rows",)),
            (lambda s: s.update({"o_proj.weight": torch.ones(20, 56)}), ShapeError, ("o_proj.weight has 56 columns",)),
            (lambda s: s.update({"k_proj.weight": torch.ones(24, 20)}), ShapeError, ("k_proj.weight has 24 rows",)),
        ],
    )
    def test_refusals(self, change, error, words):
        state = grouped_state()
        change(state)
        with pytest.raises(error) as caught:
            load_motif_attention(state, layer_index=0)
        assert all(word in str(caught.value) for word in words), caught.value

    def test_layers_that_it_lacks(self):
        options = DifferentialOptions(lambda_init=motif_lambda_init(0))
        with pytest.raises(
            ConfigError, match=r"num_key_value_heads=8: Motif-2-12\.7B has a noise key for every signal key"
        ):
            motif_attention_state(GroupedDifferentialAttention(40, 8, options=options))
        with pytest.raises(ConfigError, match=r"expected -0\.009915"):
            motif_attention_state(GroupedDifferentialAttention(40, 8, num_key_value_heads=2))

    def test_layouts_of_v1_refuse_it(self):
        layer = GroupedDifferentialAttention(64, 8, num_key_value_heads=2, head_dim=4)
        for export in (microsoft_attention_state, phi4flash_attention_state):
            with pytest.raises(
                ConfigError, match=r"num_noise_heads=2: .* has V1 attention; expected as many as num_heads=8"
            ):
                export(layer)

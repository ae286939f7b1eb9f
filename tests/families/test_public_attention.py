"""Attention of Phi-4-mini-flash, Motif-2.6B, Motif-2-12.7B and timm against their equations in float64."""

import re

import pytest
import torch

from difftransformer.attention import (
    AddedDifferentialAttentionV2,
    DifferentialAttention,
    DifferentialOptions,
    ExclusiveDifferentialAttention,
    GroupedDifferentialAttention,
)
from difftransformer.errors import CheckpointError, ConfigError, ShapeError
from difftransformer.families import (
    load_motif_attention,
    load_phi4flash_attention,
    load_timm_attention,
    microsoft_attention_state,
    motif_attention_state,
    phi4flash_attention_state,
    timm_attention_state,
)
from difftransformer.families.motif import motif_lambda_init
from tests.support.public_modules import (
    draw,
    grouped_motif,
    motif,
    phi4flash,
    phi4flash_shapes,
    tables,
    timm,
    timm_shapes,
    v1_module_shapes,
)


def doubled(state):
    return {name: tensor.double() for name, tensor in state.items()}


def motif_state(biased=False, heads=4, groups=2, seed=0):
    shapes = v1_module_shapes(32, heads, groups, output="o_proj")
    if biased:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if "_proj" in name}
    return draw(shapes, seed)


def grouped_state(signal=8, noise=2, groups=2, biased=False, d=4, seed=0):
    rows = {"q_proj": (signal + noise) * d, "k_proj": 2 * groups * d, "v_proj": 2 * groups * d}
    shapes = {f"{name}.weight": (count, 20) for name, count in rows.items()}
    shapes |= {"o_proj.weight": (20, 2 * signal * d), "subln.weight": (2 * d,)}
    shapes |= {f"lambda_{which}": (d,) for which in ("q1", "k1", "q2", "k2")}
    if biased:
        shapes |= {f"{name}.bias": (count,) for name, count in (rows | {"o_proj": 20}).items()}
    return draw(shapes, seed)


def phi_state(heads=4, groups=2):
    return draw(phi4flash_shapes(32, heads, groups))


def timm_state(qk_norm=False):
    return draw(timm_shapes(32, 4, qk_norm))


PHI, MOTIF, TIMM = load_phi4flash_attention, load_motif_attention, load_timm_attention
# Tensors, what makes a layer of them, and the module's equations of tensors, hidden states and depth.
MODULES = {
    **{f"Phi {shape}": (phi_state(*shape), PHI, phi4flash) for shape in ((2, 2), (4, 2), (4, 1))},
    **{f"Motif-2.6B {biased}": (motif_state(biased), MOTIF, motif) for biased in (False, True)},
    **{
        f"Motif-2-12.7B {shape} {biased}": (grouped_state(*shape, biased), MOTIF, grouped_motif)
        for shape in ((8, 2, 2), (9, 3, 1), (8, 4, 2))
        for biased in (False, True)
    },
    **{f"timm {qk_norm}": (timm_state(qk_norm), TIMM, timm) for qk_norm in (False, True)},
}


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_equations(name, depth):
    state, load, equations = MODULES[name]
    state = doubled(state)
    layer = load(state, layer_index=depth)
    assert isinstance(layer, GroupedDifferentialAttention) == (equations is grouped_motif)
    x = torch.randn(9, layer.embed_dim, dtype=torch.float64)
    calls = {PHI: {}, TIMM: {"is_causal": False}, MOTIF: {"position_embeddings": tables(9, layer.layout.head_dim)}}
    assert (layer(x[None], **calls[load])[0][0] - equations(state, x, depth)).abs().max() < 1e-12
    if load is PHI:
        assert (layer(x[None], window=3)[0][0] - phi4flash(state, x, depth, 3)).abs().max() < 1e-12
    elif load is MOTIF:
        assert (layer.lambda_init < 0) == (depth == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_there_and_back_to_the_bit(name, dtype):
    state, load, _ = MODULES[name]
    state, back = {key: t.to(dtype) for key, t in state.items()}, BACK[load]
    again = back(load(state, layer_index=3))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())


BACK = {PHI: phi4flash_attention_state, MOTIF: motif_attention_state, TIMM: timm_attention_state}


@torch.no_grad()
def test_what_a_layer_lacks_is_written_so_that_it_changes_nothing():
    layer = DifferentialAttention(32, 4, num_key_value_heads=2, layer_index=1).double()
    state = phi4flash_attention_state(layer)
    assert not state["Wqkv.bias"].any()
    x = torch.randn(9, 32, dtype=torch.float64)
    assert (layer(x[None])[0][0] - phi4flash(state, x, 1)).abs().max() < 1e-12
    assert not [
        name for name in timm_attention_state(DifferentialAttention(32, 4)) if "bias" in name or "q_norm" in name
    ]
    options = DifferentialOptions(lambda_init=motif_lambda_init(0), head_norm="plain")
    plain = motif_attention_state(DifferentialAttention(32, 4, options=options))
    assert torch.equal(plain["subln.weight"], torch.ones(8))
    assert MOTIF(motif_state(), layer_index=0, head_norm_eps=1e-6).head_norm.eps == 1e-6


def test_the_published_shapes():
    """hidden_size 4096, 40 heads, 16 key/value heads, 8 noise heads, head_dim 128."""
    rows = {"q_proj": 40 * 128, "k_proj": 16 * 128, "v_proj": 16 * 128}
    with torch.device("meta"):
        state = {f"{name}.weight": torch.empty(count, 4096) for name, count in rows.items()}
        state |= {"o_proj.weight": torch.empty(4096, 64 * 128), "subln.weight": torch.empty(256)}
        state |= {f"lambda_{which}": torch.empty(128) for which in ("q1", "k1", "q2", "k2")}
        layout = MOTIF(state, layer_index=0).layout
    assert (layout.num_heads, layout.num_noise_heads, layout.num_key_value_heads) == (32, 8, 8)
    assert (layout.head_dim, layout.value_head_dim, layout.cached_values_per_token()) == (128, 256, 32 * 128)


@pytest.mark.parametrize(
    ("load", "make", "change", "error", "words"),
    [  # a change is a tensor that is taken out, or the shape that it gets
        (PHI, phi_state, "Wqkv.weight", CheckpointError, "Wqkv.weight is missing"),
        (PHI, phi_state, "inner_cross_attn.subln.weight", CheckpointError, "subln.weight is missing"),
        (PHI, phi_state, "inner_cross_attn.lambda_q1", CheckpointError, "lambda_q1 is missing"),
        (PHI, phi_state, {"A_log": (3,)}, CheckpointError, "A_log is not part"),
        (PHI, phi_state, {"Wqkv.weight": (32, 32)}, ShapeError, "another layer's keys"),
        (PHI, phi_state, {"Wqkv.weight": (50, 32)}, ShapeError, "Wqkv.weight has 50 rows"),
        (PHI, phi_state, {"Wqkv.bias": (5,)}, ShapeError, "Wqkv.bias has shape (5,), expected (64,)"),
        (PHI, phi_state, {"out_proj.weight": (32, 30)}, ShapeError, "out_proj.weight has 30"),
        (MOTIF, motif_state, {"o_proj.weight": (32, 24)}, ShapeError, "o_proj.weight has 24 columns, expected twice"),
        (MOTIF, motif_state, "subln.weight", CheckpointError, "subln.weight is missing"),
        (MOTIF, grouped_state, "k_proj.weight", CheckpointError, "k_proj.weight is missing"),
        (MOTIF, grouped_state, "subln.weight", CheckpointError, "subln.weight is missing"),
        (MOTIF, grouped_state, {"extra": (1,)}, CheckpointError, "extra is not part"),
        (MOTIF, grouped_state, {"v_proj.weight": (8, 20)}, ShapeError, "v_proj.weight has shape (8, 20)"),
        (MOTIF, grouped_state, {"q_proj.weight": (42, 20)}, ShapeError, "q_proj.weight has 42 rows"),
        (MOTIF, grouped_state, {"o_proj.weight": (20, 56)}, ShapeError, "o_proj.weight has 56 columns"),
        (MOTIF, grouped_state, {"k_proj.weight": (24, 20)}, ShapeError, "k_proj.weight has 24 rows"),
        (TIMM, timm_state, "qkv.weight", CheckpointError, "qkv.weight is missing"),
        (TIMM, timm_state, {"qkv.weight": (32, 32)}, ShapeError, "qkv.weight has shape (32, 32), expected (96, 32)"),
        (TIMM, timm_state, {"lambda_a": ()}, ConfigError, "dual_lambda=True"),
        (TIMM, timm_state, {"norm.weight": (32,)}, ConfigError, "scale_norm=True"),
        (TIMM, lambda: timm_state(True), {"q_norm.bias": (4,)}, ConfigError, "norm_layer=LayerNorm"),
        (TIMM, lambda: timm_state(True), "k_norm.weight", CheckpointError, "k_norm.weight is missing"),
    ],
)
def test_tensors_that_are_refused(load, make, change, error, words):
    state = make()
    if isinstance(change, str):
        del state[change]
    else:
        state |= {name: torch.ones(shape) for name, shape in change.items()}
    with pytest.raises(error, match=re.escape(words)):
        load(state, layer_index=0)


GROUPED = GroupedDifferentialAttention


@pytest.mark.parametrize(
    ("back", "layer", "words"),
    [
        (phi4flash_attention_state, lambda: DifferentialAttention(32, 4, head_dim=6), "head_dim=6: .* head_dim=4"),
        (
            phi4flash_attention_state,
            lambda: DifferentialAttention(32, 4, options=DifferentialOptions(head_norm="none")),
            "head_norm='none'",
        ),
        (motif_attention_state, lambda: DifferentialAttention(32, 4), "lambda_init=0.200000: .* expected -0.009915"),
        (
            motif_attention_state,
            lambda: GROUPED(40, 8, options=DifferentialOptions(lambda_init=motif_lambda_init(0))),
            r"num_key_value_heads=8: Motif-2-12\.7B has a noise key for every signal key",
        ),
        (motif_attention_state, lambda: GROUPED(40, 8, num_key_value_heads=2), r"expected -0\.009915"),
        (
            timm_attention_state,
            lambda: DifferentialAttention(32, 4, num_key_value_heads=2),
            "num_key_value_heads=2: .* expected 4",
        ),
        (
            timm_attention_state,
            lambda: DifferentialAttention(32, 4, qk_norm=True, qk_norm_eps=1e-5),
            "qk_norm_eps=1e-05: .* expected qk_norm_eps=1e-06",
        ),
        (phi4flash_attention_state, lambda: DifferentialAttention(32, 4, qk_norm=True), "qk_norm=True"),
        (timm_attention_state, lambda: DifferentialAttention(32, 4, head_dim=6), "head_dim=6: .* head_dim=4"),
        *(
            (
                back,
                lambda: GROUPED(64, 8, num_key_value_heads=2, head_dim=4),
                "num_noise_heads=2: .* has V1 attention; expected as many as num_heads=8",
            )
            for back in (microsoft_attention_state, phi4flash_attention_state, timm_attention_state)
        ),
        *(
            (back, lambda: ExclusiveDifferentialAttention(32, 4), "attention_type='diff_xsa': .* has V1 attention")
            for back in (microsoft_attention_state, phi4flash_attention_state, timm_attention_state)
        ),
        (
            microsoft_attention_state,
            lambda: AddedDifferentialAttentionV2(32, 4),
            "attention_type='diff_v2_added': .* is V2",
        ),
    ],
)
def test_layers_that_a_module_cannot_express(back, layer, words):
    with pytest.raises(ConfigError, match=words):
        back(layer())

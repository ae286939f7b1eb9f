"""The encoder layer in the place of nn.TransformerEncoderLayer."""

import pytest
import torch
from torch import nn

from difftransformer import DifferentialEncoderLayer
from difftransformer.attention import VARIANTS, DifferentialAttention
from difftransformer.errors import ConfigError, ShapeError

PADDED = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
CALLS = {
    "plain": {},
    "causal mask": {"src_mask": CAUSAL},
    "additive mask": {"src_mask": nn.Transformer.generate_square_subsequent_mask(6)},
    "causal hint": {"src_mask": CAUSAL, "is_causal": True},
    "padding": {"src_key_padding_mask": PADDED},
    "both": {"src_mask": CAUSAL.T.clone(), "src_key_padding_mask": PADDED},
}


def pair(**options):
    """PyTorch's layer and the softmax layer with its weights; PyTorch's attention has biases of zero."""
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(32, 4, 48, **options).eval()
    ours = DifferentialEncoderLayer(32, 4, 48, attention_type="softmax", **options).eval()
    state = theirs.state_dict()
    for name, rows in zip(("q", "k", "v"), state.pop("self_attn.in_proj_weight").chunk(3), strict=True):
        state[f"self_attn.{name}_proj.weight"] = rows
    state["self_attn.o_proj.weight"] = state.pop("self_attn.out_proj.weight")
    for name in ("self_attn.in_proj_bias", "self_attn.out_proj.bias"):
        if name in state:
            assert not state.pop(name).any()
    ours.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True, "norm_first": True, "activation": "gelu"}, {"bias": False}]
)
@pytest.mark.parametrize("call", CALLS)
def test_the_softmax_layer_is_torchs(call, options):
    ours, theirs = pair(**options)
    x = torch.randn((3, 6, 32) if options.get("batch_first") else (6, 3, 32))
    real = ~PADDED if "src_key_padding_mask" in CALLS[call] else torch.ones(3, 6, dtype=torch.bool)
    if call == "both":
        real[0, 4:] = False  # these queries see padding alone, which PyTorch makes NaN
    real = real if options.get("batch_first") else real.T
    with torch.no_grad():
        torch.testing.assert_close(ours(x, **CALLS[call])[real], theirs(x, **CALLS[call])[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention_type", VARIANTS)
def test_layers_of_torchs_encoder(attention_type):
    torch.manual_seed(0)
    layer = DifferentialEncoderLayer(32, 4, 48, 0.0, batch_first=True, attention_type=attention_type)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    encoder.layers = nn.ModuleList(
        DifferentialEncoderLayer(32, 4, 48, 0.0, batch_first=True, attention_type=attention_type, layer_index=index)
        for index in range(2)
    )
    x = torch.randn(3, 6, 32)
    whole = encoder(x, src_key_padding_mask=PADDED)
    for row in range(3):
        alone = encoder(x[row : row + 1, ~PADDED[row]])
        torch.testing.assert_close(whole[row, ~PADDED[row]], alone[0], atol=1e-5, rtol=1e-5)
    causal = encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(6))
    torch.testing.assert_close(
        causal[:, :4], encoder(x[:, :4], is_causal=True, mask=CAUSAL[:4, :4]), atol=1e-5, rtol=1e-5
    )
    causal.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_options_reach_their_parts():
    layer = DifferentialEncoderLayer(32, 4, 48, 0.5, torch.tanh, 1e-3, backend="reference")
    assert (layer.norm1.eps, layer.norm2.eps, layer.self_attn.backend) == (1e-3, 1e-3, "reference")
    x = torch.randn(6, 3, 32)
    expected = layer.eval()(x)
    attended = layer.norm1(x + layer.self_attn(x.transpose(0, 1), is_causal=False)[0].transpose(0, 1))
    torch.testing.assert_close(expected, layer.norm2(attended + layer.linear2(layer.linear1(attended).tanh())))
    dropped = []
    layer.dropout.register_forward_hook(lambda module, arguments, out: dropped.append((out == 0).double().mean()))
    layer.train()(x)
    assert len(dropped) == 3  # after attention, inside the MLP and after it
    assert all(0.35 < share < 0.65 for share in dropped)


def test_mistakes_are_named():
    layer = DifferentialEncoderLayer(32, 4, batch_first=True)
    x = torch.randn(2, 6, 32)
    with pytest.raises(ShapeError, match=r"src_mask .* biases cannot be added"):
        layer(x, src_mask=torch.randn(6, 6))
    with pytest.raises(ShapeError, match=r"src_mask has shape \(8, 6, 6\); it must be \(T, T\)"):
        layer(x, src_mask=CAUSAL.expand(8, 6, 6))
    with pytest.raises(ShapeError, match="must have 3 dimensions"):
        layer(x[0])
    with pytest.raises(ShapeError, match=r"src_key_padding_mask has shape \(6,\); it must be \(B, T\)"):
        layer(x, src_key_padding_mask=torch.zeros(6, dtype=torch.bool))
    for heads in (4, 0):
        with pytest.raises(ConfigError, match=f"d_model=30 is not a multiple of nhead={heads}"):
            DifferentialEncoderLayer(30, heads)
    with pytest.raises(ConfigError, match=r"\{'lambda_init': 'x'\}: no values for attention_type='diff'"):
        DifferentialEncoderLayer(32, 4, lambda_init="x")
    with pytest.raises(ConfigError, match="num_attention_heads=3 is odd"):
        DifferentialEncoderLayer(30, 3)
    with pytest.raises(ConfigError, match=r"lambda_start=0\.5 is not an option of attention_type='diff'"):
        DifferentialEncoderLayer(32, 4, lambda_start=0.5)
    assert DifferentialEncoderLayer(32, 4, lambda_init=0.5).self_attn.lambda_init == 0.5
    chosen = DifferentialEncoderLayer(32, 4, attention_type="dex", dex_heads=[[0, 2]], layer_index=3)
    assert chosen.self_attn.dex_heads == (0, 2)
    with pytest.raises(ConfigError, match="activation='silu' is unknown"):
        DifferentialEncoderLayer(32, 4, activation="silu")


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ({"key_padding_mask": PADDED}, "pass attn_mask=~key_padding_mask"),
        ({"need_weights": True}, "need_map=True"),
        ({"average_attn_weights": False}, "need_map=True"),
        ({"attention_mask": PADDED}, r"pass attn_mask \(True = may attend\)"),
        ({"causal": True}, "pass is_causal"),
        ({"position_ids": PADDED}, "position_embeddings=rotary_tables"),
        ({"past_key_values": None}, "pass cache"),
        ({"dropout_p": 0.0}, "no dropout"),
        ({"attn_bias": PADDED}, "choose among attn_mask, is_causal"),
    ],
)
def test_keywords_of_torchs_attention_name_ours(keyword, words):
    layer = DifferentialAttention(32, 2)
    with pytest.raises(ConfigError, match=words):
        layer(torch.randn(3, 6, 32), **keyword)
    with pytest.raises(
        ConfigError, match="query is not a keyword of DifferentialAttention: pass the hidden states by position"
    ):
        layer(query=PADDED, key=PADDED, value=PADDED, **keyword)
    with pytest.raises(ConfigError, match="DifferentialAttention got no hidden states; pass them first"):
        layer()
    assert "causal unless" in DifferentialAttention.__doc__.splitlines()[0]
    assert "is_causal=False" in DifferentialAttention.forward.__doc__.splitlines()[0]


WORDS = {
    "dropout": "no dropout", "attn_dropout": "no dropout", "bias": "no bias", "qkv_bias": "no bias",
    "batch_first": "(batch, length, width)", "num_kv_heads": "it is num_key_value_heads here",
    "n_kv_heads": "it is num_key_value_heads here", "n_heads": "it is num_heads here", "d_model": "it is embed_dim here",
    "dim_head": "it is head_dim here", "depth": "it is layer_index here, counted from 0",
    "rope": "in forward, position_embeddings=rotary_tables", "causal": "pass is_causal to forward",
    "is_causal": "pass is_causal to forward", "window_size": "pass window to forward", "device": "call .to(...)",
    "lambda_init": "pass options=DifferentialOptions(lambda_init=...)", "flavour": "choose among backend, embed_dim, ",
}  # fmt: skip


@pytest.mark.parametrize("kind", [DifferentialAttention, VARIANTS["grouped_diff"], VARIANTS["gate"]])
def test_arguments_of_other_layers_name_ours(kind):
    for name, words in WORDS.items():
        with pytest.raises(ConfigError) as error:
            kind(embed_dim=32, num_heads=2, **{name: 1})
        assert str(error.value).startswith(f"{name} is not an argument of {kind.__name__}: ")
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_every_argument_that_is_named_is_taken():
    for kind in VARIANTS.values():
        with pytest.raises(ConfigError, match="choose among ") as error:
            kind(64, 4, flavour=1)
        named = set(str(error.value).partition("choose among ")[2].split(", "))
        assert {"embed_dim", "num_heads", "layer_index", "head_dim", "backend", "qk_norm"} <= named
        assert not {"layout", "groups"} & named
        assert ("num_noise_heads" in named) == ("grouped" in kind.name)
        kind(embed_dim=64, num_heads=4, layer_index=1, head_dim=8, backend="auto", qk_norm=True)
    assert VARIANTS["grouped_diff"](64, 4, head_dim=8, num_noise_heads=2).layout.num_noise_heads == 2


def test_a_layer_of_ones_own_takes_an_argument_of_that_name():
    class Windowed(DifferentialAttention):
        def __init__(self, *arguments, window, **options):
            super().__init__(*arguments, **options)
            self.window = window

    assert Windowed(32, 2, window=7, layer_index=1).window == 7
    with pytest.raises(ConfigError, match="bias is not an argument of Windowed: projections have no bias"):
        Windowed(32, 2, window=7, bias=False)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_calls_of_torchs_attention_name_ours(mode):
    x, theirs = torch.randn(3, 6, 32), nn.TransformerEncoderLayer(32, 4, batch_first=True)
    theirs.self_attn = DifferentialAttention(32, 2)
    for call in (lambda: theirs.self_attn(x, x, x), lambda: getattr(theirs, mode)()(x)):
        with pytest.raises(ConfigError, match=r"pass context=.* use DifferentialEncoderLayer"):
            call()

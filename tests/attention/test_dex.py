"""DEX: softmax attention at the start, O - lambda O W_D afterwards."""

import pytest
import torch

from difftransformer.attention import DifferentialExtension, SoftmaxAttention
from difftransformer.errors import ConfigError
from difftransformer.ops.rotary import inverse_frequencies, rotary_tables

CHOSEN = (None, (0, 1, 2, 3), (2,), (0, 3), (1, 2))


def layer_of(chosen, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return DifferentialExtension(32, 4, num_key_value_heads=2, dex_heads=chosen, **options).to(dtype)


def hidden_of(length=7, dtype=torch.float64):
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


def rotation(length=7):
    return rotary_tables(torch.arange(length)[None], inverse_frequencies(8))


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_starts_as_the_transformer(chosen, dtype):
    layer = layer_of(chosen, dtype)
    plain = SoftmaxAttention(32, 4, num_key_value_heads=2).to(dtype)
    plain.load_state_dict(layer.state_dict(), strict=False)
    hidden = hidden_of(dtype=dtype)
    torch.testing.assert_close(layer(hidden)[0], plain(hidden)[0], rtol=0, atol=0)


def test_the_order_in_which_heads_are_named_is_of_no_matter():
    one, other = layer_of((0, 2, 3)), layer_of((3, 0, 2))
    assert other.dex_heads == (0, 2, 3)  # the order of its lambdas
    torch.nn.init.normal_(one.dex_lambda)
    torch.nn.init.normal_(one.dex_proj)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other(hidden_of()), one(hidden_of()))


@pytest.mark.parametrize(("chosen", "qk_norm"), [*((chosen, False) for chosen in CHOSEN), ((0, 3), True)])
def test_equals_the_equation(chosen, qk_norm):
    """Head by head, with the plain layer's heads taken before its output projection; gradients by autograd of the formula."""
    layer, hidden = layer_of(chosen, qk_norm=qk_norm), hidden_of().requires_grad_()
    with torch.no_grad():
        layer.dex_lambda.copy_(torch.linspace(-0.7, 1.3, len(layer.dex_lambda)))
    plain = SoftmaxAttention(32, 4, num_key_value_heads=2, qk_norm=qk_norm).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    plain.o_proj.weight.data = torch.eye(32, dtype=torch.float64)
    lams, maps = layer.dex_lambda.detach().clone(), layer.dex_proj.detach().clone()
    lams.requires_grad_()
    maps.requires_grad_()
    again = hidden.detach().clone().requires_grad_()
    heads = list(plain(again, position_embeddings=rotation())[0].split(8, dim=-1))
    for place, head in enumerate(range(4) if chosen is None else chosen):
        heads[head] = heads[head] - lams[place] * torch.einsum("bte,ef->btf", heads[head], maps[place])
    expected = torch.cat(heads, dim=-1) @ layer.o_proj.weight.T
    output = layer(hidden, position_embeddings=rotation())[0]
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine = torch.autograd.grad(output, (hidden, layer.dex_lambda, layer.dex_proj), upstream)
    theirs = torch.autograd.grad(expected, (again, lams, maps), upstream)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("need_map", [False, True])
def test_a_headwise_norm_follows(need_map):
    layer, plain = layer_of(None, head_norm="plain"), SoftmaxAttention(32, 4, num_key_value_heads=2).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    plain.o_proj.weight.data = torch.eye(32, dtype=torch.float64)
    torch.nn.init.constant_(layer.dex_lambda, 0.7)
    heads = plain(hidden_of())[0].unflatten(-1, (4, 8))
    heads = heads - 0.7 * torch.einsum("bthe,hef->bthf", heads, layer.dex_proj)
    heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = heads.flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(hidden_of(), need_map=need_map)[0], expected, rtol=1e-10, atol=1e-12)


def test_learns_from_the_first_step():
    """lambda has a gradient where it is 0, and W_D one as soon as lambda has moved."""
    layer = layer_of((1, 3))
    layer(hidden_of())[0].square().sum().backward()
    assert layer.dex_lambda.grad.abs().min() > 0
    assert not layer.dex_proj.grad.any()
    with torch.no_grad():
        layer.dex_lambda -= 0.01 * layer.dex_lambda.grad
    layer(hidden_of())[0].square().sum().backward()
    assert layer.dex_proj.grad.abs().amax((1, 2)).min() > 0


def test_the_map_is_the_transformers():
    layer = layer_of(None)
    _, weights = layer(hidden_of(), need_map=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7, dtype=weights.dtype))


@pytest.mark.parametrize("chosen", [(4,), (-1,), (1, 1)])
def test_heads_that_cannot_be_chosen(chosen):
    with pytest.raises(ConfigError, match=r"name heads from 0 to 3, each once"):
        layer_of(chosen)


def test_parameters():
    assert sum(parameter.numel() for parameter in layer_of((0, 2)).parameters()) - sum(
        parameter.numel() for parameter in SoftmaxAttention(32, 4, num_key_value_heads=2).parameters()
    ) == 2 * (8 * 8 + 1)

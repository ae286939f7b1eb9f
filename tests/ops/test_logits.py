"""The largest logits of each map and head against loops in float64, for any cut into rows, and beside every call of a model."""

import pytest
import torch

from difftransformer.errors import ConfigError, ShapeError
from difftransformer.ops import (
    differential_attention,
    logits,
    max_logits,
    observe_inputs,
    observe_max_logits,
    softmax_attention,
)
from tests.support.cases import BY_NAME, CAUSAL
from tests.support.oracle import may_attend, scale_of
from tests.support.tiny_models import tiny, tokens

NAMES = (
    "mask with empty rows", "mask by head", "cache, window", "both ends, mask", "one group, decoding",
    "more queries than keys", "shared key", "documents, window, mask", "softmax, mask",
)  # fmt: skip


def by_hand(case, query, key):
    """(maps, H), one pair of positions at a time."""
    maps = 1 if case.lam is None else 2
    found = torch.full((maps, case.H), -torch.inf, dtype=torch.float64)
    for b in range(case.B):
        for h in range(case.H):
            k = key[b, h // (case.H // case.G)]
            for t in range(case.T):
                for j in range(case.S):
                    if may_attend(case, b, h, t, j):
                        for m in range(maps):
                            own = k[j, : case.D] if m == 0 or case.shared_key else k[j, case.D :]
                            logit = scale_of(case) * query[b, h, t, m * case.D : (m + 1) * case.D] @ own
                            found[m, h] = torch.maximum(found[m, h], logit)
    return found


@pytest.mark.parametrize("at_once", [1, 40, 1 << 22])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loops(name, at_once, monkeypatch):
    monkeypatch.setattr(logits, "LOGITS_AT_ONCE", at_once)
    case = BY_NAME[name]
    query, key, *_ = case.inputs(torch.float64, requires_grad=False)
    maps = 1 if case.lam is None else 2
    found = max_logits(query, key, num_maps=maps, **case.kwargs)
    torch.testing.assert_close(found, by_hand(case, query, key), rtol=1e-12, atol=1e-12)
    low = max_logits(query.bfloat16(), key.bfloat16(), num_maps=maps, **case.kwargs)
    assert low.dtype == torch.float32
    wide = by_hand(case, query.bfloat16().double(), key.bfloat16().double())
    torch.testing.assert_close(low.double(), wide, rtol=1e-5, atol=1e-6)


def test_a_forbidden_key_may_be_nan():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    expected = max_logits(query[:, :, :2], key[:, :, :2], is_causal=True)
    query[:, :, 2], mask = -query[:, :, 0], torch.tensor([True, True, False])
    key[:, :, 2] = torch.nan
    assert torch.equal(
        max_logits(query[:, :, :2], key, attn_mask=mask.expand(2, 3) & torch.ones(2, 3).tril().bool()), expected
    )


def test_nothing_to_attend_to():
    found = max_logits(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), attn_mask=torch.zeros(5, dtype=torch.bool))
    assert (found == -torch.inf).all()
    assert (max_logits(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)) == -torch.inf).all()


def test_refusals():
    query, key = torch.randn(1, 2, 3, 5), torch.randn(1, 2, 3, 5)
    with pytest.raises(ShapeError, match="it must be even"):
        max_logits(query, key)
    with pytest.raises(ConfigError, match="num_maps: 3; it must be 1"):
        max_logits(query, key, num_maps=3)


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa"])
def test_beside_calls_of_any_backend(backend):
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    query.requires_grad_()
    plain = differential_attention(query, key, value, 0.3, is_causal=True, backend=backend)
    with observe_max_logits() as found:
        out = differential_attention(query, key, value, 0.3, is_causal=True, backend=backend)
        softmax_attention(query, key, value, **CAUSAL, window=2, backend=backend)
    assert torch.equal(out, plain)
    assert torch.equal(found[0], max_logits(query, key, is_causal=True))
    assert torch.equal(found[1], max_logits(query, key, num_maps=1, is_causal=True, window=2))
    assert not found[0].requires_grad


def test_observers_nest():
    """Each sees the calls inside its block, the outer one first, and the inner one leaves it as it was."""
    query, key, value, seen = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 5), []

    def attend(scale):
        differential_attention(query, key, value, 0.3, scale=scale)

    with observe_inputs(lambda maps, restrictions, scale: seen.append(("outer", scale))):
        attend(0.1)
        with (
            observe_max_logits() as largest,
            observe_inputs(lambda maps, restrictions, scale: seen.append(("inner", scale))),
        ):
            attend(0.2)
        attend(0.3)
    attend(0.4)
    assert seen == [("outer", 0.1), ("outer", 0.2), ("inner", 0.2), ("outer", 0.3)]
    assert len(largest) == 1
    torch.testing.assert_close(largest[0][0, 0], 0.2 * (query[0, 0, :, :4] @ key[0, 0, :, :4].mT).max())


def test_every_layer_of_a_model():
    """A larger query makes its own head's logits larger by as much, in its own layer."""
    model = tiny(num_hidden_layers=2).eval()
    with observe_max_logits() as before:
        model(tokens(2, 9))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.unflatten(0, (2, 2, 8))[1, 0] *= 3
    with observe_max_logits() as after:
        model(tokens(2, 9))
    assert [x.shape for x in before] == [(2, 2), (2, 2)]
    assert torch.equal(before[0], after[0])
    expected = before[1] * torch.tensor([[1.0, 3.0], [1.0, 1.0]])
    torch.testing.assert_close(after[1], expected)

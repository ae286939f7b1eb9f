"""Row operations against indices written out, and their inverses."""

import pytest
import torch

from difftransformer.families.attention_weights import fold_gain, half_split, heads_first, interleaved, maps_first


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("trailing", [(), (5,)])
def test_maps_first(heads, trailing):
    d = 4
    rows = torch.randn(heads * 2 * d, *trailing)
    moved = maps_first(rows, heads)
    for head in range(heads):
        for which in range(2):
            ours, theirs = (2 * head + which) * d, (which * heads + head) * d
            assert torch.equal(moved[theirs : theirs + d], rows[ours : ours + d])
    assert torch.equal(heads_first(moved, heads), rows)
    assert torch.equal(maps_first(heads_first(rows, heads), heads), rows)


@pytest.mark.parametrize("d", [2, 6, 8])
@pytest.mark.parametrize("trailing", [(), (5,)])
def test_half_split(d, trailing):
    rows = torch.randn(3 * d, *trailing)
    moved = half_split(rows, d)
    for head in range(3):
        for i in range(d // 2):
            assert torch.equal(moved[head * d + i], rows[head * d + 2 * i])
            assert torch.equal(moved[head * d + i + d // 2], rows[head * d + 2 * i + 1])
    assert torch.equal(interleaved(moved, d), rows)
    assert torch.equal(half_split(interleaved(rows, d), d), rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fold_gain(dtype):
    heads, width = 3, 4
    o_proj, gain = torch.randn(5, heads * width).to(dtype), torch.randn(width)
    folded = fold_gain(o_proj, gain)
    assert folded.dtype == dtype
    expected = torch.stack([o_proj[:, j].double() * gain[j % width].double() for j in range(heads * width)], 1)
    assert torch.allclose(folded.double(), expected, rtol=2 * torch.finfo(dtype).eps + 1e-7, atol=0)

"""Rounding to few levels, by hand."""

import pytest
import torch

from difftransformer.errors import ConfigError
from difftransformer_lab.evals.models.quantized import quantize_last, quantize_symmetric

# Two heads of two queries; steps of 4 bits are the largest over 7, of 8 bits over 127, of 6 bits over 31.
FIRST, SECOND = [[7.0, 3.4, -0.6, 0.4], [14.0, 2.9, -3.1, 1.0]], [[-28.0, 5.9, 6.1, 2.0], [0.0, 0.0, 0.0, 0.0]]
PLANTED = torch.tensor([[FIRST, SECOND]])


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [  # halves go to the even number: 7 / 2 and 14 / 4 to 4, 2 / 4 to 0
        ("row", [[[7, 3, -1, 0], [14, 2, -4, 0]], [[-28, 4, 8, 0], [0, 0, 0, 0]]]),  # steps 1, 2, 4, none
        ("head", [[[8, 4, 0, 0], [14, 2, -4, 0]], [[-28, 4, 8, 0], [0, 0, 0, 0]]]),  # steps 2, 4
        ("tensor", [[[8, 4, 0, 0], [16, 4, -4, 0]], [[-28, 4, 8, 0], [0, 0, 0, 0]]]),  # step 4
    ],
)
def test_four_bits_by_hand(granularity, expected):
    found = quantize_symmetric(PLANTED, 4, None, granularity)
    assert torch.equal(found, torch.tensor([expected], dtype=torch.float32))


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (6, 31), (4, 7), (2, 1)])
def test_the_largest_stays_and_the_rest_is_within_half_a_step(bits, levels):
    x = torch.randn(2, 3, 4, 50, generator=torch.Generator().manual_seed(0))
    found = quantize_symmetric(x, bits, None, "row")
    largest = x.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(found.abs().amax(-1, keepdim=True), largest)
    assert ((found - x).abs() <= largest / levels / 2 * 1.001).all()
    assert max(len(set(row)) for row in (found / largest * levels).round().reshape(-1, 50).tolist()) <= 2 * levels + 1


def test_what_is_masked_neither_counts_nor_changes():
    x = torch.tensor([[[[7.0, 3.4, 1000.0]]]])
    allowed = torch.tensor([[[[True, True, False]]]])
    assert quantize_symmetric(x, 4, allowed, "tensor").tolist() == [[[[7.0, 3.0, 1000.0]]]]


def test_rows_of_a_batch_share_nothing():
    x = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)
    for granularity in ("tensor", "head", "row"):
        alone = torch.cat([quantize_symmetric(row[None], 5, None, granularity) for row in x])
        assert torch.equal(quantize_symmetric(x, 5, None, granularity), alone)


def test_weights_in_groups():
    weights = torch.tensor([[7.0, 0.6, 0.4, -70.0, 14.0, 6.0], [0.0, 0.0, 0.0, 3.5, 0.5, 0.2]])
    assert quantize_last(weights, 4, 3).tolist() == [[7, 1, 0, -70, 10, 10], [0, 0, 0, 3.5, 0.5, 0]]
    # The last group is shorter; one step for a whole row where no group is named.
    assert quantize_last(weights, 4, 4)[0].tolist() == [10, 0, 0, -70, 14, 6]
    assert quantize_last(weights, 4)[0].tolist() == [10, 0, 0, -70, 10, 10]
    assert quantize_last(weights.bfloat16(), 4).dtype == torch.bfloat16


def test_impossible_grids():
    with pytest.raises(ConfigError, match="bits=1: a signed grid"):
        quantize_symmetric(PLANTED, 1, None, "row")
    with pytest.raises(ConfigError, match="granularity='layer': choose one of tensor, head, row"):
        quantize_symmetric(PLANTED, 4, None, "layer")

"""Rotary embedding against Hugging Face's Llama, against complex rotation in float64, and by its own law."""

import pytest
import torch

from difftransformer.errors import ConfigError
from difftransformer.ops import apply_rotary, inverse_frequencies, rotary_tables


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rotate_as_complex(x_BTHD, position_ids, theta):
    """Feature i and i + D/2 are one complex number, turned by position * theta^(-2i/D)."""
    half = x_BTHD.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = position_ids.double()[..., None, None] * frequencies
    turned = torch.complex(x_BTHD[..., :half].double(), x_BTHD[..., half:].double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("width", [2, 6, 64])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_is_a_complex_rotation(width, theta):
    x_BTHD = normal(2, 9, 3, width)
    position_ids = torch.stack((torch.arange(9), torch.arange(9).flip(0) + 100))
    cos, sin = rotary_tables(position_ids, inverse_frequencies(width, theta))
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (2, 9, width // 2)
    # In fp32 an angle of 108 and the frequency behind it round by 7e-6 each, and numbers go up to 4.
    torch.testing.assert_close(
        apply_rotary(x_BTHD, cos, sin).double(), rotate_as_complex(x_BTHD, position_ids, theta), rtol=0, atol=6e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_hugging_face(dtype):
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    query, key = normal(2, 11, 4, 16, dtype=dtype), normal(2, 11, 2, 16, dtype=dtype, seed=1)
    position_ids = torch.stack((torch.arange(11), torch.arange(11) + 30))
    theirs = llama.LlamaRotaryEmbedding(config)
    cos, sin = theirs(query, position_ids)
    expected = llama.apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    tables = rotary_tables(position_ids, inverse_frequencies(16, 10000.0))
    torch.testing.assert_close(inverse_frequencies(16, 10000.0), theirs.inv_freq, rtol=1e-6, atol=0)
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    for x, y in zip((query, key), expected, strict=True):
        rotated = apply_rotary(x, *tables)
        assert rotated.dtype == dtype
        torch.testing.assert_close(rotated.transpose(1, 2), y, rtol=tolerance, atol=tolerance)


def test_low_precision_is_rounded_once():
    x_BTHD = normal(1, 50, 2, 32, dtype=torch.bfloat16)
    tables = rotary_tables(torch.arange(50), inverse_frequencies(32))
    expected = apply_rotary(x_BTHD.float(), *tables).bfloat16()
    assert torch.equal(apply_rotary(x_BTHD, *tables), expected)


def test_scores_depend_on_distance_alone():
    query, key = normal(1, 1, 1, 32, dtype=torch.float64), normal(1, 1, 1, 32, dtype=torch.float64, seed=1)

    def score(query_position, key_position):
        inv_freq = inverse_frequencies(32)
        rotated = [
            apply_rotary(x, *rotary_tables(torch.tensor([[position]]), inv_freq))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return (rotated[0] * rotated[1]).sum().item()

    assert score(12, 5) == pytest.approx(score(107, 100), abs=1e-4)
    assert score(12, 5) != pytest.approx(score(12, 6), abs=1e-2)


def test_gradients_and_float64():
    x_BTHD = normal(1, 3, 2, 4, dtype=torch.float64).requires_grad_()
    tables = rotary_tables(torch.arange(3), inverse_frequencies(4))
    assert apply_rotary(x_BTHD, *tables).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, *tables), x_BTHD)


def test_positions_without_a_batch_broadcast():
    x_BTHD = normal(2, 5, 3, 8)
    inv_freq = inverse_frequencies(8)
    one = apply_rotary(x_BTHD, *rotary_tables(torch.arange(5), inv_freq))
    each = apply_rotary(x_BTHD, *rotary_tables(torch.arange(5).expand(2, 5), inv_freq))
    assert torch.equal(one, each)


@pytest.mark.parametrize("width", [0, 1, 7])
def test_odd_widths_are_refused(width):
    with pytest.raises(ConfigError, match=f"head_dim={width}; .* even"):
        inverse_frequencies(width)

"""A whole model on the Triton kernels, in Triton's interpreter: what it gives on the equations."""

import pytest
import torch

from tests.support.cases import needs_interpreter, overflow_is_fine
from tests.support.oracle import relative_error
from tests.support.tiny_models import tiny, tokens

pytestmark = [needs_interpreter, overflow_is_fine]


def pair(**fields):
    """One model on the kernels and the same on the equations."""
    return (tiny(attn_backend=backend, tie_word_embeddings=False, **fields) for backend in ("triton", "reference"))


def padded():
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    return ids, mask


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_and_gradients(compiled):
    ours, plain = pair()
    ids, mask = padded()
    labels = ids.masked_fill(mask == 0, -100)
    forward = ours
    if compiled:
        torch._dynamo.reset()
        forward = torch.compile(ours, fullgraph=True, backend="aot_eager")
    outputs = [model(ids, attention_mask=mask, labels=labels, use_cache=False) for model in (forward, plain)]
    for out in outputs:
        out.loss.backward()
    real = mask.bool()
    assert relative_error(outputs[0].logits[real], outputs[1].logits[real]) < 1e-4
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < 1e-4, name


@pytest.mark.parametrize(
    ("cache", "fields"),
    [
        ("static", {"num_hidden_layers": 1}),
        pytest.param("dynamic", {"num_hidden_layers": 1}, marks=pytest.mark.slow),
        pytest.param("dynamic", {"attention_type": "softmax", "num_key_value_heads": 2}, marks=pytest.mark.slow),
        pytest.param("static", {"sliding_window": 5}, marks=pytest.mark.slow),
    ],
)
def test_generation_left_padded(cache, fields):
    ours, plain = pair(**fields)
    ids, mask = padded()
    how = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 3}
    if cache == "static":
        how["cache_implementation"] = "static"
    expected = plain.generate(ids, **how)
    assert expected[:, 9:].unique().numel() > 2
    assert torch.equal(ours.generate(ids, **how), expected)

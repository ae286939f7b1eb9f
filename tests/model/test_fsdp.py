"""FSDP and DDP over two gloo processes train as one process on the whole batch, compiled layers too."""

import json
import math

import pytest
import torch

from tests.support import fsdp_steps
from tests.support.parallel_steps import run_main
from tests.support.tiny_models import tiny


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Results of every case, from both processes at once."""
    meeting = tmp_path_factory.mktemp("fsdp") / "meeting"
    first, _ = run_main(2, fsdp_steps.__name__, meeting)
    return json.loads(first.stdout.splitlines()[-1])


@pytest.mark.slow
def test_equals_one_process(two_processes):
    for name in fsdp_steps.CASES.keys() - {"diff, bf16"}:
        alone = torch.tensor(fsdp_steps.train(name, 0, 1), dtype=torch.float64)
        sharded = torch.tensor(two_processes[name], dtype=torch.float64)
        assert alone.shape == (3, 3)  # steps, by loss, gradient norm, gradient norm of the lambdas
        assert torch.allclose(sharded, alone, rtol=1e-5, atol=0), name
        assert alone[0, 0] != alone[2, 0], name
        assert (alone[:, 2] > 0).all() == (not name.startswith("softmax")), name


@pytest.mark.slow
def test_vocabulary_parallel_loss(two_processes):
    for found, expected in zip(two_processes["vocabulary parallel"], fsdp_steps.vocabulary_parallel(1), strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_mixed_precision(two_processes):
    losses = [loss for loss, _, _ in two_processes["diff, bf16"]]
    exact = [loss for loss, _, _ in two_processes["diff"]]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.1)
    assert all(norm > 0 and math.isfinite(norm) for _, norm, _ in two_processes["diff, bf16"])


@pytest.mark.slow
@pytest.mark.parametrize("attention_type", ["diff", "softmax"])
def test_fsdp1_takes_a_model_in_bf16(attention_type, two_processes):
    """It flattens the parameters of a layer, which then have one dtype; the same steps as without it."""
    plain, flat = two_processes[f"FSDP1, {attention_type}"]
    assert flat[0] == plain[0]
    assert flat == pytest.approx(plain, rel=2**-7)
    assert plain[2] < 0.9 * plain[0]


def test_lambda_is_computed_in_fp32_from_what_fsdp1_holds(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for form in ("layer", "head", "scalar"):
        layer = tiny(lambda_form=form).to(torch.bfloat16).model.layers[1].self_attn
        assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
        found, exact = layer.lam(), layer.double().lam()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
        monkeypatch.setenv("FSDP_VERSION", "2")
        kept = tiny(lambda_form=form).to(torch.bfloat16).model.layers[1].self_attn
        assert {p.dtype for name, p in kept.named_parameters() if "lambda" in name} == {torch.float32}
        monkeypatch.delenv("FSDP_VERSION")

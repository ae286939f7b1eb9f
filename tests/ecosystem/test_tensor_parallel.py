"""transformers' tensor parallelism over two gloo processes computes what one process computes, gradients included."""

import pytest
import torch

from tests.support.parallel_steps import run_main
from tests.support.tensor_parallel_steps import CASES, FAMILIES, results, saved


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in (*CASES, *FAMILIES):
        saved(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def two_processes(models, tmp_path_factory):
    """What every case gives, from both processes at once."""
    meeting = tmp_path_factory.mktemp("tensor-parallel") / "meeting"
    run_main(2, results.__module__, meeting, models)
    return torch.load(f"{meeting}.results")


@pytest.mark.parametrize("name", [*CASES, *FAMILIES])
def test_equals_one_process(name, models, needs, request):
    needs("accelerate")
    alone, split = results(models / name), request.getfixturevalue("two_processes")[name]
    assert alone.keys() == split.keys()
    assert torch.equal(split.pop("tokens"), alone.pop("tokens"))
    for key, expected in alone.items():
        assert expected.abs().max() > 0, key
        assert (split[key] - expected).abs().max() <= 1e-6 * expected.abs().max(), key

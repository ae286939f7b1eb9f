"""transformers' tensor parallelism over two gloo processes computes what one process computes, gradients included."""

import pytest
import torch

from tests.support import fresh
from tests.support.tensor_parallel_steps import CASES, FAMILIES, results, saved

WORLD = 2


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
    code = "from tests.support import tensor_parallel_steps; tensor_parallel_steps.main()"
    workers = [
        fresh.Fresh(
            code, meeting, models, WORLD_SIZE=str(WORLD), RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo"
        )
        for rank in range(WORLD)
    ]
    done = [worker.finish(timeout=240) for worker in workers]
    assert [worker.returncode for worker in done] == [0] * WORLD, done[0].stderr + done[1].stderr
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

"""FSDP2 and DDP over two gloo processes train as one process on the whole batch, compiled layers too."""

import json
import math

import pytest
import torch

from tests.support import fresh, fsdp_steps

WORLD = 2


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Results of every case, from both processes at once."""
    meeting = tmp_path_factory.mktemp("fsdp") / "meeting"
    code = "from tests.support import fresh, fsdp_steps; fsdp_steps.main()"
    workers = [
        fresh.Fresh(code, meeting, WORLD_SIZE=str(WORLD), RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
        for rank in range(WORLD)
    ]
    done = [worker.finish(timeout=240) for worker in workers]
    assert [worker.returncode for worker in done] == [0] * WORLD, done[0].stderr + done[1].stderr
    return json.loads(done[0].stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in fsdp_steps.CASES if name != "diff, bf16"])
def test_equals_one_process(name, two_processes):
    alone = torch.tensor(fsdp_steps.train(name, 0, 1), dtype=torch.float64)
    sharded = torch.tensor(two_processes[name], dtype=torch.float64)
    assert alone.shape == (3, 3)  # steps, by loss, gradient norm, gradient norm of the lambdas
    assert torch.allclose(sharded, alone, rtol=1e-5, atol=0)
    assert alone[0, 0] != alone[2, 0]
    assert (alone[:, 2] > 0).all() == (not name.startswith("softmax"))


def test_vocabulary_parallel_loss(two_processes):
    for found, expected in zip(two_processes["vocabulary parallel"], fsdp_steps.vocabulary_parallel(1), strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_mixed_precision(two_processes):
    losses = [loss for loss, _, _ in two_processes["diff, bf16"]]
    exact = [loss for loss, _, _ in two_processes["diff"]]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.1)
    assert all(norm > 0 and math.isfinite(norm) for _, norm, _ in two_processes["diff, bf16"])

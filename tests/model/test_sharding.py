"""The model trains under FSDP2: two processes see what one does."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsdp_worker import train

HERE = Path(__file__).parent


def two_processes(shape, precision, port):
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "fsdp_worker.py"), shape, precision],
            env=environment | {"RANK": str(rank), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-2000:] + outputs[1][1][-2000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.parametrize(("shape", "port"), [("diff-gqa", 29611), ("softmax", 29612)])
def test_two_shards_train_as_one_process(shape, port):
    alone, sharded = train(shape), two_processes(shape, "fp32", port)
    for (loss, norm), (sharded_loss, sharded_norm) in zip(alone, sharded, strict=True):
        assert math.isclose(loss, sharded_loss, rel_tol=1e-5)
        assert math.isclose(norm, sharded_norm, rel_tol=1e-4)
    assert len({loss for loss, _ in alone}) == 3  # weights moved, so the steps were compared and not the start


@pytest.mark.slow
def test_bf16_shards_stay_near_fp32():
    alone, sharded = train("diff-gqa"), two_processes("diff-gqa", "bf16", 29613)
    assert all(
        abs(loss - sharded_loss) < 0.05 * loss for (loss, _), (sharded_loss, _) in zip(alone, sharded, strict=True)
    )

"""What a run of several processes refuses: each in one line, by one of the processes."""

import json
import os
import socket

import pytest
import torch
import yaml

from difftransformer.errors import ConfigError
from difftransformer.files import locked
from difftransformer.train import ParallelConfig
from difftransformer.train.config import DataParallelConfig
from difftransformer.train.parallel import joined
from tests.support import parallel_steps

ANOTHER_MODEL = ("model.hidden_size=64",)
# Overrides of the toy recipe on two processes -> the one line.
REFUSED = {
    ("parallel.tensor=4",): "parallel: data.replicate 1 x data.shard 1 x tensor 4 x context 1 = 4, and the run has 2 processes",
    ("parallel.data.replicate=2", "parallel.context=2"): "= 4, and the run has 2 processes; start it with --processes 4",
    ("parallel.tensor=0",): "tensor=0: give at least 1",
    ("parallel.tensor=2", "model.num_attention_heads=2"): "tensor 2 x context 1 = 2 does not divide the 1 query groups",
    ("parallel.context=2", "model.num_key_value_heads=2"): "tensor 1 x context 2 = 2 does not divide the 1 key/value heads",
    ("parallel.tensor=2", "model.intermediate_size=33"): "parallel.tensor=2 does not divide model.intermediate_size=33",
    ("parallel.context=2", "training.context_stages=[[0, 1]]", "training.retrieval=null"): "does not divide a row of 1 tokens",
    ("parallel.tensor=2", "training.lora={}"): "parallel.tensor=2 with training.lora: adapters are not divided",
    ("training.accumulation=4", "training.context_stages=[[0, 64]]"): "accumulation x data.replicate x data.shard 8",
    ANOTHER_MODEL: "holds a run of another recipe (model.hidden_size was 32 and is now 64)",
}  # fmt: skip


def test_degrees():
    def degrees(count, replicate=1, shard=None, tensor=1, context=1):
        data = DataParallelConfig(replicate=replicate, shard=shard)
        return ParallelConfig(data=data, tensor=tensor, context=context).degrees(count)

    assert degrees(1) == (1, 1, 1, 1)
    assert degrees(8) == (1, 8, 1, 1)
    assert degrees(16, replicate=2, tensor=2, context=2) == (2, 2, 2, 2)
    assert degrees(2, tensor=2) == (1, 1, 1, 2)
    for count, options in ((3, {"tensor": 2}), (4, {"shard": 2}), (1, {"replicate": 2})):
        with pytest.raises(ConfigError, match=f"the run has {count} process"):
            degrees(count, **options)


def test_a_port_in_use(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        message = f"process 0 of 2 cannot meet the others at 127.0.0.1:{port}: the port is in use"
        with pytest.raises(ConfigError, match=message), joined("cpu"):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_gpu(toy_file, fails):
    assert fails("train", toy_file, "--device", "cuda", "--processes", "2") == (
        "difftransformer train: --device cuda: torch finds no CUDA device here; use --device cpu"
    )


def test_another_number_than_torchrun_started(toy_file, fails, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert "--processes 4: torchrun has started 2; omit --processes" in fails("train", toy_file, "--processes", "4")


@pytest.mark.slow
def test_one_line_by_one_process(toy, toy_shards, tmp_path):
    """Each command line in two processes: exit status 2 in both, and one line on standard error."""
    toy["training"] |= {"steps": 1, "retrieval": None}
    recipe, run = tmp_path / "toy.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(toy), encoding="utf-8")
    commands = [["train", str(recipe), "--threads", "1", "--out", str(run)]]
    for changes in REFUSED:
        out = run if changes == ANOTHER_MODEL else tmp_path / "new"
        commands.append([*commands[0][:4], "--out", str(out), *(word for key in changes for word in ("--set", key))])
    commands.append([*commands[0][:4], "--out", str(tmp_path / "held")])
    with locked(tmp_path / "held"):
        done = parallel_steps.run_commands(2, commands)
    assert [json.loads(worker.stdout.splitlines()[-1]) for worker in done] == [[0] + [2] * (len(commands) - 1)] * 2
    lines = (done[0].stderr + done[1].stderr).splitlines()
    assert len(lines) == len(commands) - 1
    for line, message in zip(lines, [*REFUSED.values(), f"{tmp_path / 'held'}: process {os.getpid()} on"], strict=True):
        assert line.startswith("difftransformer train: ")
        assert message in line

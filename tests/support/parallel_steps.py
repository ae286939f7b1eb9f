"""Processes of one mesh: short runs of several variants, or command lines.

Each variant gets a folder of its own, and continues a run that is already there.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support import fresh
from tests.support.ports import free_port

HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 4}
VARIANTS = {
    "diff": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "diff_v2": {"num_attention_heads": 8, "num_key_value_heads": 4, "qk_norm": True},
    "grouped_diff": {"num_attention_heads": 20, "num_noise_heads": 4},
    "softmax": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "diff_xsa": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "gate": {"num_attention_heads": 8, "num_key_value_heads": 4},
}


def settings(steps, method="adamw", **fields):
    """Configuration of the training; 8 and 4 rows a step."""
    from difftransformer.data import RetrievalMix
    from difftransformer.train import OptimizerConfig, ScheduleConfig, TrainingConfig

    plain = {
        "steps": steps,
        "batch_tokens": 256,
        "context_stages": [(0, 32), (6, 64)],
        "retrieval": RetrievalMix(share=0.3, max_needles=1, min_needles=1, asks=1, digits=1),
        "validate_every": 6,
        "validation_windows": 3,
        "checkpoint_every": 6,
        "optimizer": OptimizerConfig(learning_rate=0.002, method=method),
        "schedule": ScheduleConfig(warmup_steps=4),
    }
    return TrainingConfig(**plain | fields)


def run(folder, shards, steps, *, layout, processes, variants=(*VARIANTS,), logs=None, **fields):
    """Train every variant in this process. initial.safetensors gets the weights at the start, as they lie on the mesh."""
    from difftransformer.data import Shards
    from difftransformer.model import DiffTransformerConfig
    from difftransformer.train import LogsConfig, ParallelConfig, build_model, train
    from difftransformer.train.parallel import DeferredModel, Mesh
    from difftransformer.typed import build

    parallel = build(ParallelConfig, layout, source="", error=ValueError)
    opened, config = Shards.open(Path(shards)), settings(steps, **fields)
    for name in variants:
        architecture = DiffTransformerConfig(
            attention_type=name, vocab_size=opened.tokenizer.vocab_size, **HEADS | VARIANTS[name]
        )
        mesh, run = Mesh(processes, parallel), Path(folder) / name
        start = DeferredModel(partial(build_model, architecture, config.seed))
        placed = mesh.place(start.network, config)
        start.fill("cpu")
        weights = {name: whole(weight.detach()) for name, weight in placed.named_parameters()}
        if processes.is_first:
            run.mkdir(parents=True, exist_ok=True)
            save_file(weights, run / "initial.safetensors")
        train(config, architecture, opened, run, mesh=mesh, logs=LogsConfig(**logs or {}))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run_layout(count, folder, shards, steps, **options):
    """Run the variants in `count` processes; return the ended processes."""
    return run_main(count, __name__, folder, shards, steps, json.dumps(options))


def run_commands(count, commands):
    """Run command lines one after the other in each of `count` processes, which print their exit statuses; return them."""
    ports = json.dumps([(free_port(), words) for words in commands])
    return run_code(count, f"from {__name__} import commands_main; commands_main()", ports)


def run_main(count, module, *arguments):
    """Run a module's main() by `run_code`."""
    return run_code(count, f"from {module} import main; main()", *arguments)


def run_code(count, code, *arguments):
    """Run code in `count` processes of one mesh, of which none may fail; return the ended processes."""
    everywhere = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    everywhere |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return fresh.finished([fresh.Fresh(code, *arguments, **everywhere, **rank) for rank in ranks])


def main():
    """Be the process of a rank of `run_layout`."""
    from difftransformer.train.parallel import joined

    torch.set_num_threads(1)
    folder, shards, steps, options = sys.argv[1:]
    with joined("cpu") as processes:
        run(folder, shards, int(steps), processes=processes, **json.loads(options))
    print(time.process_time(), flush=True)
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own teardown


def commands_main():
    """Be the process of a rank of `run_commands`."""
    from difftransformer_lab.cli.main import main

    found = []
    for port, words in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)
        found.append(main(words))
    print(json.dumps(found), flush=True)
    os._exit(0)

"""Start the processes of transformers' distributed tests: its source distribution lacks the module of this name."""

import multiprocessing
import os
import socket

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

multiprocessing.set_forkserver_preload(["torch", "tests.test_cases"])  # processes then start without importing again


def _get_distributed_backend():
    return "gloo"


def _get_distributed_device_type():
    return "cpu"


def _get_rank_device(rank):
    return torch.device("cpu")


def _set_rank_device(rank):
    pass


def _start_rank_processes(function, args, nprocs):
    start_processes(function, args=args, nprocs=nprocs, start_method="forkserver")


def run_distributed(world_size):
    """Return a function that calls another one in world_size processes of one gloo group."""

    def decorate(function):
        def start(*arguments):
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            _start_rank_processes(_process, (function, world_size, port, arguments), world_size)

        return start

    return decorate


def _process(rank, function, world_size, port, arguments):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()

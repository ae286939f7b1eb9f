"""The command line that the scripts of this folder share."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from difftransformer_lab.bench.settings import Settings, Step
from difftransformer_lab.cli.bench import measure_and_write


def run(steps_of: Callable[[Settings], list[Step]], about: str) -> None:
    """Measure what the arguments say; write results.json and figures as `difftransformer bench` does."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--out", type=Path, default=Path("reports", Path(sys.argv[0]).stem), help="folder of results.json"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), help="fp32 and bf16 on the CPU, bf16 on cuda")
    parser.add_argument("--repeats", type=int, default=Settings.repeats, help="largest number of timed rounds")
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="time for a shape")
    parser.add_argument("--sizes", nargs="+", help="sizes of models")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(
        device=given.device,
        dtypes=given.dtypes,
        repeats=given.repeats,
        seconds=given.seconds,
        sizes=given.sizes,
        threads=given.threads,
    )
    measure_and_write(steps_of(settings), given.out, given.device, shlex.join(["python", *sys.argv]))

"""The command line that the scripts of this folder share."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tables import bench_tables

from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.cli.bench import measure_and_write
from difftransformer_lab.results import BenchRow

Steps = Mapping[str, Callable[[], list[BenchRow]]]


def run(steps_of: Callable[[Settings], Steps], about: str) -> None:
    """Measure what the arguments say, and write NAME.json as `difftransformer bench` does."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=Path("reports", "bench"), help="folder of the result")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), help="fp32 and bf16 on the CPU, bf16 on cuda")
    parser.add_argument("--repeats", type=int, default=Settings.repeats, help="largest number of timed rounds")
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="time for a shape")
    parser.add_argument("--sizes", nargs="+", help="sizes of models")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    path = given.pop("out") / f"{Path(sys.argv[0]).stem}.json"
    command = shlex.join(["python", *sys.argv])
    measure_and_write(steps_of(Settings(**given)), path, given["device"], command, bench_tables)

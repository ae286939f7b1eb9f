"""What the Triton kernels take of a Hopper GPU, compiled without one, against `kernel_budget.json`.

They are compiled, some minutes, where a kernel or the compiler is not the one that the budget was written for.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import difftransformer
from tests.support import compile_kernels
from tests.support.needed import lacking

pytestmark = pytest.mark.slow(minutes=4)

BUDGET = json.loads(compile_kernels.BUDGET.read_text(encoding="utf-8"))
ROOT = Path(__file__).parents[2]
SHARED_BYTES, SMALL_SHARED_BYTES = 227 * 1024, 99 * 1024  # that a program may have
MATRIX_KERNELS = ("both_maps_kernel", "one_map_kernel", "keys_kernel", "queries_kernel")
HOPPER = "hopper_keys_kernel"  # in Gluon, which not every version of Triton has as it needs it
REWRITE = "if it is meant to be so: python -m tests.support.compile_kernels --write"


def compile_all(*arguments):
    """Run `compile_kernels.py` in a process where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(difftransformer.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(x for x in (source, environment.get("PYTHONPATH")) if x)
    command = [sys.executable, "-m", compile_kernels.__name__, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def is_current():
    """Whether the budget is that of these sources and this compiler."""
    return BUDGET["sources"] == compile_kernels.sources() and BUDGET["triton"] == importlib.metadata.version("triton")


@pytest.fixture(scope="module")
def found():
    """What `compile_kernels.py` says, in a process where Triton compiles, or said of the same sources and compiler."""
    if is_current():
        return BUDGET
    done = compile_all()
    if done.returncode and "no assembler" in done.stderr:
        lacking(done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def versions(found):
    """A remark for messages where the compiler is not the budget's."""
    names = [name for name in ("triton", "ptxas") if found[name] != BUDGET[name]]
    return "".join(f"; {name} is {found[name]}, the budget's was {BUDGET[name]}" for name in names)


def has_hopper():
    """Whether this Triton is one of those that compile the form for Hopper."""
    configs = pytest.importorskip("difftransformer.ops.triton_kernels.configs")
    first, last = configs.HOPPER_VERSIONS
    return first <= tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2]) <= last


def test_every_kernel_has_a_budget(found):
    budget = {name for name in BUDGET["kernels"] if HOPPER not in name or has_hopper()}
    new, gone = found["kernels"].keys() - budget, budget - found["kernels"].keys()
    assert not new | gone, f"new: {sorted(new)}, gone: {sorted(gone)}; {REWRITE}{versions(found)}"


def test_kernels_keep_their_budget(found):
    """Spilled bytes, shared memory, and whether products wait for each other."""
    over = [
        f"{name}: {what} {row[what]} instead of {allowed[what]}"
        for name, row in found["kernels"].items()
        if (allowed := BUDGET["kernels"].get(name))
        for what in ("spilled", "shared", "serialized")
        if row[what] > allowed[what]
    ]
    assert not over, "\n".join(over) + f"\n{REWRITE}{versions(found)}"


def test_every_kernel_fits(found):
    for name, row in found["kernels"].items():
        assert 0 < row["registers"] <= 255, name
        assert row["shared"] <= SHARED_BYTES, name


def test_every_kernel_fits_a_small_gpu():
    """Of compute capability 8.6, 8.9 or 12.0, in the forms that those take; at every pair of widths, fp32 included."""
    if is_current():
        found = BUDGET["small"]
    else:
        done = compile_all("--small")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
    assert {call.split(" / ")[0] for call in found} > {
        "V1 d=64",
        "V1 d=128",
        "V1 d=128, mask",
        "decode V1 d=128, 64 rows",
    }
    for name, shared in found.items():
        assert 0 < shared <= SMALL_SHARED_BYTES, name


def test_matrix_kernels_use_the_widest_instructions(found):
    for name, row in found["kernels"].items():
        if "fp32" not in name and any(kernel in name for kernel in MATRIX_KERNELS):
            assert row["wgmma"], name


def test_what_may_spill(found):
    """fp32, which is multiplied without matrix instructions, and addresses; else one register; each with a reason."""
    for name, row in found["kernels"].items():
        if row["spilled"] or row["serialized"]:
            assert BUDGET["kernels"][name].get("reason"), name
        if "fp32" not in name and HOPPER not in name:
            assert row["spilled"] <= 8, name  # stored and read once


def test_the_form_for_hopper_multiplies_without_waiting(found):
    """Its spills are bounded by the budget alone; serialized products would lose what it gains."""
    if not has_hopper():
        pytest.skip(f"Triton {found['triton']} is not known to compile the form for Hopper")
    rows = [row for name, row in found["kernels"].items() if HOPPER in name]
    assert rows
    assert all(row["wgmma"] and not row["serialized"] for row in rows)

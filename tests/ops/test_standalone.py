"""The kernels without torch (`standalone.cpp`): on processors that only an emulator has here, and by other compilers."""

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from difftransformer.ops import build, processor
from tests.check_compilers import are_required, missing
from tests.support import peak_memory
from tests.support.cases import needs_kernels

pytestmark = [pytest.mark.slow(minutes=1), needs_kernels]

HERE = Path(__file__).parent
BEST = processor.available()[-1] if processor.available() else ""
MOST_MIB = 700  # of one compiler process: a laptop's and a small container's
CROSS, CLANG_CROSS = "aarch64-linux-gnu-g++", "clang++ --target=aarch64-linux-gnu"
EMULATED = "qemu-aarch64 -cpu max,sve-max-vq=2"  # SVE of 256 bits


def compile_and_run(folder, compiler, isa, runner, *arguments):
    """What the program prints; it ends well if all its cases do."""
    problem = missing(*{command.split()[0] for command in (compiler, runner) if command})
    if problem:
        (pytest.fail if are_required() else pytest.skip)(problem)
    peaks = folder / "peaks"
    sources = [*(path for path in build.SOURCES.glob("*.cpp") if path.name != "operators.cpp"), HERE / "standalone.cpp"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    words = [sys.executable, peak_memory.__file__, str(peaks), *shlex.split(compiler)]
    flags = [*build.compile_flags(isa), f"-I{build.SOURCES}"]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda pair: subprocess.run([*words, *flags, "-c", pair[0], "-o", pair[1]], check=True),
                zip(sources, objects, strict=True),
            )
        )
    linked = ["-pthread", *(["-static"] if runner else [])]
    subprocess.run([*shlex.split(compiler), *objects, *linked, "-o", folder / "standalone"], check=True)
    done = subprocess.run(
        [*shlex.split(runner), folder / "standalone", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = peaks.read_text().splitlines()
    assert len(lines) == len(sources)
    assert max(int(line.split()[0]) for line in lines) < MOST_MIB, lines
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("compiler", "isa", "runner", "lanes", "arguments", "fewest"),
    [
        pytest.param("clang++", BEST, "", None, [], 45, id="clang"),
        pytest.param(CROSS, "neon", "qemu-aarch64", 4, [], 45, id="neon"),
        pytest.param(CROSS, "sve256", EMULATED, 8, ["one dtype"], 15, id="sve256"),  # eight minutes in all dtypes
        pytest.param(CLANG_CROSS, "neon", "qemu-aarch64", 4, [], 45, id="clang neon"),
    ],
)
def test_any_call_equals_the_definition(tmp_path, compiler, isa, runner, lanes, arguments, fewest):
    first, *cases, last = compile_and_run(tmp_path, compiler, isa, runner, *arguments)
    assert lanes is None or first == f"{lanes} lanes"
    assert len(cases) >= fewest
    assert last == "0 failed"

"""Building the C++ kernels: once, for the right machine, whatever happens to the process, the compiler or the folder.

With a source of one function, not the real kernels.
"""

import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import build, processor
from difftransformer_lab.cli.main import main
from tests.support import fresh

pytestmark = pytest.mark.skipif(
    "avx2" not in processor.available() or shutil.which("c++") is None, reason="needs AVX2 and a compiler"
)

ISA = "avx2"
TILES = {"_is_avx512_bf16_supported": True, "_is_amx_tile_supported": True, "_init_amx": True}
EXPORTED = 'extern "C" __attribute__((visibility("default"))) int'


class Place:
    """Sources, a cache folder and a compiler that counts its calls."""

    def __init__(self, folder: Path):
        self.sources, self.cache, self.calls = folder / "csrc", folder / "cache", folder / "calls"
        self.compiler = folder / "compiler"
        self.sources.mkdir()
        self.write("answer.h", "#define ANSWER 42\n")
        self.write("one.cpp", '#include "answer.h"\n' + EXPORTED + " answer() { return ANSWER; }\n")
        self.write("two.cpp", EXPORTED + " difftransformer_use_tiles() { return 1; }\n")  # asked on processors with AMX
        self.compile_with('exec c++ "$@"')

    def write(self, name, text):
        (self.sources / name).write_text(text)

    def compile_with(self, command):
        self.compiler.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n{command}\n')
        self.compiler.chmod(0o755)

    def count_calls(self):
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    def start(self, code):
        """Another process, in this place, that leads a group."""
        quiet = "logging.getLogger('difftransformer').addHandler(logging.NullHandler())"
        strict = "warnings.simplefilter('error'); warnings.filterwarnings('ignore', '.*fork', DeprecationWarning)"
        imports = "import logging, warnings; from pathlib import Path; from difftransformer.ops import build"
        prepared = f"{imports}; {quiet}; {strict}; build.SOURCES = Path({str(self.sources)!r})"
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        return fresh.Popen([sys.executable, "-c", f"{prepared}\n{code}"], **how)

    def run_together(self, count, code):
        """The lines that so many processes print, which begin at the same moment."""
        forks = f"""
import os, torch.utils.cpp_extension
say = lambda words: os.write(1, f"{{words}}\\n".encode())
children = []
for number in range({count}):
    children.append(os.fork())
    if not children[-1]:
        break
if children[-1]:
    statuses = [os.waitpid(child, 0)[1] for child in children]
    raise SystemExit(any(statuses))
"""
        at_once = "\nos._exit(0)"  # an orderly end takes a second with torch
        return self.finish(self.start(forks + code + at_once)).splitlines()

    def finish(self, process):
        """Its output, from a process that ended well."""
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output.strip()


@pytest.fixture
def place(tmp_path, monkeypatch):
    made = Place(tmp_path)
    monkeypatch.setattr(build, "SOURCES", made.sources)
    monkeypatch.setattr(build, "_outcome", [])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(made.cache))
    monkeypatch.setenv("CXX", str(made.compiler))
    monkeypatch.delenv("DIFFTRANSFORMER_SANITIZE_KERNELS", raising=False)
    return made


def failures(caplog):
    return [record for record in caplog.records if "no CPU attention kernels" in record.getMessage()]


def answer(path):
    return ctypes.CDLL(str(path)).answer()


def wait_until(happened, seconds=60):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_builds_and_reuses(place, caplog):
    caplog.set_level(logging.INFO, "difftransformer")
    path = build.build(ISA)
    assert answer(path) == 42
    assert path.is_relative_to(place.cache / "difftransformer")
    assert place.count_calls() == 3  # two sources and the link
    assert "-mavx2" in place.calls.read_text()
    assert build.build(ISA) == path
    assert place.count_calls() == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"building the CPU attention kernels for avx2, once, about half a minute; kept in {path.parent}"
    ]
    assert sorted(file.name for file in path.parent.iterdir()) == ["kernels.sha256", "kernels.so"]
    assert build.build(ISA, force=True) == path
    assert place.count_calls() == 6


def test_nothing_depends_on_the_machine_that_compiles(place):
    build.build("avx512_bf16")  # compiled wherever it runs
    words = place.calls.read_text().split()
    assert "-mavx512bf16" in words
    assert not {"-march=native", "-mtune=native", "-ffast-math", "-Ofast"} & set(words)


@pytest.mark.parametrize(
    "change",
    [
        lambda place, patch: place.write("one.cpp", f"{EXPORTED} answer() {{ return 43; }}\n"),
        lambda place, patch: place.write("answer.h", "#define ANSWER 43\n"),
        lambda place, patch: place.write("three.cpp", ""),
        lambda place, patch: (place.sources / "two.cpp").rename(place.sources / "2.cpp"),
        lambda place, patch: patch.setattr(build, "FLAGS", (*build.FLAGS, "-g")),
        lambda place, patch: patch.setenv("DIFFTRANSFORMER_SANITIZE_KERNELS", "1"),
        lambda place, patch: patch.setattr(torch, "__version__", "9.9.9"),
        lambda place, patch: patch.setattr("platform.machine", lambda: "riscv64"),
        lambda place, patch: patch.setattr("platform.libc_ver", lambda: ("glibc", "9.9")),
        lambda place, patch: patch.setattr("torch.utils.cpp_extension.include_paths", lambda: ["/elsewhere"]),
    ],
)
def test_what_goes_into_the_library_is_in_its_path(place, monkeypatch, change):
    before = {isa: build.library_path(isa) for isa in processor.FLAGS_OF}
    assert len(set(before.values())) == len(processor.FLAGS_OF)
    assert before == {isa: build.library_path(isa) for isa in processor.FLAGS_OF}
    for isa, path in before.items():
        assert f"torch-{torch.__version__}-{isa}-" in str(path)
    change(place, monkeypatch)
    assert not set(before.values()) & {build.library_path(isa) for isa in processor.FLAGS_OF}


@pytest.mark.parametrize(
    ("machine", "capability", "private", "expected"),
    [
        ("x86_64", "AVX512", {"_is_avx512_bf16_supported": True}, "avx512_bf16"),
        ("x86_64", "AVX512", {"_is_avx512_bf16_supported": False, "_is_amx_tile_supported": True}, "avx512"),
        ("x86_64", "AVX512", {}, "avx512"),
        ("x86_64", "AVX512", TILES, "amx"),
        ("x86_64", "AVX512", TILES | {"_init_amx": False}, "avx512_bf16"),  # no permission
        ("x86_64", "AVX2", TILES, "avx2"),
        ("x86_64", "DEFAULT", {}, None),
        ("aarch64", "SVE256", {}, "sve256"),
        ("aarch64", "SVE128", {}, "neon"),
        ("aarch64", "DEFAULT", {}, "neon"),
        ("arm64", "DEFAULT", {}, "neon"),
        ("riscv64", "DEFAULT", {}, None),
    ],
)
def test_instruction_set(monkeypatch, machine, capability, private, expected):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    for name in TILES:
        if name in private:
            monkeypatch.setattr(torch.cpu, name, lambda answer=private[name]: answer, raising=False)
        else:  # a torch without this private function
            monkeypatch.delattr(torch.cpu, name, raising=False)
    assert processor.instruction_set() == expected


@pytest.mark.parametrize(
    ("machine", "platform", "expected"),
    [
        ("x86_64", "linux", {"avx2", "avx512", "avx512_bf16", "amx"}),
        ("aarch64", "linux", {"neon", "sve256"}),
        ("arm64", "darwin", {"neon"}),
        ("riscv64", "linux", set()),
    ],
)
def test_a_wheel_has_the_sets_of_its_architecture(monkeypatch, machine, platform, expected):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", platform)
    assert set(processor.of_architecture()) == expected


def test_an_instruction_set_by_name(monkeypatch):
    monkeypatch.setenv("DIFFTRANSFORMER_INSTRUCTION_SET", "avx2")
    assert processor.instruction_set() == "avx2"
    monkeypatch.setenv("DIFFTRANSFORMER_INSTRUCTION_SET", "avx1024")
    with pytest.raises(BackendUnavailable, match=r"DIFFTRANSFORMER_INSTRUCTION_SET=avx1024: this machine has avx2.*"):
        processor.instruction_set()


def test_processes_that_start_together_build_once(place):
    place.compile_with('sleep 0.3\nexec c++ "$@"')
    code = "import ctypes; say(ctypes.CDLL(str(build.build('avx2'))).answer())"
    assert place.run_together(4, code) == ["42"] * 4
    assert place.count_calls() == 3


def test_processes_that_start_together_fail_once(place):
    started = place.cache.parent / "started"
    started.mkdir()
    place.write("one.cpp", "int 1;\n")
    place.compile_with(f'while [ "$(ls {started} | wc -l)" -lt 4 ]; do sleep 0.05; done\nsleep 0.5\nexec c++ "$@"')
    code = f"""
(Path({str(started)!r}) / str(number)).touch()
try:
    build.build("avx2")
except build.BackendUnavailable as error:
    say(error)
"""
    outputs = place.run_together(4, code)
    assert len(outputs) == 4
    (output,) = set(outputs)
    assert "one.cpp:1:5: error:" in output
    assert place.count_calls() == 2


@pytest.mark.slow
def test_a_killed_build_blocks_nobody_and_who_waits_for_it_says_so(place):
    place.compile_with("sleep 60")
    builds = place.start("build.build('avx2')")
    wait_until(lambda: place.count_calls() == 2 or builds.poll() is not None)
    waits = place.start("logging.basicConfig(level='INFO'); build.build('avx2')")
    try:
        assert re.search(f"waiting for process {builds.pid} on .*, which is working in", waits.stdout.readline())
        folder = build.library_path(ISA).parent
        assert list(folder.glob("build-*"))
        place.compile_with('exec c++ "$@"')
        builds.kill()  # its compilers live on
        assert builds.wait() == -signal.SIGKILL
        place.finish(waits)
        assert answer(build.library_path(ISA)) == 42
        assert sorted(file.name for file in folder.iterdir()) == ["kernels.sha256", "kernels.so"]
    finally:
        for process in (builds, waits):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            process.wait()


def test_no_compiler(place, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "nonexistent-c++ -m64")
    caplog.set_level(logging.INFO, "difftransformer")
    reason = build.load()
    assert reason == build.load()
    assert "no C++ compiler: 'nonexistent-c++ -m64' was not found" in reason
    assert "CXX" in reason
    (record,) = failures(caplog)
    assert record.levelname == "WARNING"
    assert reason in record.getMessage()
    assert "other backends are used" in record.getMessage()
    assert not place.cache.exists()


def test_an_empty_path(place, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler: 'c++' was not found" in build.load()


def test_a_compiler_that_cannot_be_started(place):
    place.compiler.write_bytes(b"\x7fELF of another machine")
    assert f"{place.compiler}: error: Exec format error" in build.load()


def test_a_source_that_does_not_compile(place, caplog):
    place.write("one.cpp", "\n".join(["int fine;", "int 1;", "int 2;"]))
    reason = build.load()
    log = build.library_path(processor.instruction_set()).with_name("build.log")
    assert "one.cpp:2:5: error: " in reason
    assert reason.endswith(f"; the compiler's output is in {log}")
    assert "\n" not in reason
    assert "one.cpp:3:5: error: " in log.read_text()
    assert len(failures(caplog)) == 1
    place.write("one.cpp", "int undefined(); int answer() { return undefined(); }\n")
    with pytest.raises(BackendUnavailable, match=r"undefined reference to `undefined\(\)'"):
        build.build(ISA)
    place.compile_with("exit 3")
    with pytest.raises(BackendUnavailable, match="exit status 3"):
        build.build(ISA)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_cache_folder_that_cannot_be_written(place, tmp_path, monkeypatch, caplog, is_file):
    if is_file:
        (tmp_path / "file").touch()
        root, words = tmp_path / "file" / "below", "Not a directory"
    else:
        root, words = tmp_path / "read-only", "Permission denied"
        root.mkdir(mode=0o500)
        if os.access(root, os.W_OK):
            pytest.skip("root writes everywhere")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    reason = build.load()
    assert f"cannot write the cache folder {root}" in reason
    assert words in reason
    assert "TORCH_EXTENSIONS_DIR" in reason
    assert len(failures(caplog)) == 1
    assert place.count_calls() == 0


def test_nothing_is_written_to_use_a_library(place):
    """The cache may be read-only by then."""
    path = build.build(processor.instruction_set())
    assert build.load() is None
    assert {file.name for file in path.parent.iterdir()} == {"kernels.so", "kernels.sha256"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],  # to load this ends the process
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    ],
)
def test_a_damaged_library_is_built_again(place, damage, caplog):
    path = build.build(processor.instruction_set())
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(data))
    assert build.load() is None
    assert answer(path) == 42
    assert place.count_calls() == 6
    assert not failures(caplog)


def prebuilt(place, monkeypatch, tmp_path):
    """A library in the place of a wheel's."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    path = tmp_path / f"{processor.instruction_set()}.so"
    place.write("answer.h", "#define ANSWER 41\n")
    build.build_ahead(processor.instruction_set(), path)
    place.write("answer.h", "#define ANSWER 42\n")
    return path


def test_a_wheels_library_is_used_as_it_is(place, monkeypatch, tmp_path, caplog):
    path = prebuilt(place, monkeypatch, tmp_path)
    words = place.calls.read_text()
    assert "-rpath" not in words
    library = build.open_library()
    assert (library.path, library.is_new, answer(library.path)) == (path, False, 41)
    assert place.calls.read_text() == words
    assert not place.cache.exists()
    assert not caplog.records
    assert answer(build.open_library(force=True).path) == 42


@pytest.mark.parametrize(
    ("damage", "cause"),
    [(lambda data: data[:-100], "is truncated"), (lambda data: b"no library", "file too short|invalid ELF header")],
)
def test_a_damaged_library_of_a_wheel_is_not_used(place, monkeypatch, tmp_path, caplog, damage, cause):
    path = prebuilt(place, monkeypatch, tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert answer(build.open_library().path) == 42
    told, building = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(f"the wheel's kernels are not used: the kernels cannot be loaded: {path}:? .*({cause})", told)
    assert building.startswith("building the CPU attention kernels")
    assert build.open_library().path.is_relative_to(place.cache)
    assert place.count_calls() == 6


def test_a_library_that_never_loads_is_built_twice_at_most(place, monkeypatch, caplog):
    def fails(path):
        raise OSError("failed to map\nsegment")

    monkeypatch.setattr(torch.ops, "load_library", fails)
    assert build.load() == "the kernels cannot be loaded: failed to map segment"
    assert place.count_calls() == 3
    with pytest.raises(BackendUnavailable):
        build.open_library()
    assert place.count_calls() == 6
    assert len(failures(caplog)) == 1


def test_no_instruction_set(place, monkeypatch, caplog):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert "AVX2 on x86-64 or NEON on AArch64" in build.load()
    assert len(failures(caplog)) == 1


def test_no_sources(place, monkeypatch):
    shutil.rmtree(place.sources)
    assert f"no C++ sources in {place.sources}" in build.load()


def test_threads_load_once(place):
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: build.load(), range(8))) == {None}
    assert place.count_calls() == 3


def test_load_is_a_constant_to_torch_compile(place):
    def doubled(x):
        return x * 2 if build.load() is None else x

    torch.compiler.reset()
    assert torch.compile(doubled, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2
    assert place.count_calls() == 3


def test_command(place, capsys):
    path = build.library_path(processor.instruction_set())
    for words, how, calls in ([], "built in", 3), ([], "built before", 3), (["--force"], "built in", 6):
        assert main(["build-kernels", *words]) == 0
        line = capsys.readouterr().out
        assert f"for {processor.instruction_set()}: {how}" in line
        assert line.splitlines()[0].endswith(str(path))
        assert place.count_calls() == calls


def test_a_command_that_fails(place, monkeypatch, fails):
    monkeypatch.setenv("CXX", "c++ '")
    words = """the variable CXX: "c++ '" is not a command (No closing quotation); correct it"""
    assert fails("build-kernels").startswith(f"difftransformer build-kernels: {words}")

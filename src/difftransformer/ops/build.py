"""Builds the C++ sources of `csrc/` once, on first use, keeps the library in torch's extension cache and loads it.

Not `torch.utils.cpp_extension.load`: it needs ninja on PATH, and its lock file stays locked when a build is killed.
Here the lock is a `flock`, which ends with its process, and a build works in a folder of its own until it is whole.
"""

import contextlib
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import BackendUnavailable

logger = logging.getLogger("difftransformer")

SOURCES = Path(__file__).parent / "csrc"
# Nothing here depends on the machine that compiles, and NaN and infinity keep their meaning.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
FLAGS_OF = {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": (*_AVX512, "-mavx512bf16")}
SANITIZER_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
# What a source may leave out where torch's internal matrix kernels have changed.
FALLBACK_FLAG = "-DDIFFTRANSFORMER_WITHOUT_BRGEMM"
DIGEST_BYTES = hashlib.sha256().digest_size


class Library(NamedTuple):
    """The kernels that this process has loaded."""

    path: Path
    instruction_set: str
    is_new: bool


class _CompilerError(Exception):
    """The output of a compiler that failed."""


def instruction_set() -> str | None:
    """The kernels that this machine runs, by torch's view of it (ATEN_CPU_CAPABILITY lowers it), or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        return "avx512_bf16" if has_bf16 else "avx512"
    return "avx2" if capability == "AVX2" else None


def library_path(isa: str) -> Path:
    """Where the library for an instruction set is kept.

    The folder's name holds all that goes into the library, for home folders that different machines and environments
    share.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).absolute()
    sources = [(path.name, path.read_bytes()) for path in sorted(SOURCES.glob("*")) if path.suffix in (".cpp", ".h")]
    parts = (sources, _compile_flags(isa), _link_flags(), platform.machine(), platform.libc_ver())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return root / "difftransformer" / f"torch-{torch.__version__}-{isa}-{key}" / "kernels.so"


def build(isa: str, *, force: bool = False) -> Path:
    """Build the library for an instruction set unless it is there; processes that start together build once.

    Raises:
        BackendUnavailable: why it cannot be built, on one line.
    """
    path = library_path(isa)
    log = path.with_name("build.log")
    try:
        library_before, log_before = _stamp(path), _stamp(log)
        if library_before and not force:
            return path
        compiler = _compiler()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            if _stamp(path) not in (None, library_before):
                return path
            if _stamp(log) not in (None, log_before):  # the build that this one waited for has failed
                raise _unbuilt(log.read_text("utf-8"), log)
            for left_by_a_kill in path.parent.glob("build-*"):
                shutil.rmtree(left_by_a_kill, ignore_errors=True)
            log.unlink(missing_ok=True)
            # A warning, so that nobody waits without a word.
            logger.warning(
                "building the CPU attention kernels for %s, once, about a minute; kept in %s", isa, path.parent
            )
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as folder:
                library = _compile(compiler, isa, Path(folder), log)
                _seal(library)
                library.replace(path)
    except OSError as error:
        raise BackendUnavailable(
            f"cannot write the cache folder {path.parent}: {error.strerror or error}; "
            "name another place in the variable TORCH_EXTENSIONS_DIR"
        ) from error
    return path


def open_library(*, force: bool = False) -> Library:
    """Build where needed and load; a library that is there but cannot be loaded is built again, once.

    Raises:
        BackendUnavailable: why not, on one line.
    """
    isa = instruction_set()
    if isa is None:
        raise BackendUnavailable("this machine has no instruction set that they are written for: AVX2 on x86-64 Linux")
    path = library_path(isa)
    before = _stamp(path)
    build(isa, force=force)
    try:
        _load_library(path)
    except BackendUnavailable:
        if _stamp(path) != before:
            raise
        build(isa, force=True)
        _load_library(path)
    return Library(path, isa, is_new=_stamp(path) != before)


_outcome: list[str | None] = []
_outcome_lock = threading.Lock()


@torch.compiler.assume_constant_result
def load() -> str | None:
    """Build where needed and load, once per process: None, or why not (logged, once)."""
    with _outcome_lock:
        if not _outcome:
            try:
                open_library()
                _outcome.append(None)
            except BackendUnavailable as error:
                _outcome.append(str(error))
                logger.warning("no CPU attention kernels, other backends take over: %s", error)
    return _outcome[0]


def _seal(library: Path) -> None:
    """Append the digest of the library, which loaders do not read: to load a part of a library can end the process."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _load_library(path: Path) -> None:
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
            raise OSError(f"{path} is damaged")
        torch.ops.load_library(path)
    except OSError as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise BackendUnavailable(f"the kernels cannot be loaded: {cause}") from error


def _stamp(path: Path) -> tuple[int, int] | None:
    """What tells one version of a file from the next, or None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # only where there is something to build

    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process, which builds the CPU attention kernels in %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiler() -> list[str]:
    from torch.utils.cpp_extension import get_cxx_compiler

    command = shlex.split(get_cxx_compiler())
    if not command or shutil.which(command[0]) is None:
        raise BackendUnavailable(
            f"no C++ compiler: {shlex.join(command)!r} was not found; install g++ or name one in the variable CXX"
        )
    return command


def _sanitizer_flags() -> tuple[str, ...]:
    return SANITIZER_FLAGS if os.environ.get("DIFFTRANSFORMER_SANITIZE_KERNELS") == "1" else ()


def _compile_flags(isa: str) -> list[str]:
    from torch.utils.cpp_extension import include_paths

    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # As system headers, so that torch's own do not warn.
    includes = [word for folder in include_paths() for word in ("-isystem", folder)]
    return [*FLAGS, *FLAGS_OF[isa], *_sanitizer_flags(), abi, *includes]


def _link_flags() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    folders = library_paths()
    # By its file, since some builds of torch give theirs a name of its own: a second runtime would fight for the cores.
    openmp = [str(path) for folder in folders for path in sorted(Path(folder).glob("libgomp*.so*"))] or ["-fopenmp"]
    places = [word for folder in folders for word in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    # A symbol that is missing shall fail here and not in the middle of a run.
    return ["-shared", "-Wl,-z,defs,-z,now", *_sanitizer_flags(), *places, "-ltorch_cpu", "-lc10", *openmp]


def _compile(compiler: list[str], isa: str, folder: Path, log: Path) -> Path:
    try:
        return _compile_with(compiler, _compile_flags(isa), folder)
    except _CompilerError as first:
        library = None
        with contextlib.suppress(_CompilerError):
            library = _compile_with(compiler, [*_compile_flags(isa), FALLBACK_FLAG], folder)
        with contextlib.suppress(OSError):
            log.write_text(str(first), "utf-8")
        if library is None:
            raise _unbuilt(str(first), log) from None
        logger.info("built with %s, since without it: %s", FALLBACK_FLAG, _first_error(str(first)))
        return library


def _compile_with(compiler: list[str], flags: list[str], folder: Path) -> Path:
    sources = sorted(SOURCES.glob("*.cpp"))
    if not sources:
        raise BackendUnavailable(f"no C++ sources in {SOURCES}: install the package again")
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    commands = [
        [*compiler, *flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as pool:
        list(pool.map(_execute, commands))
    library = folder / "kernels.so"
    _execute([*compiler, *objects, *_link_flags(), "-o", str(library)])
    return library


def _execute(command: list[str]) -> None:
    # In English, for `_first_error`, and without what a sanitizer preloads.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise _CompilerError(f"{command[0]}: error: {error.strerror}") from error
    if done.returncode:
        raise _CompilerError(f"{shlex.join(command)}\n{done.stdout}\nexit status {done.returncode}\n")


def _unbuilt(output: str, log: Path) -> BackendUnavailable:
    where = f"; the compiler's output is in {log}" if log.exists() else ""
    return BackendUnavailable(f"the kernels cannot be compiled: {_first_error(output)}{where}")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if re.search("error: |undefined reference|cannot find", line)), lines[-1])

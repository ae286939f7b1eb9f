"""Builds the C++ sources of `csrc/` once, on first use, keeps the library in torch's extension cache and loads it.

Not `torch.utils.cpp_extension.load`: it needs ninja on PATH, and its lock file stays locked when a build is killed.
Here the lock is a `flock`, which ends with its process, and a build works in a folder of its own until it is whole.
"""

import contextlib
import ctypes
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import BackendUnavailable
from .processor import FLAGS_OF, instruction_set

logger = logging.getLogger("difftransformer")

SOURCES = Path(__file__).parent / "csrc"
# Where `make dist` puts the libraries of a wheel: one for each instruction set, so that its users compile nothing.
PREBUILT = Path(__file__).parent / "prebuilt"
# The interface of torch 2.11, which later releases keep. Nothing here depends on the machine that compiles, and NaN and
# infinity keep their meaning.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
)
SANITIZER_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
DIGEST_BYTES = hashlib.sha256().digest_size


class Library(NamedTuple):
    """The kernels that this process has loaded."""

    path: Path
    instruction_set: str
    is_new: bool


class _CompilerError(Exception):
    """The output of a compiler that failed."""


def library_path(isa: str) -> Path:
    """Where the library for an instruction set is kept.

    The folder's name holds all that goes into the library, for home folders that different machines and environments
    share.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).absolute()
    sources = [(path.name, path.read_bytes()) for path in sorted(SOURCES.glob("*")) if path.suffix in (".cpp", ".h")]
    parts = (sources, compile_flags(isa), link_flags(), platform.machine(), platform.libc_ver())
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
                "building the CPU attention kernels for %s, once, about half a minute; kept in %s", isa, path.parent
            )
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as folder:
                library = Path(folder) / "kernels.so"
                try:
                    compile_library(compiler, compile_flags(isa), link_flags(), library)
                except _CompilerError as error:
                    with contextlib.suppress(OSError):
                        log.write_text(str(error), "utf-8")
                    raise _unbuilt(str(error), log) from None
                library.replace(path)
    except OSError as error:
        raise BackendUnavailable(
            f"cannot write the cache folder {path.parent}: {error.strerror or error}; "
            "name another place in the variable TORCH_EXTENSIONS_DIR"
        ) from error
    return path


def build_ahead(isa: str, library: Path) -> None:
    """Build the library for an instruction set that a wheel is to carry: it finds torch's where that is loaded already.

    Raises:
        BackendUnavailable: why it cannot be built, on one line.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / library.name
        try:
            compile_library(_compiler(), compile_flags(isa), link_flags(for_a_wheel=True), made)
        except _CompilerError as error:
            raise BackendUnavailable(f"the kernels cannot be compiled: {_first_error(str(error))}") from None
        shutil.copyfile(made, library)


def open_library(*, force: bool = False) -> Library:
    """Load the wheel's library, or build one where needed and load it.

    A built one that is there but cannot be loaded is built again, once.

    Args:
        force: Build in any case, also where the wheel has one.

    Raises:
        BackendUnavailable: why not, on one line.
    """
    isa = instruction_set()
    if isa is None:
        raise BackendUnavailable(
            "this machine has no instruction set that they are written for: AVX2 on x86-64 or NEON on AArch64, "
            "under Linux or macOS"
        )
    prebuilt = PREBUILT / f"{isa}.so"
    if prebuilt.exists() and not force:
        try:
            _load_library(prebuilt, isa)
            return Library(prebuilt, isa, is_new=False)
        except BackendUnavailable as error:
            logger.warning("the wheel's kernels are not taken: %s", error)
    path = library_path(isa)
    before = _stamp(path)
    build(isa, force=force)
    try:
        _load_library(path, isa)
    except BackendUnavailable:
        if _stamp(path) != before:
            raise
        build(isa, force=True)
        _load_library(path, isa)
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


def _load_library(path: Path, isa: str) -> None:
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
            raise OSError(f"{path} is damaged")
        torch.ops.load_library(path)
    except OSError as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise BackendUnavailable(f"the kernels cannot be loaded: {cause}") from error
    if isa == "amx" and not _agree_on_tiles(path):
        logger.warning(
            "the kernels for AMX tiles disagree with the others on this machine, which are taken in their place"
        )


def _agree_on_tiles(path: Path) -> bool:
    use_tiles = ctypes.CDLL(str(path)).difftransformer_use_tiles
    use_tiles.restype = ctypes.c_bool
    return bool(use_tiles())


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


def compile_flags(isa: str) -> list[str]:
    """What the compiler is told for an instruction set."""
    from torch.utils.cpp_extension import include_paths

    # As system headers, so that torch's own do not warn.
    includes = [word for folder in include_paths() for word in ("-isystem", folder)]
    return [*FLAGS, *FLAGS_OF[isa], *_sanitizer_flags(), *includes]


def link_flags(*, for_a_wheel: bool = False) -> list[str]:
    """What the linker is told: torch's library is found where it lies now, or in a wheel by its name alone."""
    from torch.utils.cpp_extension import library_paths

    folders = library_paths()
    places = [f"-L{folder}" for folder in folders]
    if not for_a_wheel:
        places += [f"-Wl,-rpath,{folder}" for folder in folders]
    # A symbol that is missing shall fail here and not in the middle of a run; macOS' linker always sees to that.
    strict = [] if sys.platform == "darwin" else ["-Wl,-z,defs,-z,now"]
    return ["-shared", *strict, *_sanitizer_flags(), *places, "-ltorch_cpu"]


def compile_library(compiler: Sequence[str], flags: Sequence[str], link: Sequence[str], library: Path) -> None:
    """Compile all sources, as many at once as there are cores, and link them; objects are left beside the library."""
    sources = sorted(SOURCES.glob("*.cpp"))
    if not sources:
        raise BackendUnavailable(f"no C++ sources in {SOURCES}: install the package again")
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:
        tasks = [
            pool.submit(_execute, [*compiler, *flags, "-c", str(source), "-o", str(made)])
            for source, made in zip(sources, objects, strict=True)
        ]
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            _show_progress(done, len(tasks))
    _execute([*compiler, *map(str, objects), *link, "-o", str(library)])
    _seal(library)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rcompiled {done} of {total} sources" + "\n" * (done == total))
        sys.stderr.flush()


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

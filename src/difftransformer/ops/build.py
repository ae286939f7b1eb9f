"""Build the C++ sources of `csrc/` on first use, keep the library in torch's extension cache, and load it.

`torch.utils.cpp_extension.load` is not used because it needs ninja, and because its lock stays locked when a build is killed.
Here the lock ends with its process, the finished library is renamed into its place, and its sha256 stands beside it.
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
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import BackendUnavailable
from ..files import locked
from .processor import FLAGS_OF, instruction_set

logger = logging.getLogger("difftransformer")

SOURCES = Path(__file__).parent / "csrc"
# `make dist` puts one library per instruction set here, so that users of the wheel need no compiler.
PREBUILT = Path(__file__).parent / "prebuilt"
# TORCH_TARGET_VERSION selects the interface of torch 2.11, which later releases keep. No flag depends on the machine that
# compiles, and none changes the meaning of NaN and infinity.
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


class Library(NamedTuple):
    """The library that this process has loaded."""

    path: Path
    instruction_set: str
    is_new: bool

    @property
    def compiler(self) -> str:
        """The compiler that built the library, as it signs an ELF file; "" if it does not."""
        try:
            library = self.path.read_bytes()
        except OSError:  # removed since it was loaded
            return ""
        signed = re.findall(rb"GCC: \([^()]*\) [\d.]+|clang version [\w.]+", library)
        # Clang's libraries contain startup code of GCC.
        return str(max(signed, default=b"").decode())


class _CompilerError(Exception):
    """The output of a compiler that failed."""


def cache_folder() -> Path:
    """Return this package's folder in torch's extension cache."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).absolute() / "difftransformer"


def library_path(isa: str) -> Path:
    """Return the path of the library for an instruction set.

    The folder's name covers everything that goes into the library, because machines and environments may share a home folder.
    """
    sources = [(path.name, path.read_bytes()) for path in sorted(SOURCES.glob("*")) if path.suffix in (".cpp", ".h")]
    parts = (sources, compile_flags(isa), link_flags(), platform.machine(), platform.libc_ver())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"torch-{torch.__version__}-{isa}-{key}" / "kernels.so"


def build(isa: str, *, force: bool = False) -> Path:
    """Build the library for an instruction set unless it exists. Processes that start together build it once.

    Raises:
        BackendUnavailable: The library cannot be built; the reason is one line.
    """
    path = library_path(isa)
    log = path.with_name("build.log")
    if is_whole(path) and not force:
        return path
    command = compiler()
    try:
        before = _changed(log)
        with locked(path.parent, name="lock", wait=True):
            if is_whole(path) and not force:
                return path
            if log.exists() and _changed(log) != before:  # the process that this one has waited for has failed
                raise _build_error(log.read_text("utf-8"), log)
            for leftover in path.parent.glob("build-*"):  # of a build that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            log.unlink(missing_ok=True)
            # A warning, because it explains why the program seems to hang.
            logger.warning(
                "building the CPU attention kernels for %s, once, about half a minute; kept in %s", isa, path.parent
            )
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as folder:
                library = Path(folder) / "kernels.so"
                try:
                    compile_library(command, compile_flags(isa), link_flags(), library)
                except _CompilerError as error:
                    with contextlib.suppress(OSError):
                        log.write_text(str(error), "utf-8")
                    raise _build_error(str(error), log) from None
                with library.open("rb") as file:
                    os.fsync(file.fileno())
                path.with_suffix(".sha256").write_text(_sha256(library), "utf-8")
                library.replace(path)
    except OSError as error:
        raise BackendUnavailable(
            f"cannot write the cache folder {path.parent}: {error.strerror or error}; "
            "name another folder in the variable TORCH_EXTENSIONS_DIR"
        ) from error
    return path


def is_whole(path: Path) -> bool:
    """Return whether a library exists and is as it was built: a changed one could compute wrong numbers, or crash."""
    try:
        return path.with_suffix(".sha256").read_text("utf-8") == _sha256(path)
    except (OSError, UnicodeDecodeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build_ahead(isa: str, library: Path) -> None:
    """Build the library for an instruction set for a wheel. It uses the torch library that the process has loaded.

    Raises:
        BackendUnavailable: The library cannot be built; the reason is one line.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / library.name
        try:
            compile_library(compiler(), compile_flags(isa), link_flags(for_a_wheel=True), made)
        except _CompilerError as error:
            raise BackendUnavailable(f"the kernels cannot be compiled: {_first_error(str(error))}") from None
        shutil.copyfile(made, library)


def open_library(*, force: bool = False) -> Library:
    """Load the wheel's library, or else the one in the cache, which is built first if it is missing or cannot be loaded.

    Args:
        force: Whether to build the library in any case.

    Raises:
        BackendUnavailable: No library can be loaded; the reason is one line.
    """
    isa = instruction_set()
    if isa is None:
        raise BackendUnavailable(
            "the kernels need AVX2 on x86-64 or NEON on AArch64, under Linux or macOS, and this machine has neither"
        )
    prebuilt = PREBUILT / f"{isa}.so"
    if os.path.exists(prebuilt) and not force:
        try:
            _load_library(prebuilt, isa)
            return Library(prebuilt, isa, is_new=False)
        except BackendUnavailable as error:
            logger.warning("the wheel's kernels are not used: %s", error)
    path = library_path(isa)
    if is_whole(path) and not force:
        with contextlib.suppress(BackendUnavailable):  # by a loader that cannot take it; it is built again
            _load_library(path, isa)
            return Library(path, isa, is_new=False)
        force = True
    build(isa, force=force)
    _load_library(path, isa)
    return Library(path, isa, is_new=True)


_loaded: list[Library] = []
_outcome: list[str | None] = []
_outcome_lock = threading.Lock()


@torch.compiler.assume_constant_result
def load() -> str | None:
    """Build and load the library once per process. Return None, or the reason for a failure, which is logged once."""
    with _outcome_lock:
        if not _outcome:
            try:
                open_library()
                _outcome.append(None)
            except BackendUnavailable as error:
                _outcome.append(str(error))
                logger.warning("no CPU attention kernels, other backends are used: %s", error)
    return _outcome[0]


def loaded() -> Library | None:
    """Return the library that this process has loaded, or None."""
    return _loaded[-1] if _loaded else None


def _load_library(path: Path, isa: str) -> None:
    try:
        if _is_truncated(path):
            raise OSError(f"{path} is truncated")
        torch.ops.load_library(path)
    except OSError as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise BackendUnavailable(f"the kernels cannot be loaded: {cause}") from error
    _loaded.append(Library(path, isa, is_new=False))
    if isa == "amx" and not _agree_on_tiles(path):
        logger.warning(
            "the kernels for AMX tiles disagree with the others on this machine; the others are used instead"
        )


def _agree_on_tiles(path: Path) -> bool:
    use_tiles = ctypes.CDLL(str(path)).difftransformer_use_tiles
    use_tiles.restype = ctypes.c_bool
    return bool(use_tiles())


def _is_truncated(path: Path) -> bool:
    """Whether an ELF file ends before its section headers, the last part: the loader would map it and die of SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:4] != b"\x7fELF" or len(header) < 64:
        return False  # the loader refuses it, or it is no ELF file, as on macOS
    (offset,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<2H", header, 58)
    return bool(path.stat().st_size < offset + size * count)


def _changed(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def compiler() -> list[str]:
    """Return the command of the C++ compiler.

    Raises:
        BackendUnavailable: It was not found.
    """
    from torch.utils.cpp_extension import get_cxx_compiler

    try:
        command = shlex.split(get_cxx_compiler())
    except ValueError as error:
        raise BackendUnavailable(
            f"the variable CXX: {get_cxx_compiler()!r} is not a command ({error}); correct it"
        ) from None
    if not command or shutil.which(command[0]) is None:
        raise BackendUnavailable(
            f"no C++ compiler: {shlex.join(command)!r} was not found; install g++ or name one in the variable CXX"
        )
    return command


def _sanitizer_flags() -> tuple[str, ...]:
    return SANITIZER_FLAGS if os.environ.get("DIFFTRANSFORMER_SANITIZE_KERNELS") == "1" else ()


def compile_flags(isa: str) -> list[str]:
    """Return the compiler's flags for an instruction set."""
    from torch.utils.cpp_extension import include_paths

    # System headers cause no warnings.
    includes = [word for folder in include_paths() for word in ("-isystem", folder)]
    return [*FLAGS, *FLAGS_OF[isa], *_sanitizer_flags(), *includes]


def link_flags(*, for_a_wheel: bool = False) -> list[str]:
    """Return the linker's flags. In a wheel torch's library is found by its name alone, else in its present folder."""
    from torch.utils.cpp_extension import library_paths

    folders = library_paths()
    places = [f"-L{folder}" for folder in folders]
    if not for_a_wheel:
        places += [f"-Wl,-rpath,{folder}" for folder in folders]
    # A missing symbol must fail here and not in the middle of a run. The linker of macOS does so by itself.
    strict = [] if sys.platform == "darwin" else ["-Wl,-z,defs,-z,now"]
    return ["-shared", *strict, *_sanitizer_flags(), *places, "-ltorch_cpu"]


def compile_library(compiler: Sequence[str], flags: Sequence[str], link: Sequence[str], library: Path) -> None:
    """Compile all sources in parallel and link them. The objects stay beside the library."""
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


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rcompiled {done} of {total} sources" + "\n" * (done == total))
        sys.stderr.flush()


def _execute(command: list[str]) -> None:
    # English output is for `_first_error`; a sanitizer's preloaded library would break the compiler.
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


def _build_error(output: str, log: Path) -> BackendUnavailable:
    where = f"; the compiler's output is in {log}" if log.exists() else ""
    return BackendUnavailable(f"the kernels cannot be compiled: {_first_error(output)}{where}")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if re.search("error: |undefined reference|cannot find", line)), lines[-1])

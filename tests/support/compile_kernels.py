"""Compiles the Triton kernels for Hopper without a GPU and prints what each takes of one, as JSON.

    python -m tests.support.compile_kernels            # every call of CALLS
    python -m tests.support.compile_kernels "wide"     # those whose name has the word
    python -m tests.support.compile_kernels --write    # rewrites tests/ops/kernel_budget.json
    python -m tests.support.compile_kernels --small    # the shared memory that each takes of a GPU that has 99 KiB

The calls go through `launch` itself, with tensors that have shapes and no storage, so the compiler gets the arguments that it
gets on a GPU: which sizes and strides are multiples of 16, which are 1, what is None. Every form of a pass is compiled.
"""

import ast
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import difftransformer

BUDGET = Path(__file__).parents[1] / "ops" / "kernel_budget.json"
TARGET, SHARED_BYTES = ("cuda", 90, 32), 228 * 1024  # of a processor
SMALL_TARGET, SMALL_SHARED_BYTES = ("cuda", 89, 32), 100 * 1024
PROCESSORS = 132  # of an H200: the shares of a decoding call depend on them


class Call(NamedTuple):
    """One call of attention; the names are those of `ops/attention.py`."""

    name: str
    width: int = 64
    value_width: int | None = None  # 2 D
    shared_key: bool = False
    maps: int = 2
    dtype: str = "bfloat16"
    groups: int = 8
    queries: int = 4096
    keys: int = 4096
    causal: bool = True
    restrictions: tuple[str, ...] = ()
    norm: str = ""  # "", "plain" or "weight"
    lam: str = "head"  # or "query"
    passes: str = "forward backward"  # or "forward", without gradients


CALLS = (
    # What models are trained with.
    Call("V1 d=64", norm="weight"),
    Call("V1 d=128", width=128, norm="weight"),
    Call("V2 d=64", value_width=64, shared_key=True, lam="query"),
    Call("V2 d=128", width=128, value_width=128, shared_key=True, lam="query"),
    Call("V1 d=32", width=32, norm="weight"),
    Call("V1 d=96", width=96, norm="weight"),
    Call("own keys d=64 e=64", value_width=64),
    Call("softmax d=128", width=128, value_width=128, maps=1),
    # What changes the code of a kernel.
    Call("V1 d=64, no norm", passes="forward"),
    Call("V1 d=64, no gain", norm="plain"),
    Call("V1 d=64, not causal", causal=False),
    Call("V1 d=64, odd lengths, groups", groups=2, queries=999, keys=1001),
    Call("V1 d=64, window", restrictions=("window",)),
    Call("V1 d=64, stored keys", restrictions=("kv_start", "kv_lengths")),
    Call("V1 d=64, documents", restrictions=("cu_seqlens",)),
    Call("V1 d=64, mask", causal=False, restrictions=("attn_mask",)),
    Call("V1 d=64, everything", norm="weight", restrictions=("window", "kv_start", "kv_lengths", "cu_seqlens", "attn_mask"),
         passes="forward"),
    Call("V1 d=64, fp16", dtype="float16", passes="forward"),
    Call("V1 d=128, documents", width=128, restrictions=("cu_seqlens",)),
    Call("V1 d=128, mask", width=128, causal=False, restrictions=("attn_mask",)),
    Call("V2 d=128, documents", width=128, value_width=128, shared_key=True, lam="query",
         restrictions=("cu_seqlens",)),
    # Few queries.
    Call("decode V1 d=64", queries=1, keys=32768, norm="weight", restrictions=("kv_lengths",), passes="forward"),
    Call("decode V1 d=64, 64 rows", queries=64, keys=32768, passes="forward"),
    Call("decode V1 d=64, window", queries=1, keys=32768, restrictions=("kv_start", "kv_lengths", "window"), passes="forward"),
    Call("decode V1 d=64, mask", queries=1, keys=32768, causal=False, restrictions=("attn_mask",), passes="forward"),
    Call("decode V1 d=128", width=128, queries=1, keys=32768, norm="weight", restrictions=("kv_lengths",), passes="forward"),
    Call("decode V1 d=128, 32 rows", width=128, queries=32, keys=32768, passes="forward"),
    Call("decode V1 d=128, 64 rows", width=128, queries=64, keys=32768, passes="forward"),
    Call("decode V2 d=128", width=128, value_width=128, shared_key=True, lam="query", queries=1, keys=32768, groups=2,
         restrictions=("kv_lengths",), passes="forward"),
    Call("decode softmax d=128", width=128, value_width=128, maps=1, queries=1, keys=32768, passes="forward"),
    # fp32 is multiplied as fp32.
    Call("V1 d=64, fp32", dtype="float32", norm="weight"),
    Call("V1 d=128, fp32", width=128, dtype="float32", norm="weight"),
    Call("decode V1 d=64, fp32", dtype="float32", queries=1, keys=32768, passes="forward"),
    Call("decode V1 d=128, fp32", width=128, dtype="float32", queries=64, keys=32768, passes="forward"),
)  # fmt: skip


def problem(call):
    """The call's inputs, norm and gradient, of tensors without storage."""
    import torch

    from difftransformer.ops.problem import Call as AttentionCall
    from difftransformer.ops.problem import Restrictions
    from difftransformer.ops.triton_kernels import launch

    batch, heads, wide = 2, 8, call.value_width or 2 * call.width
    dtype = getattr(torch, call.dtype)

    def new(positions, count, width):
        return torch.empty(batch, positions, count, width, dtype=dtype, device="meta").transpose(1, 2)

    def integers(count):
        return torch.empty(count, dtype=torch.int32, device="meta")

    given = {
        "window": 512,
        "kv_start": integers(batch),
        "kv_lengths": integers(batch),
        "cu_seqlens": integers(5),
        "attn_mask": torch.empty(batch, 1, call.queries, call.keys, dtype=torch.bool, device="meta"),
    }
    restrictions = Restrictions(is_causal=call.causal, **{name: given[name] for name in call.restrictions})
    lam = torch.empty(*((batch, heads, call.queries) if call.lam == "query" else (1, heads, 1)), device="meta")
    arguments = AttentionCall(
        new(call.queries, heads, call.maps * call.width),
        new(call.keys, call.groups, call.width if call.shared_key else call.maps * call.width),
        new(call.keys, call.groups, wide),
        lam if call.maps == 2 else None,
        restrictions,
        call.width**-0.5,
    )
    weight = torch.empty(wide, device="meta") if call.norm == "weight" else None
    norm = (weight, 1e-5, 0.2) if call.norm else None
    return launch.Inputs(arguments), norm, new(call.queries, heads, wide)


class Device:
    """As much of a driver as compiling asks for."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGET)


def prepare(keep=None):
    """Let Triton compile where it would launch, and make every form of a pass.

    Args:
        keep: Called with the name and the compiled kernel of each.

    Returns:
        An object: `call` and `form`, which make the names, and `rows`, where (name, hash, what it takes) are put.
    """
    import torch
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from difftransformer.ops.triton_kernels import launch

    at = SimpleNamespace(call="", form="", rows=[])
    known = {}
    run = JITFunction.run
    driver.set_active(Device())
    knobs.nvidia.dump_ptxas_log = True
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(
        multi_processor_count=PROCESSORS, shared_memory_per_multiprocessor=SHARED_BYTES
    )

    def compile_only(kernel, *arguments, grid, warmup, **options):
        log = io.StringIO()
        name = " / ".join(x for x in (at.call, at.form, kernel.fn.__name__) if x)
        try:
            with contextlib.redirect_stdout(log), warnings.catch_warnings():
                warnings.simplefilter("error")  # a user would see it at every first call
                compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:
            raise RuntimeError(f"{name} does not compile") from error
        if compiled.hash not in known:
            known[compiled.hash] = taken(compiled, log.getvalue())
            if keep is not None:
                keep(name, compiled)
        if compiled.hash in (key for _, key, _ in at.rows):
            return
        if name in (other for other, _, _ in at.rows):  # the first of two calls of one kernel in a form is map 2's
            name += ", then"
        at.rows.append((name, compiled.hash, known[compiled.hash]))

    def every_form(forms, key, run):
        for form in forms:
            at.form = form.name
            run(form)
        at.form = ""
        return forms[0]

    JITFunction.run = compile_only
    launch.choose = every_form
    torch.cuda.get_device_capability = lambda _: divmod(TARGET[1], 10)
    os.environ["DIFFTRANSFORMER_HOPPER"] = "1"
    return at


def taken(compiled, log):
    """What a kernel takes, from the assembler's log."""

    def number(pattern):
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    if not number(r"Used (\d+) registers"):
        raise RuntimeError(f"the assembler did not say what it used: {log!r}")
    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared": compiled.metadata.shared + number(r"(\d+) bytes smem"),
        "warps": compiled.metadata.num_warps,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        # Each product then waits for the one before it.
        "serialized": "wgmma.mma_async instructions are serialized" in log,
    }


def compile_call(call, at):
    """(name, hash, what it takes) of each kernel of a call, in the order in which they are launched."""
    from difftransformer.ops.triton_kernels import launch

    at.call, at.form, at.rows = call.name, "", []
    inputs, norm, grad = problem(call)
    saved = launch.forward(inputs, norm, save="backward" in call.passes)
    if "backward" in call.passes:
        launch.backward(inputs, norm, saved, grad)
    return at.rows


_at = None


def _start(folder):
    """Of a process of its own: caches are not shared, since what comes from a cache has no log."""
    global _at
    own = tempfile.mkdtemp(dir=folder)
    os.environ["TRITON_CACHE_DIR"] = own
    _at = prepare()


def _one(call):
    return compile_call(call, _at)


def compile_calls(words=""):
    """What each kernel of the calls takes, by name; a kernel that several calls need has the name of the first."""
    calls = [call for call in CALLS if words in call.name]
    found, known = {}, set()
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(min(4, os.cpu_count() or 1), spawn, _start, (folder,)) as pool,
    ):
        for rows in pool.map(_one, calls):
            for name, key, row in rows:
                if key not in known:
                    known.add(key)
                    found[name] = row
    return found


def small():
    """Shared memory of each kernel on a GPU that has 99 KiB. It is known before the assembler runs, which is left out.

    Restrictions other than a mask add no tiles.
    """
    global TARGET, SHARED_BYTES, taken
    from triton.backends.nvidia.compiler import CUDABackend

    TARGET, SHARED_BYTES = SMALL_TARGET, SMALL_SHARED_BYTES
    taken = lambda compiled, log: compiled.metadata.shared  # noqa: E731
    add_stages = CUDABackend.add_stages

    def without_assembler(backend, stages, *rest):
        add_stages(backend, stages, *rest)
        stages["ptx"] = lambda source, metadata: metadata.setdefault("name", "") and ""
        stages["cubin"] = lambda source, metadata: b""

    CUDABackend.add_stages = without_assembler
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        at = prepare()
        calls = [call for call in CALLS if not {*call.restrictions} - {"attn_mask", "kv_lengths"}]
        return {name: row for call in calls for name, _, row in compile_call(call, at)}


def assembler():
    """The version of the assembler, or why there is none for the target."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend, get_ptxas

        CUDABackend(GPUTarget(*TARGET))
        return get_ptxas(TARGET[1]).version, None
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"no assembler for compute capability 9.0: {error}"


def report(words=""):
    """What the test compares with the budget."""
    import triton

    version, missing = assembler()
    if missing:
        return {"missing": missing}
    return {"triton": triton.__version__, "ptxas": version, "kernels": compile_calls(words)}


def sources():
    """A digest of what the figures depend on beside the compiler: the kernels, how they are launched, and the calls here."""
    ops = Path(difftransformer.__file__).parent / "ops"
    files = (*sorted((ops / "triton_kernels").glob("*.py")), ops / "problem.py", Path(__file__))
    return hashlib.sha256("".join(map(statements, files)).encode()).hexdigest()


def statements(file):
    """The code of a file without comments and docstrings, which compile to nothing."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def write_budget(found, shared):
    """The budget of today, with the reasons that it had; a reason that is due and missing is left to be written."""
    old = json.loads(BUDGET.read_text(encoding="utf-8"))["kernels"] if BUDGET.exists() else {}
    for name, row in found["kernels"].items():
        if row["spilled"] or row["serialized"]:
            row["reason"] = old.get(name, {}).get("reason", "")
            if not row["reason"]:
                print(f"write a reason for {name}: {row}")
    head = {name: found[name] for name in ("triton", "ptxas")} | {"sources": sources()}
    parts = "".join(
        f',\n "{name}": {{\n{lines(rows)}\n}}' for name, rows in (("kernels", found["kernels"]), ("small", shared))
    )
    BUDGET.write_text(f"{json.dumps(head)[:-1]}{parts}}}\n", encoding="utf-8")


def lines(rows):
    """An object in JSON with a line for each kernel."""
    return ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())


def main(arguments):
    """The command line; see the module's docstring."""
    if "--small" in arguments:
        print(json.dumps(small(), indent=1))
        return
    found = report("" if "--write" in arguments else "".join(arguments))
    if "missing" in found:
        sys.exit(found["missing"])
    if "--write" in arguments:
        write_budget(found, small())
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    # Triton reads it when it is imported: with the interpreter there would be nothing to compile.
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1:])

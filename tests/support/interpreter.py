"""Triton's interpreter, made to round to bf16 as a GPU does, and to patch its language once a launch.

By itself it rounds to bf16 towards zero, and patches its language once a call of a function: the patches stay the same, and
looking for what to patch takes a third of its time.
"""

import functools
import importlib.util
import os

IS_USED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def patch_once():
    """Let the functions that a kernel calls find the language as the launch left it.

    A Triton that has no functions of these names is left as it is.
    """
    from triton.runtime import interpreter

    original, scope_of_nothing = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if original is None or scope_of_nothing is None:
        return
    patched = set()

    @functools.cache
    def languages(function):
        known = (interpreter.tl, interpreter.tl.core)
        return frozenset(at for at in (0, 1) if any(value is known[at] for value in function.__globals__.values()))

    def patch(function):
        seen = languages(function)
        if seen in patched:
            return scope_of_nothing()
        scope = original(function)
        restore = scope.restore
        patched.add(seen)

        def restore_all():
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch


def round_to_nearest():
    """Convert fp32 to bf16 with rounding to the nearest, ties to even."""
    import numpy as np
    from triton.runtime import interpreter

    tl, original = interpreter.tl, interpreter._convert_float

    def convert(x, of, to, mode):
        if (of, to) == (tl.bfloat16, tl.float32):
            return (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if (of, to) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(x).view(np.uint32)
            rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)
        return original(x, of, to, mode)

    interpreter._convert_float = convert

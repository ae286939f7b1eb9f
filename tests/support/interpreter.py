"""Triton's interpreter, made to patch its language once a launch instead of once a call of a function.

The patches stay the same; looking for what to patch takes a third of the interpreter's time.
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

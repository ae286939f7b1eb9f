"""python -m difftransformer.hub COMMAND ...: run a program that uses transformers, which then knows this package's models.

COMMAND is a command that a package installs, such as lm_eval, or the name of a module, such as trl.scripts.sft.
"""

import importlib.util
import runpy
import sys
from importlib.metadata import entry_points

from .. import families, model  # noqa: F401 - registers the models
from ..errors import EXIT_ERROR


def main() -> int:
    """Run the program that the arguments name, in this process."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python -m difftransformer.hub COMMAND ...", file=sys.stderr)  # noqa: T201
        return EXIT_ERROR
    del sys.argv[0]
    name = sys.argv[0]
    commands = entry_points(group="console_scripts", name=name)
    if commands:
        return int(next(iter(commands)).load()() or 0)
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        print(  # noqa: T201
            f"python -m difftransformer.hub: {name!r} is neither an installed command nor a module; install its package",
            file=sys.stderr,
        )
        return EXIT_ERROR
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

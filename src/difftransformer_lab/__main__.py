"""The command `difftransformer`, also as `python -m difftransformer_lab`."""

import sys
from importlib.metadata import requires


def main() -> int:
    """Run the command line, or say what is missing for it."""
    try:
        from .cli.main import main as command

        return command()
    except ModuleNotFoundError as missing:
        extra = [
            line for line in requires("difftransformer") or [] if line.replace("'", '"').endswith('extra == "lab"')
        ]
        if not any(line.startswith((missing.name or "").partition(".")[0]) for line in extra):
            raise
        print(f"difftransformer: {missing.name} is not installed; pip install 'difftransformer[lab]'", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())

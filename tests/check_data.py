"""Say which of the data that heavier tests read is there (`make test-data`).

A set is asked for where DIFFTRANSFORMER_DATA names a folder, or under CI (DIFFTRANSFORMER_CI=1): then a missing one fails.
"""

import os
import sys
from pathlib import Path

VARIABLE = "DIFFTRANSFORMER_DATA"
SETS = {
    "tinyshakespeare": ("tinyshakespeare/input.txt",),
    "trec": ("trec/train_5500.label", "trec/TREC_10.label"),
    "banking77": ("banking77/train.csv", "banking77/test.csv"),
    "clinc150": ("clinc150/data_full.json",),
    "wikitext2": ("wikitext2/valid.txt", "wikitext2/test.txt"),
}


def missing(name: str) -> str | None:
    """Why a set cannot be read, or None where it is there."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} is not set; name a folder that holds {', '.join(SETS[name])}"
    gone = [
        file for file in SETS[name] if not (Path(folder) / file).is_file() or not (Path(folder) / file).stat().st_size
    ]
    return f"{folder} lacks {', '.join(gone)}" if gone else None


def main() -> int:
    """One line a set; 1 where a set was asked for and is not there."""
    problems = {name: problem for name in SETS if (problem := missing(name))}
    for name in SETS:
        print(f"{name}: {problems.get(name) or 'found'}")
    if problems and (os.environ.get(VARIABLE) or os.environ.get("DIFFTRANSFORMER_CI") == "1"):
        print(f"check_data: asked for and missing: {', '.join(problems)}; set {VARIABLE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

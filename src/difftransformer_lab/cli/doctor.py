"""difftransformer doctor."""

from json import dumps
from typing import Any

from .arguments import check_device
from .console import show, show_next, show_table

EXIT_WRONG = 1


def run(device: str | None = None, json: bool = False) -> int:
    """Check every attention backend against the equations, and print what a bug report needs. Takes up to two minutes.

    The exit status is 1 if a backend is wrong.

    Args:
        device: cpu or cuda; by default cuda where there is one.
        json: Print JSON instead of tables.
    """
    import torch

    from ..doctor import examine_backends, machine_facts

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    place = torch.empty(0, device=device).device
    checks, facts = examine_backends(place), machine_facts(place)
    if json:
        show(dumps({"facts": facts, "backends": checks}, indent=2))
    else:
        _print(facts, checks)
        show_next("demo")
    return EXIT_WRONG if any(check["outcome"] == "wrong" for check in checks) else 0


def _print(facts: dict[str, str], checks: list[dict[str, Any]]) -> None:
    from ..table import Table, columns

    width = max(map(len, facts))
    for name, value in facts.items():
        show(f"{name:<{width}}  {value}")
    dtypes = list(dict.fromkeys(check["dtype"] for check in checks))
    cells = {(check["backend"], check["dtype"]): _cell(check) for check in checks}
    names = dict.fromkeys(check["backend"] for check in checks)
    rows = [[name, *(cells[name, dtype] for dtype in dtypes)] for name in names]
    notes = ["Error against float64 over the largest number; forward and backward."]
    show_table(Table("backends", "Backends", columns("backend", *dtypes), rows, notes))
    reasons = {(check["backend"], check["outcome"], check["reason"]): None for check in checks if check["reason"]}
    for name, outcome, reason in reasons:
        show(f"{name}: {outcome}: {reason}")


def _cell(check: dict[str, Any]) -> str:
    words = [check["outcome"]]
    if check["error"] is not None:
        words.append(f"{check['error']:.0e}")
    if check["milliseconds"] is not None:
        words.append(f"{check['milliseconds']:.1f} ms")
    return ", ".join(words)

"""The plan of a study that confirms: its file, the commit that holds it, and what must agree with the study."""

import hashlib
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from difftransformer.errors import ConfigError
from difftransformer.typed import build

from ..environment import git
from ..recipe_files import read_mapping, shipped_recipes
from ..results import RegisteredPlan, StudyPlan

FIRST_SEED = 2000
"""Seeds from here on are kept for plans: no study explores with them, and none chooses learning rates."""


MATERIAL = re.compile(r"\b(materially|substantially|considerably|much|far|by at least|by more than|that matters?)\b")
"""What the sentence of a verdict may say only of an interval beyond a margin."""


def load_plan(name: str) -> StudyPlan:
    """Read a plan by its name in recipes/plans, or from a file."""
    document = read_mapping(name, shipped_recipes("plans"), "a plan is a mapping with study, preset and questions")
    plan = build(StudyPlan, document, source=name, error=ConfigError)
    names = [contrast.name for contrast in plan.contrasts]
    if unknown := [one for one in plan.holm if one not in names]:
        raise ConfigError(
            f"{name}: holm names {unknown[0]!r}, which is no contrast of the plan; it has {'; '.join(names)}"
        )
    for contrast in plan.contrasts:
        where = f"{name}: contrast {contrast.name!r}"
        if names.count(contrast.name) > 1:
            raise ConfigError(f"{where} stands twice; give each contrast a name of its own")
        if contrast.first_seed < FIRST_SEED or contrast.seeds < 1:
            raise ConfigError(
                f"{where}: seeds {contrast.first_seed} to {contrast.every_seed.stop - 1}; begin at {FIRST_SEED} "
                "or above, where no run has chosen anything, and give at least 1 seed"
            )
        if not contrast.terms or not all(term.arms for term in contrast.terms):
            raise ConfigError(f"{where}: a term without arms; name at least one arm in every term")
        if contrast.name in plan.holm and contrast.margin:
            raise ConfigError(
                f"{where}: margin={contrast.margin:g} under holm, whose p-values are against 0; leave one out"
            )
        for side in ("above", "below"):
            if not contrast.margin and (said := MATERIAL.search(getattr(contrast, side))):
                raise ConfigError(
                    f"{where}: {side} says {said[0]!r}, and is decided by lying {side} 0 alone; leave the word out, since the "
                    "verdict itself says where the interval lies beyond smallest, or give a margin"
                )
        if contrast.smallest is not None and not contrast.within:
            raise ConfigError(
                f"{where}: smallest without within; say what it means that the effect is smaller than that"
            )
    return plan


def registered(name: str, plan: StudyPlan) -> RegisteredPlan:
    """Return a plan with the commit that gave its file this content, if the file is in one."""
    path = shipped_recipes("plans").get(name, Path(name)).resolve()
    commit, committed = _commit(path)
    return RegisteredPlan(
        plan=plan,
        file=f"recipes/plans/{path.name}" if path.parent.name == "plans" else path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        commit=commit,
        committed=committed,
    )


def _commit(path: Path) -> tuple[str, str]:
    """Return the commit that last changed a file and its time; empty if the file is in none, or was changed since."""
    try:
        changed = git(path.parent, "status", "--porcelain", "--", path.name)
        last = git(path.parent, "log", "-1", "--format=%H %ct", "--", path.name)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    if changed or not last:
        return "", ""
    commit, _, seconds = last.partition(" ")
    return commit, datetime.fromtimestamp(int(seconds), UTC).isoformat()

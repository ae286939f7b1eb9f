"""Which runs a planned contrast speaks of: each arm in its setting, with its weight."""

from collections.abc import Sequence

from .plans import OWN_BEST, Contrast
from .studies import ChosenRate, StudyAxis

Point = tuple[str, ...]
Group = tuple[str, Point]
"""An arm in one setting. Runs of two groups have nothing but the seed in common."""


def groups_of(
    contrast: Contrast, axes: Sequence[StudyAxis], rates: Sequence[ChosenRate], *, lower_is_better: bool
) -> dict[Group, float] | None:
    """Return the weight of each arm in its setting; None while rates are missing that choose a setting."""
    groups: dict[Group, float] = {}
    for term in contrast.terms:
        for arm in term.arms:
            place = {axis.name: term.at.get(axis.name, axis.values[0]) for axis in axes}
            for axis in axes:
                if place[axis.name] == OWN_BEST:
                    others = {name: value for name, value in place.items() if value != OWN_BEST}
                    best = own_best(rates, arm, axis, others, lower_is_better=lower_is_better)
                    if best is None:
                        return None
                    place[axis.name] = best
            group = arm, tuple(place[axis.name] for axis in axes)
            groups[group] = groups.get(group, 0.0) + term.weight / len(term.arms)
    return {group: weight for group, weight in groups.items() if weight}


def own_best(
    rates: Sequence[ChosenRate], arm: str, axis: StudyAxis, others: dict[str, str], *, lower_is_better: bool
) -> str | None:
    """Return the value of an axis at which an arm was best while its learning rates were chosen; None without rates.

    Args:
        others: Values of other axes. An axis along which the arm's rates were not chosen apart does not count.
    """
    mine = [rate for rate in rates if rate.arm == arm and axis.name in rate.point]
    apart = {name: value for name, value in others.items() if len({rate.point.get(name) for rate in mine}) > 1}
    values = {
        rate.point[axis.name]: mean
        for rate in mine
        if all(rate.point.get(name) == value for name, value in apart.items())
        and (mean := dict(rate.tried)[rate.learning_rate]) is not None
    }
    known = [value for value in axis.values if value in values]
    pick = min if lower_is_better else max
    return pick(known, key=values.__getitem__) if known else None

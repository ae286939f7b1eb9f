"""Compute the contrasts of every committed study again, from its records, without any code of the package.

    python tests/recompute.py [FOLDER]    # docs/results/studies; prints a line for each contrast

Each method is another than the package's where there is one: sign-flip tests flip the signs (more than 24 differences are
rounded to a fine grid, on which all patterns are counted), their intervals are found by bisection of the same test,
Fieller's bounds are where Student's t of a - r b reaches its quantile, and Holm's correction is the closed test that it
stands for.
"""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
from scipy import optimize, stats

STUDIES = Path(__file__).parents[1] / "docs" / "results" / "studies"


def figure_value(run, figure):
    """The figure of one run, and the number of answers behind it."""
    if figure["curve"]:
        curve = run["curves"][figure["curve"]]
        x, y = np.array(curve["steps"], float), np.array(curve["values"], float)
        if figure["reaches"] is not None:
            gap = (y - figure["reaches"]) * (-1 if figure["curve"].endswith("_nats") else 1)
            there = np.flatnonzero(gap >= 0)
            if not len(there):
                return x[-1], math.nan
            at = there[0]
            return float(np.interp(0, gap[at - 1 : at + 1], x[at - 1 : at + 1]) if at else x[0]), math.nan
        return float(np.trapezoid(y, x) / (x[-1] - x[0]) if figure["area"] else y[-1]), math.nan
    for one in run["figures"]:
        if (one["task"], one["name"], one["at"]) == (figure["task"], figure["name"], figure["at"]):
            return one["value"], one["n"]
    raise KeyError(figure["label"])


def setting(index, arm, at):
    """The value on each axis; "own best" is where the arm's chosen rate was best on the tuning seeds."""
    point = {axis["name"]: at.get(axis["name"], axis["values"][0]) for axis in index["axes"]}
    lower = index["figures"][0]["better"] == "lower"
    for axis in (name for name, value in point.items() if value == "own best"):
        reached = {}
        for rate in index["rates"]:
            if rate["arm"] == arm:
                ((_, mean),) = [pair for pair in rate["tried"] if pair[0] == rate["learning_rate"]]
                reached[rate["point"][axis]] = mean if lower else -mean
        point[axis] = min(reached, key=reached.get)
    return point


def chosen_rates(index, folder):
    """The learning rate of each arm and setting, and the mean of each that was tried, from the runs that choose rates.

    The first figure decides, and at a tie the next one.
    """
    figures, runs, found = [one for one in index["figures"] if not one["secondary"]], [], []
    signs = [1 if figure["better"] == "lower" else -1 for figure in figures]
    for member in index["members"]:
        if member["is_tuning"]:
            run = json.loads((folder / member["file"]).read_text("utf-8"))["result"]
            runs.append((member, run["recipe"]["training"]["optimizer"]["learning_rate"], run))
    for rate in index["rates"]:
        tried = {}
        for member, value, run in runs:
            if member["arm"] == rate["arm"] and rate["point"].items() <= member["point"].items():
                tried.setdefault(value, []).append([figure_value(run, figure)[0] for figure in figures])
        means = {value: np.mean(rows, axis=0) for value, rows in tried.items()}
        best = min(means, key=lambda value: tuple(signs * means[value]))
        found.append((best, {value: float(row[0]) for value, row in means.items()}))
    return found


def flipped(values, centre):
    """Two-sided p-value of the sign-flip test of a centre, over all sign patterns; those of two halves are counted in pairs."""
    differences = np.array(values) - centre
    if len(differences) > 24:
        return flipped_on_a_grid(differences)
    first, second = (np.sort(signed_sums(part)) for part in np.array_split(differences, 2))
    near, whole = 1e-12 * np.abs(differences).sum(), differences.sum()
    as_high = (len(second) - np.searchsorted(second, whole - near - first)).sum()
    as_low = np.searchsorted(second, whole + near - first, side="right").sum()
    return min(1.0, 2 * min(as_high, as_low) / 2 ** len(values))


def flipped_on_a_grid(differences, points=2**14):
    """The same of any number of differences, each rounded to a multiple of a step, on which signed sums are counted."""
    steps = np.rint(differences / np.abs(differences).sum() * points).astype(int)
    reach = np.abs(steps).sum()
    shares = np.zeros(2 * reach + 1)
    shares[reach] = 1.0
    for step in np.abs(steps):
        shares = (np.roll(shares, step) + np.roll(shares, -step)) / 2  # nothing gets beyond the ends
    whole = reach + steps.sum()
    return min(1.0, 2 * min(shares[whole:].sum(), shares[: whole + 1].sum()))


def signed_sums(values):
    return np.array([sum(signed) for signed in itertools.product(*((value, -value) for value in values))])


def sign_flip(values):
    """Interval and p-value; the interval holds the centres that are not rejected at 5 %."""
    reach = np.ptp(values) + abs(np.mean(values))
    ends = []
    for side in (-1, 1):
        inside, outside = np.mean(values), np.mean(values) + side * reach
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if flipped(values, middle) > 0.05 else (inside, middle)
        ends.append(inside)
    return (*ends, flipped(values, 0.0))


def student(values):
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return low, high, stats.ttest_1samp(values, 0).pvalue


def welch(groups, weights):
    parts = [weight**2 * np.var(group, ddof=1) / len(group) for group, weight in zip(groups, weights, strict=True)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    mean = sum(weight * np.mean(group) for group, weight in zip(groups, weights, strict=True))
    half = stats.t.ppf(0.975, freedom) * error
    return mean - half, mean + half, 2 * stats.t.sf(abs(mean) / error, freedom)


def fieller(a, b):
    """mean(a) / mean(b) of values of the same seeds: the ratios r for which a - r b cannot be told from 0."""

    def t(r):
        return stats.ttest_1samp(np.array(a) - r * np.array(b), 0).statistic ** 2 - stats.t.ppf(0.975, len(a) - 1) ** 2

    middle = np.mean(a) / np.mean(b)
    step = max(abs(middle), 1e-3)
    ends = []
    for side in (-1, 1):
        far = step
        while t(middle + side * far) < 0:
            far *= 2
        ends.append(optimize.brentq(lambda x, side=side: t(middle + side * x), 0, far, xtol=1e-14))
    return middle - ends[0], middle + ends[1], stats.ttest_1samp(a, 0).pvalue


@dataclasses.dataclass
class Outcome:
    seeds: int
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    state: str = "incomplete"


def recompute(index, folder):
    """The outcome of each contrast of a study's index, by its name, from the runs beside it. `p` is after Holm's correction."""
    found, plan = tested_alone(index, folder), index["plan"]["plan"]
    together = {name: 1.0 if found[name].p is None else found[name].p for name in plan["holm"]}
    for name in together:
        if found[name].p is not None:
            found[name].p = closed_test(name, together)
    for question in plan["questions"]:
        way_is_open = True
        for contrast in question["contrasts"]:
            one = found[contrast["name"]]
            if one.effect is not None:
                one.state = state(contrast, one) if way_is_open or contrast["name"] in together else "not tested"
            way_is_open = way_is_open and one.state in ("above", "below", "within")
    return found


def closed_test(name, p_values):
    """Holm's corrected p-value as the closed test that it is: the largest of Bonferroni's, over all sets with this contrast."""
    others = [other for other in p_values if other != name]
    sets = itertools.chain.from_iterable(itertools.combinations(others, size) for size in range(len(p_values)))
    return max(min(1.0, (len(some) + 1) * min(p_values[one] for one in (name, *some))) for some in sets)


def state(contrast, one):
    margin, smallest = contrast["margin"], contrast["smallest"]
    if contrast["seeds"] < 5:
        return "too few seeds"
    nearest = min(abs(one.low), abs(one.high))
    if one.low * one.high > 0 and (nearest > margin if margin else one.p <= 0.05):
        return "above" if one.low > 0 else "below"
    if smallest is not None and max(abs(one.low), abs(one.high)) < smallest:
        return "within"
    return "open"


def tested_alone(index, folder):
    """Each contrast as if it were the only one: `p` is not corrected, and nothing has a state yet."""
    runs = {}
    for member in index["members"]:
        path = folder / member["file"]
        if not member["is_tuning"] and path.exists():
            run = json.loads(path.read_text("utf-8"))["result"]
            if run.get("diverged_after") is None:
                runs[member["arm"], tuple(sorted(member["point"].items())), member["seed"]] = run
    found = {}
    for contrast in itertools.chain.from_iterable(one["contrasts"] for one in index["plan"]["plan"]["questions"]):
        (figure,) = [one for one in index["figures"] if one["label"] == contrast["figure"]]
        weights = {}
        for term in contrast["terms"]:
            for arm in term["arms"]:
                place = arm, tuple(sorted(setting(index, arm, term["at"]).items()))
                weights[place] = weights.get(place, 0) + term["weight"] / len(term["arms"])
        first = contrast.get("first_seed", 2000)
        seeds = range(first, first + contrast["seeds"])
        there = [seed for seed in seeds if all((*place, seed) in runs for place in weights)]
        if contrast["scale"] == "doublings":
            (taken,) = [place for place, weight in weights.items() if weight < 0]
            gained = gains(runs, (index["reference"], taken[1]), there, figure)
            there = there if gained else []  # no unit yet
        if len(there) < contrast["seeds"]:
            found[contrast["name"]] = Outcome(len(there))
            continue
        samples = {}
        for place in weights:
            values = [figure_value(runs[*place, seed], figure) for seed in there]
            if contrast["scale"] == "log":
                values = [(math.log(value), n) for value, n in values]
            elif contrast["scale"] == "log odds":
                values = [(math.log((value * n + 0.5) / (n - value * n + 0.5)), n) for value, n in values]
            samples[place] = [value for value, _ in values]
        values = [sum(weight * samples[place][k] for place, weight in weights.items()) for k in range(len(there))]
        effect = float(np.mean(values))
        if contrast["test"] == "welch":
            low, high, p = welch([*samples.values()], [*weights.values()])
        elif contrast["scale"] == "doublings":
            effect, (low, high, p) = effect / float(np.mean(gained)), fieller(values, gained)
        elif len(there) >= 10:
            low, high, p = sign_flip(values)
        else:
            low, high, p = student(values)
        found[contrast["name"]] = Outcome(len(there), effect, float(low), float(high), float(p))
    return found


def gains(runs, place, seeds, figure):
    """What the loss of the reference falls with each doubling of its tokens, from its runs of half of them."""
    return [
        figure_value(half, figure)[0] - figure_value(runs[*place, seed], figure)[0]
        for seed in seeds
        for (arm, _, other), half in runs.items()
        if (arm, other) == (place[0], seed)
        and (*place, seed) in runs
        and half["train_tokens"] * 2 == runs[*place, seed]["train_tokens"]
    ]


def main(folder):
    for path in sorted(folder.glob("*/*.json")):
        index = json.loads(path.read_text("utf-8"))["result"]
        if index.get("plan"):
            print(f"{index['name']}, {index['preset']}")
            for name, one in recompute(index, path.parent).items():
                if one.effect is None:
                    print(f"  {name}: {one.seeds} seeds, not all")
                else:
                    interval = f"[{one.low:+.4f}, {one.high:+.4f}]"
                    print(f"  {name}: {one.effect:+.4f} {interval}, p = {one.p:.3g}, {one.seeds} seeds, {one.state}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else STUDIES)

"""transformers' own test suites: what passes for Llama passes for every attention type, and what passes for a Qwen3, Gemma 3
or Phi-3 passes for one made differential, or the table says why not. A test that passes for ours is not run for theirs.

The suites are those of the installed release, from its source distribution. This lacks the generation and the export suite.
DIFFTRANSFORMER_TRANSFORMERS_TESTS names the folder `tests` of a checkout of transformers that has them; they then run too.
"""

import csv
import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from difftransformer.attention import VARIANTS
from tests.ecosystem.conftest import UNDER_CI
from tests.support.transformers_suites import layout

OUTCOMES = ("passed", "skipped", "failed")  # from best to worst
with Path(layout.__file__).with_name("exceptions.csv").open(encoding="utf-8", newline="") as table:
    ROWS = {(row["attention_type"], row["test"]): row["reason"] for row in csv.DictReader(table)}
FAMILIES = ("qwen3", "gemma3_text", "phi3")
# Of parts that other types here have; dex and xsa extend softmax.
COMPOSED = {"softmax", "softmax_norm", "gate", "diff_xsa", "diff_gate", "diff_v2_added"}
ORIGINALS = dict.fromkeys([name for name in VARIANTS if name not in COMPOSED], "llama")
ORIGINALS |= {f"differential_{name}": name for name in FAMILIES}
FEWEST_PASSED = 119  # by each model; a suite that is skipped as a whole shows nothing
CASES = "tests/test_cases.py"


@pytest.fixture
def archive(cache):
    """The source distribution of the installed release."""
    folder = cache.mkdir("transformers")
    try:
        return layout.download(folder)
    except subprocess.CalledProcessError as error:
        reason = f"pip cannot fetch transformers' source distribution: {error.stderr.strip()[-200:]}"
        (pytest.fail if UNDER_CI else pytest.skip)(reason)


def run(folder, *options):
    """What pytest prints in a process of its own."""
    plain = ["-c", "pytest.ini", "-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3500,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout[-2000:]
    return done.stdout


def collected(folder):
    """{model: names of the tests of its suites}."""
    names = defaultdict(set)
    for line in run(folder, "--collect-only", CASES).splitlines():
        if line.startswith(f"{CASES}::"):
            _, model, test = line.split("::")
            names[model].add(test)
    return names


def outcomes(folder, chosen):
    """Run the tests of these models, or single ones as model::test, in one process; {model: {test: outcome}}."""
    results = folder / "results.xml"
    printed = run(folder, f"--junitxml={results}", *(f"{CASES}::{one}" for one in chosen))
    assert results.exists(), printed[-2000:]  # pytest, too, ends with 1 after an error of its own
    by_model = defaultdict(dict)
    for case in xml.parse(results).iter("testcase"):
        tags = {child.tag for child in case} & {"skipped", "failure", "error"}
        outcome = "passed" if not tags else "skipped" if tags == {"skipped"} else "failed"
        by_model[case.get("classname").rpartition(".")[2]][case.get("name")] = outcome
    return by_model


def test_table():
    counts = Counter(attention_type for attention_type, _ in ROWS)
    assert set(counts) <= set(ORIGINALS)
    assert all(counts[name] <= (8 if name == "diff" else 3) for name in ORIGINALS), counts
    assert all(ROWS.values())


@pytest.mark.slow(minutes=11)
def test_what_passes_for_llama_passes(archive, needs, tmp_path):
    needs("parameterized")
    layout.lay_out(archive, tmp_path, os.environ.get("DIFFTRANSFORMER_TRANSFORMERS_TESTS"))
    tests = collected(tmp_path)
    assert all(tests[name] == tests[original] for name, original in ORIGINALS.items())
    ours = outcomes(tmp_path, ORIGINALS)
    assert all(ours[name].keys() == tests[name] for name in ORIGINALS)
    assert all(list(ours[name].values()).count("passed") >= FEWEST_PASSED for name in ORIGINALS), ours
    others = {(name, test): what for name in ORIGINALS for test, what in ours[name].items() if what != "passed"}
    theirs = outcomes(tmp_path, sorted({f"{ORIGINALS[name]}::{test}" for name, test in others}))
    behind = {
        (name, test)
        for (name, test), outcome in others.items()
        if OUTCOMES.index(outcome) > OUTCOMES.index(theirs[ORIGINALS[name]][test])
    }
    assert behind == ROWS.keys()

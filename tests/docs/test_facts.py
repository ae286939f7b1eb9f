"""What pages say of the demo, of recipes, of studies and of reports is what the recipes, the records and the code say.

`test_learning.py` has what they say of recall and lookup.
"""

import re
from datetime import timedelta
from math import log
from statistics import fmean, median

import numpy as np
import pytest
from scipy.special import logit
from scipy.stats import fisher_exact, spearmanr, ttest_ind

from difftransformer.attention import VARIANTS
from difftransformer.hub import open_model, source_folder
from difftransformer.model import DiffTransformerConfig, count, matching_width, preset
from difftransformer_lab.recipe_files import read_recipe, shipped_recipes
from difftransformer_lab.results import figure_of
from difftransformer_lab.statistics import paired_difference
from difftransformer_lab.studies.design import load_study
from tests.recompute import fieller
from tests.support.pages import DOCS, factor, text_of


@pytest.fixture(scope="module")
def trained(studies):
    """Runs of studies whose models are new, by the study's slug."""
    return {
        slug: [run for *_, run in evidence.every_run()]
        for slug, evidence in studies.items()
        if not slug.startswith("upcycled")
    }


@pytest.mark.parametrize("name", ["demo", "demo-twin"])
def test_the_size_of_the_shipped_models(name):
    with source_folder(name) as folder:
        size = f"{open_model(folder).num_parameters() / 1e6:.1f}M parameters"
    assert f"is a DIFF model of {size}" in text_of("docs/start.md")


def test_the_minutes_of_the_demo_are_the_same_everywhere():
    pages = ("Makefile", "recipes/demo.yaml", "docs/start.md")
    for page in pages:
        assert re.findall(r"about (\d+) minutes on two idle cores", text_of(page)) == ["16"], page


def test_what_is_said_of_needle_documents_is_in_the_recipes():
    for name in ("demo", "retrieval", "variants"):
        document = read_recipe(name)
        rows, model = document["training"]["retrieval"], document["model"]
        assert rows["terse"] == rows["dense"] == 0.5
        assert document["data"]["vocab_size"] == 1024
        assert (model["mimetic_attention"], model["embedding_multiplier"]) == (True, 1)
    page = text_of("docs/findings.md")
    assert "`training.retrieval.terse: 0.5` and `dense: 0.5`, `model.mimetic_attention: true`" in page
    assert "`embedding_multiplier: 1`, and `vocab_size: 1024`" in page


def test_the_sizes_of_what_was_trained(trained):
    page = text_of("docs/findings.md")
    (low, high), (short, long) = (
        re.search(r"have ([\d.]+)M to (\d+)M parameters", page).groups(),
        re.search(r"contexts of (\d+) to (\d+) tokens", page).groups(),
    )
    sizes = {run.parameters / 1e6 for runs in trained.values() for run in runs}
    contexts = {run.recipe["training"]["context_stages"][-1][1] for runs in trained.values() for run in runs}
    assert (f"{min(sizes):.2f}", f"{max(sizes):.0f}") == (low, high)
    assert (min(contexts), max(contexts)) == (int(short), int(long))


def test_the_starts_of_the_studies(trained):
    page = text_of("docs/findings.md")
    parts = re.search(
        r"N\(0, 0\.02²\) in ([^.]+?), N\(0, 0\.05²\) in ([^.]+?), and N\(0, 0\.05²\) with mimetic attention in (.+?)\. ",
        page,
    ).groups()
    named = [{f"{name}-normal-start" for name in re.findall(r"`([\w-]+)`", part)} for part in parts]
    found = [set(), set(), set()]
    for slug, runs in trained.items():
        models = [run.recipe["model"] for run in runs]
        if slug.endswith("-normal-start"):
            assert {model["initialization"] for model in models} == {"normal"}
            is_mimetic = any(model.get("mimetic_attention") for model in models)
            (width,) = {model.get("initializer_range") or 0.02 for model in models}
            found[(width == 0.05) + is_mimetic].add(slug)
    assert found == named
    for name in ("transfer-laptop", "synthetic-laptop"):
        assert {run.recipe["model"]["initialization"] for run in trained[name]} == {"fan_in"}


def test_studies_that_have_a_plan_and_no_run(studies):
    said = re.search(
        r"(\w+) stud(?:y has|ies have) a plan and none of (?:its|their) runs yet: (.+?) \(", text_of("docs/findings.md")
    )
    planned = {name for name in shipped_recipes("studies") if load_study(name).presets["laptop"].plan}
    missing = {name for name in planned if f"{name}-laptop" not in studies}
    assert set(re.findall(r"`(\w+)`", said[2])) == missing
    assert said[1] == {1: "One", 2: "Two", 3: "Three", 4: "Four"}[len(missing)]


def test_what_was_retrieved_is_mostly_some_number_of_the_context(studies):
    evidence, runs = studies["controls-laptop"], {}
    for arm in ("diff", "twin", "no-norm", "averaged"):
        rows = [
            {row.at.get("needles"): row.value for row in run.figures
             if row.name == "accuracy" and row.at.get("cities") == "seen" and row.at.get("depth") is None}
            for run in evidence.at(arm, ()).values()
        ]  # fmt: skip
        runs[arm] = sum(row[1] >= 0.5 for row in rows), sum(row[4] > 0.5 for row in rows), len(rows)
    assert runs == {"diff": (18, 4, 20), "twin": (4, 1, 20), "no-norm": (5, 0, 8), "averaged": (0, 0, 8)}
    assert f"{fmean((1, 1 / 2, 1 / 4, 1 / 6)):.3f} of all of them" in evidence.index.correction.why
    p = [
        fisher_exact([[runs[arm][place], 20 - runs[arm][place]] for arm in ("diff", "twin")]).pvalue for place in (0, 1)
    ]
    assert p[0] < 0.001
    assert f"4 and 1 (p {p[1]:.2f})" in evidence.index.correction.why
    assert (
        "18 of 20 DIFF runs name some number of the context, 4 of 20 Transformer runs"
        in evidence.index.correction.stands
    )


def test_log_odds_of_the_lead_among_noise(studies):
    """They depend on what counts before the first validation: nothing, or a curve that begins with 0."""
    evidence = studies["noise-laptop"]
    figure, page = evidence.index.figures[0], text_of("docs/studies/noise.md")

    def from_zero(run):
        curve = run.curves["validation_accuracy"]
        return np.trapezoid([0, *curve.values], [0, *curve.steps]) / curve.steps[-1]

    for of in (lambda run: figure_of(run, figure), from_zero):
        changes = []
        for seed in evidence.at("diff", ("0",)):
            odds = {
                (arm, noise): logit(of(evidence.at(arm, (noise,))[seed]))
                for arm in ("diff", "wide") for noise in ("0", "0.6")
            }  # fmt: skip
            changes.append(odds["diff", "0.6"] - odds["wide", "0.6"] - odds["diff", "0"] + odds["wide", "0"])
        found = paired_difference(changes, [0.0] * len(changes))
        said = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
        assert said in evidence.index.correction.why
        assert said in page


def test_the_losses_after_longer_training(studies):
    evidence = studies["outliers-laptop"]
    twin = evidence.at("twin", ("2400",))
    for arm in ("diff", "v2"):
        runs = evidence.at(arm, ("2400",))
        found = paired_difference(
            *([figure_of(of[seed], evidence.index.figures[0]) for seed in sorted(twin)] for of in (runs, twin))
        )
        unit = " nats/token" if arm == "diff" else ""
        words = f"{'is ' if unit else ''}{found.mean:.3f}{unit} [{found.low:.3f}, {found.high:+.3f}]"
        assert f"minus Transformer {words}" in evidence.index.changes[0].what


def test_the_tokens_a_parameter_come_before_the_first_claim(trained):
    said = "At 0.4 to 20 tokens a parameter on Python sources, and at 12 to 28 on a synthetic task"
    planned = ("start-laptop", "start-laptop-3m", "outliers-laptop", "controls-laptop", "parts-laptop")
    ratios = [run.train_tokens / run.parameters for slug in planned for run in trained[slug]]
    assert (f"{min(ratios):.1f}", f"{max(ratios):.0f}") == ("0.4", "20")
    ratios = [run.train_tokens / run.parameters for run in trained["noise-laptop"]]
    assert (f"{min(ratios):.0f}", f"{max(ratios):.0f}") == ("12", "28")
    for page in ("README.md", "docs/findings.md"):
        text = text_of(page)
        assert said in text
        assert text.index(said) < min(text.index(word) for word in ("nats", "Undecided", "lower by") if word in text)


def test_what_parts_are_worth_in_tokens(found):
    worths = next(one.worths for one in found if one.records.slug == "parts-laptop")
    words = {
        "DIFF minus Transformer": "DIFF needs {} fewer tokens than its twin for the same loss",
        "Transformer + norm minus Transformer": "the twin with its norm {}",
        "Wide heads + norm minus Transformer": "one wide map with it {}",
    }
    for contrast, said in words.items():
        worth = worths[contrast].tokens
        mean, low, high = (f"{100 * (1 - 2**one):.0f}" for one in (worth.mean, worth.high, worth.low))
        assert said.format(f"{mean} % [{low}, {high}]") in text_of("README.md")
        cell = next(cell for cell in text_of("README.md").split("|") if "worth 10 % of the tokens" in cell)
        assert f" {mean} %" in cell
    nats = f"{-worths['DIFF minus Transformer'].tokens.mean * worths['DIFF minus Transformer'].gain:.3f}"
    assert f"at 0.33M parameters, after 20 tokens for each, {nats} lower" in text_of("docs/findings.md")
    assert f"Here at 0.33M parameters by {nats}" in text_of("docs/worth.md")
    assert "Transformer with half of the tokens minus Transformer" not in worths  # the unit itself
    states = {finding.contrast.name: finding.state for one in found for finding in one.findings}
    assert states["DIFF V2 minus Transformer"] == "within"
    assert states["DIFF V2 minus DIFF V2 with added maps"] == "above"
    worth = worths["DIFF V2 minus DIFF V2 with added maps"].tokens
    mean, low, high = (f"{100 * (2**one - 1):.0f}" for one in (worth.mean, worth.low, worth.high))
    assert f"V2 needs {mean} % [{low}, {high}] more tokens subtracting than adding maps" in text_of("README.md")


def test_what_pairs_of_maps_are_worth_beside_single_ones(studies):
    of = {
        arm: figure_by_seed(studies, "parts-laptop", "nll", arm, (length,))
        for arm, length in (("diff", "full"), ("twin-norm", "full"), ("twin", "full"))
    }
    half = figure_by_seed(studies, "parts-laptop", "nll", "twin", ("half",))
    fewer = [of["diff"][seed] - of["twin-norm"][seed] for seed in range(8000, 8012)]
    gained = [half[seed] - of["twin"][seed] for seed in range(8000, 8012)]
    low, high, _ = fieller(fewer, gained)
    times = factor(*(log(2) * one for one in (fmean(fewer) / fmean(gained), low, high)))
    assert f"DIFF needs {times} of the tokens (explored)" in text_of("docs/studies/parts.md")


def test_the_rate_of_the_gate_was_chosen_by_little(studies):
    said, evidence = text_of("docs/studies/parts.md"), studies["parts-laptop"]
    (rate,) = (one for one in evidence.index.rates if one.arm == "gate")
    tried = dict(rate.tried)
    reported = fmean(figure_by_seed(studies, "parts-laptop", "nll", "gate", ("full",)).values())
    assert rate.learning_rate == 0.032
    best, other = tried[0.032], tried[0.016]
    assert f"its rate, 0.032, by {other - best:.3f} nats ({best:.3f} against {other:.3f} at 0.016)" in said
    assert f"the 12 reported seeds have {reported:.3f}" in said


LOSSES = {  # contrast: its state, digits, and what pages say of it
    "effect of the start on DIFF minus Transformer": ("above", 2, {
        "docs/findings.md": "it moves DIFF minus Transformer by {} nats a token",
        "README.md": "raises DIFF minus its twin by {} nats",
    }),
    "DIFF minus Transformer, each at its best": ("below", 3, {
        "docs/findings.md": "it makes no difference that matters: {} nats a token",
    }),
    "V2 minus Transformer, each at its best": ("below", 3, {
        "docs/findings.md": "lower than the Transformer's, at 1M parameters by {} nats a token",
        "README.md": "V2 is lower by {} on a text with 36 % tables",
    }),
    "V2 minus Transformer, each at its best, 3M": ("below", 3, {
        "docs/findings.md": "and at 3M, after 0.4 tokens a parameter, by {} ([plan]",
    }),
    "V2 minus Transformer, clean text, best rates": ("above", 3, {
        "docs/findings.md": "On clean text V2's loss at 1M is *higher*, by {} {interval}",
        "README.md": "and on clean text *higher*, by {} {interval}",
    }),
    "DIFF minus Transformer, English prose": ("above", 3, {
        "docs/findings.md": "DIFF's is *higher*, by {} {interval}, and V2's level",
        "README.md": "on English *higher*, by {} {interval}",
    }),
    "V2 minus Transformer, English prose": ("within", 3, {}),
    "DIFF minus Transformer, clean text, best rates": ("within", 3, {
        "docs/findings.md": "DIFF's is lower by {} {interval}, which excludes 0.026 and hardly the paper's 0.025",
        "README.md": "on [clean text](docs/studies/start-clean-text.md) lower by {} {interval}",
    }),
    "DIFF minus Transformer, clean text": ("below", 3, {
        "docs/findings.md": "at the old text's rates by {} {interval}",
    }),
    "DIFF minus wide heads with norm, each at its best": ("below", 3, {
        "docs/findings.md": "a second map lowers it by {} at 1M",
    }),
    "DIFF minus Transformer, each at its best, 3M": ("within", 3, {
        "docs/findings.md": "Nor does it at 3M: {}, with an interval that contains zero",
    }),
}  # fmt: skip


@pytest.mark.parametrize("contrast", LOSSES)
def test_the_losses_of_the_start(found, contrast):
    state, digits, pages = LOSSES[contrast]
    (finding,) = (f for one in found for f in one.findings if f.contrast.name == contrast)
    assert finding.state == state
    for page, words in pages.items():
        assert finding.is_small or not re.search(r"no difference that matters|does not matter", words)
        sign = 1 if finding.difference.mean > 0 else -1  # "lower by" turns the interval round
        ends = sorted(sign * end for end in (finding.difference.low, finding.difference.high))
        interval = f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"
        assert words.format(f"{abs(finding.difference.mean):.{digits}f}", interval=interval) in text_of(page), page


def test_what_the_normal_start_costs_at_3m(studies):
    rates = {
        (rate.arm, rate.point["start"]): min(mean for _, mean in rate.tried)
        for rate in studies["start-laptop-3m"].index.rates
    }
    cost = {arm: f"{rates[arm, 'normal'] - rates[arm, 'fan-in']:.2f}" for arm in ("twin", "diff", "v2")}
    said = f"it costs the Transformer {cost['twin']} nats, DIFF {cost['diff']} and V2 {cost['v2']}"
    end = f"({rates['diff', 'normal']:.3f} against {rates['twin', 'normal']:.3f})"
    assert f"{said}, so there DIFF is not behind the Transformer {end}" in text_of("docs/initialization.md")
    ahead = rates["twin", "normal"] - rates["diff", "normal"]
    assert f"DIFF is ahead by {ahead:.2f}" in text_of("docs/findings.md")
    assert f"DIFF minus Transformer is -{ahead:.3f}" in studies["start-laptop-3m"].index.correction.why


def test_the_operations_of_the_controls_at_equal_parameters():
    twin = DiffTransformerConfig(attention_type="softmax", **preset("830m").fields)
    wanted = count(twin, context_tokens=2048)
    rows = re.findall(r"\| `(\w+)` \| (\d\.\d{3}) \| [\d.]+ to", text_of("docs/variants.md"))
    assert {kind for kind, _ in rows} >= {"softmax_norm", "xsa", "gate", "diff_xsa", "diff_gate", "diff_v2_added"}
    for kind, said in rows:
        config = twin.twin(kind)
        config.intermediate_size = matching_width(config, wanted.parameters)
        found = count(config, context_tokens=2048).train_flops_per_token
        assert f"{found / wanted.train_flops_per_token:.3f}" == said


def test_the_lists_of_studies_and_their_sizes():
    table = (DOCS / "findings.md").read_text("utf-8").partition("\n## Studies\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (?:\[(?=\w+\]\(studies/))?(\w+)[] ]", table, re.MULTILINE)[1:]
    assert {*found} == {*shipped_recipes("studies")}
    rows = (
        (DOCS / "studies.md")
        .read_text("utf-8")
        .partition("| preset | for | studies |")[2]
        .partition("\n\n")[0]
        .split("\n")
    )
    sizes = re.findall(r"`([\w-]+)`", "\n".join(row.split(" | ")[0] for row in rows))
    assert set(sizes) == {size for name in found for size in load_study(name).presets}


def test_every_attention_type_stands_on_the_page_of_variants():
    assert {name for name in VARIANTS if f"`{name}`" not in text_of("docs/variants.md")} == set()


def interval(values, places):
    """A mean with Student's 95 % interval, as pages write it."""
    found = paired_difference(list(values), [0.0] * len(values))
    return [f"{abs(one):.{places}f}" for one in (found.mean, *sorted((found.low, found.high), key=abs))]


def figure_by_seed(studies, slug, name, arm, point):
    runs = studies[slug].at(arm, point)
    return {seed: next(one.value for one in run.figures if one.name == name) for seed, run in runs.items()}


def differences(studies, slug, name, arm, reference, point=(), reference_point=None):
    own = figure_by_seed(studies, slug, name, arm, point)
    other = figure_by_seed(studies, slug, name, reference, point if reference_point is None else reference_point)
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def test_losses_that_are_explored(studies):
    said = text_of("docs/studies/controls.md")
    words = {
        "diff": "DIFF's held-out loss is {} bits a byte lower than the Transformer's [{}, {}]",
        "averaged": "averaging the maps lowers it more, by {} [{}, {}]",
        "no-norm": "without norm is higher by {} [{}, {}]",
    }
    for arm, sentence in words.items():
        found = differences(studies, "controls-laptop", "bits per byte", arm, "twin")
        assert (fmean(found) > 0) == (arm == "no-norm")
        assert sentence.format(*interval(found, 3)) in said
    found = differences(studies, "start-laptop", "nll", "no-norm", "diff", ("fan-in",))
    mean, low, high = interval(found, 3)
    assert f"higher by {mean} nats a token [{low}, {high}]" in text_of("docs/studies/start.md")
    gaps = {
        start: fmean(differences(studies, "start-laptop", "nll", "diff", "twin", (f"{start}-0.002",)))
        for start in ("normal", "fan-in")
    }
    said = f"DIFF is {gaps['normal']:.2f} behind, from the fan-in start {-gaps['fan-in']:.2f} ahead"
    assert said in text_of("docs/findings.md")


def test_outliers_at_one_rate(studies):
    evidence, of = studies["outliers-laptop"], {}
    for arm in ("diff", "v2", "twin"):
        for seed, run in evidence.at(arm, ("2400",)).items():
            for row in run.figures:
                if row.task == "outliers":
                    of[arm, seed, row.name, row.at["rank"]] = row.value
    rates = {
        arm: {run.recipe["training"]["optimizer"]["learning_rate"] for run in evidence.at(arm, ("2400",)).values()}
        for arm in ("v2", "twin")
    }
    assert rates["v2"] == rates["twin"]
    seeds = sorted({seed for _, seed, *_ in of})

    def ratio(arm, name, over_median):
        def size(arm, seed):
            return np.log(of[arm, seed, name, 1]) - over_median * np.log(of[arm, seed, name, "median"])

        found = paired_difference([size(arm, seed) for seed in seeds], [size("twin", seed) for seed in seeds])
        return [f"{np.exp(one):.2f}" for one in (found.mean, found.low, found.high)]

    states, logits = (ratio("v2", name, over_median=False) for name in ("hidden states", "attention logits"))
    assert float(states[2]) < 1 > float(logits[2])
    words = (
        f"V2's largest hidden state is {states[0]} of the Transformer's and its largest attention logit {logits[0]},"
    )
    assert words in text_of("docs/findings.md")
    assert f"V2's hidden states peak at {states[0]} of the twin's" in text_of("README.md")
    correction = evidence.index.correction
    assert f"V2's largest state is {states[0]}, and its largest logit {logits[0]}, of" in correction.stands
    own = [ratio("diff", name, over_median=False)[0] for name in ("hidden states", "attention logits")]
    assert f"DIFF's, {own[0]} and {own[1]}, are open" in correction.stands
    for arm, words in (
        ("v2", "V2's states are {} [{}, {}] of the Transformer's and its logits {} [{}, {}]"),
        ("diff", "DIFF's {} [{}, {}] and {} [{}, {}]"),
    ):
        found = [one for name in ("hidden states", "attention logits") for one in ratio(arm, name, over_median=True)]
        assert words.format(*found) in correction.why


def test_what_v2s_step_costs(studies):
    """On one kind of processor, both arms at once, or in turns: each pair of runs began within a minute or two."""
    medians = []
    for slug, point in (("start-clean", ("fan-in-0.008",)), ("start-clean-tuned", ("fan-in",))):
        own, other = (studies[slug].at(arm, point) for arm in ("v2", "twin"))
        assert len({run.environment.instruction_set for runs in (own, other) for run in runs.values()}) == 1
        assert all(
            abs(own[seed].start - other[seed].start) < timedelta(minutes=3) for seed in own.keys() & other.keys()
        )
        medians.append(median(own[seed].step_seconds / other[seed].step_seconds for seed in own.keys() & other.keys()))
    in_turns = {row.model: row.train_step_seconds for row in studies["parts-laptop"].index.costs}
    medians.append(in_turns["v2"] / in_turns["twin"])
    words = f"step takes {100 * (min(medians) - 1):.0f} to {100 * (max(medians) - 1):.0f} % longer"
    for page in ("README.md", "docs/findings.md"):
        assert words in text_of(page)
    table = text_of("docs/performance-gpu.md")
    twin, v2 = (
        float(re.search(rf"\| {name} \| [\d.]+ \| ([\d.]+) \|", table)[1])
        for name in ("twin 125M, cuDNN", "DIFF V2 125M")
    )
    for page in ("README.md", "docs/findings.md"):
        assert f"on a CPU, {100 * (v2 / twin - 1):.0f} % on an H100" in text_of(page)


def test_clean_text_at_rates_chosen_on_it(studies):
    said, index = text_of("docs/studies/start-clean-text.md"), studies["start-clean-tuned"].index
    tried = {one.arm: dict(one.tried) for one in index.rates}
    chosen = {one.arm: one.learning_rate for one in index.rates}
    assert (chosen["v2"], chosen["twin"]) == (0.008, 0.004)
    over = fmean(figure_by_seed(studies, "start-clean-tuned", "nll", "v2", ("fan-in",)).values())
    assert f"on which its loss was {tried['v2'][0.008]:.3f}; over the 12 reported seeds it is {over:.3f}" in said
    assert f"({tried['v2'][0.004]:.3f} and {tried['twin'][0.004]:.3f})" in said
    runs = {arm: studies["start-clean"].at(arm, ("fan-in-0.008",)) for arm in ("v2", "twin")}
    norms = {arm: {seed: max(run.curves["gradient_norm"].values) for seed, run in runs[arm].items()} for arm in runs}
    v2, twin = norms["v2"].values(), norms["twin"].values()
    assert f"V2's largest gradient norms were {min(v2):.0f} to {max(v2):.0f} (median {median(v2):.0f})" in said
    assert f"the Transformer's {min(twin):.0f} to {max(twin):.0f}" in said
    seeds = sorted(runs["v2"])
    found = differences(studies, "start-clean", "nll", "v2", "twin", ("fan-in-0.008",))
    correlation = spearmanr([norms["v2"][seed] for seed in seeds], found).statistic
    assert f"(rank correlation {correlation:.2f})" in said
    here = differences(studies, "start-clean-tuned", "nll", "diff", "twin", ("fan-in",))
    before = differences(studies, "start-clean", "nll", "diff", "twin", ("fan-in-0.004",), ("fan-in-0.008",))
    gap = ttest_ind(here, before, equal_var=False).confidence_interval()
    assert f"differ by {fmean(here) - fmean(before):.3f} [{gap.low:.3f}, {gap.high:.3f}] (Welch)" in said
    assert f"losses are {tried['twin'][0.004]:.3f} at 0.004 and {tried['twin'][0.008]:.3f} at 0.008" in said


def test_the_losses_of_diff_at_two_rates_on_english_prose(studies):
    (tried,) = (dict(one.tried) for one in studies["start-english"].index.rates if one.arm == "diff")
    said = f"DIFF's losses at 0.004 and 0.008 are nearly equal, {tried[0.004]:.3f} and {tried[0.008]:.3f}"
    assert said in text_of("docs/studies/start-clean-text.md")


def test_the_loss_at_the_end_of_a_high_first_loss(studies):
    said, study = text_of("docs/studies/start-clean-text.md"), studies["start-small-logits"]
    ends = {}
    for start in ("fan-in", "fan-in-small"):
        curves = [run.curves["train_loss_nats"] for arm in ("diff", "twin") for run in study.at(arm, (start,)).values()]
        assert len(curves) == 24
        at = [curve.values[curve.steps.index(24)] for curve in curves]
        ends[start] = f"{min(at):.2f} to {max(at):.2f}"
    assert f"the training loss is {ends['fan-in']}, and {ends['fan-in-small']} from small first logits" in said

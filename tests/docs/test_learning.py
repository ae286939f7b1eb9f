"""What pages say of how soon models learn to recall and to look up is what the records say."""

import re
from math import exp, inf, log
from statistics import fmean, median

import pytest
import torch

from difftransformer import DiffTransformerForCausalLM
from difftransformer_lab.results import figure_of
from difftransformer_lab.statistics import paired_difference, sign_flip
from difftransformer_lab.studies.design import Design, load_study
from tests.recompute import fieller
from tests.support.pages import factor, sooner, text_of

RECALL = {  # a contrast and its state: how its page writes the effect, and in which words
    ("Transformer + norm minus Transformer, 0.6 noise", "below"): (
        sooner,
        "recall comes {} times as soon, in 20 of 20",
    ),
    ("wide heads + norm minus wide heads, 0.6 noise", "below"): (sooner, "On wide heads it comes {} times as soon"),
    ("Transformer + norm minus Transformer, 0 noise", "below"): (
        sooner,
        "On the Transformer's own heads it comes {} times as soon",
    ),
    ("DIFF minus Transformer + norm, 0.6 noise", "not tested"): (
        factor,
        "DIFF takes {} of the steps, which is not tested",
    ),
    ("subtraction, without noise", "open"): (factor, "with a second map recall takes {} of the steps"),
    ("DIFF V2 minus Transformer, 0.6 noise", "within"): (factor, "Among noise V2 takes {} of the Transformer's steps"),
    ("DIFF V2 minus Transformer, 0 noise", "open"): (
        factor,
        "Without noise V2 minus the Transformer is *open*, {} of the steps",
    ),
    ("DIFF V2 + norm minus Transformer + norm, 0.6 noise", "below"): (
        factor,
        "takes {} of the steps of the Transformer with the norm",
    ),
    ("DIFF V2 + norm minus DIFF V2, 0.6 noise", "below"): (sooner, "With the norm V2 recalls {} times as soon"),
    ("DIFF V2 + norm minus DIFF V2, 0 noise", "not tested"): (sooner, "with the norm, V2 recalls {} times as soon"),
    ("XSA minus Transformer, 0.6 noise", "below"): (
        sooner,
        "Among noise it comes {} times as soon as in the Transformer",
    ),
    ("XSA minus Transformer, 0 noise", "not tested"): (sooner, "and without noise {} times, which is not tested"),
    ("The gate minus Transformer, 0.6 noise", "within"): (
        factor,
        "Among noise it takes {} times the steps of the Transformer",
    ),
    ("The gate minus Transformer, 0 noise", "not tested"): (factor, "without noise it takes {} times as many"),
}
SEEDS = range(4000, 4020)
SIZE = {  # a study's size and contrast: its state, how pages write the effect, and where it stands in which words
    ("transformer", "Transformer x 5 minus Transformer"): ("below", sooner, {
        "docs/studies/size.md": "it lets the Transformer recall {} times as soon",
        "docs/findings.md": "with heads multiplied by 5 the Transformer recalls {} times as soon",
        "README.md": "attention's [output x 5](docs/studies/size.md) {}",
    }),
    ("transformer", "Transformer + norm minus Transformer x 5"): ("below", factor, {
        "docs/studies/size.md": "With the norm in place of the factor they take {} and",
    }),
    ("transformer", "DIFF minus Transformer x 5"): ("below", factor, {
        "docs/studies/size.md": "DIFF takes {} of the steps of the Transformer with larger heads",
    }),
    ("laptop", "heads x 5 minus DIFF without norm"): ("below", sooner, {
        "docs/studies/size.md": "and DIFF without norm {} times",
    }),
    ("laptop", "DIFF minus heads x 5"): ("below", factor, {"docs/studies/size.md": "and {} of the steps that remain"}),
    ("laptop", "DIFF minus wide heads + norm"): ("above", factor, {
        "docs/studies/size.md": "DIFF takes {} times the steps of wide heads with the norm",
        "docs/studies/recall.md": "beside the norm DIFF takes {} times the steps of wide heads",
        "docs/findings.md": "with it DIFF takes {} times the steps of wide heads",
        "README.md": "With the norm DIFF takes {} times the steps of one wide map",
    }),
    ("laptop", "interaction of norm and second map"): ("above", factor, {
        "docs/studies/size.md": "the norm changes what the second map does, by a factor of {}",
    }),
    ("laptop", "second map, averaged over the norm"): ("within", factor, {
        "docs/studies/size.md": "Averaged over both, recall with a second map takes {} of the steps",
    }),
}  # fmt: skip


def study_of(found, slug):
    """The study, and its findings by name."""
    (study,) = (one for one in found if one.records.slug == slug)
    return study, {one.contrast.name: one for one in study.findings}


def bounds(one):
    return one.effect, one.low, one.high


def first_steps(records, arm, *point):
    """The first step at which each run of an arm has 90 % right answers when they are counted; inf if there is none."""
    curves = [run.curves["validation_accuracy"] for run in records.at(arm, point).values()]
    return [min((s for s, v in zip(one.steps, one.values, strict=True) if v >= 0.9), default=inf) for one in curves]


def never(records, arm, *point):
    return first_steps(records, arm, *point).count(inf)


def explored(study, figure, arms, point, seeds):
    """The effect of one arm minus the other on the logarithm of a figure, by the test of the plans."""
    own, other = (study.records.numbers(figure, arm, point) for arm in arms)
    found = sign_flip([log(own[seed].value / other[seed].value) for seed in seeds])
    return found.mean, found.low, found.high


def test_recall_in_the_study_of_noise(studies):
    evidence, page = studies["noise-laptop"], text_of("docs/studies/noise.md")
    words = re.search(
        r"Half of DIFF's runs give 90 % right answers within (\d+) of the 1,200 steps, and within (\d+) with noise, "
        r"where (\d+) of the Transformer's 20 never do",
        page,
    )
    found = (*(median(first_steps(evidence, "diff", share)) for share in ("0", "0.6")), never(evidence, "twin", "0.6"))
    assert found == tuple(map(int, words.groups()))
    diff, v2, wide, twin = (20 - never(evidence, arm, "0.6") for arm in ("diff", "v2", "wide", "twin"))
    assert diff == 20
    said = (
        f"all 20 DIFF runs reach 90 % right answers in 1,200 steps, {v2} of V2's, {wide} of wide heads' and {twin} of"
    )
    assert said in page


@pytest.mark.parametrize(("contrast", "state"), RECALL)
def test_recall(found, contrast, state):
    _, of = study_of(found, "recall-laptop")
    write, words = RECALL[contrast, state]
    assert of[contrast].state == state
    assert words.format(write(*bounds(of[contrast]))) in text_of("docs/studies/recall.md")


def test_how_many_runs_recall_among_noise(studies):
    evidence, page = studies["recall-laptop"], text_of("docs/studies/recall.md")
    there = {one.name: 20 - never(evidence, one.name, "0.6") for one in evidence.index.arms}
    diff, norm, bare, wide = (there[arm] for arm in ("diff", "wide-norm", "no-norm", "wide"))
    said = f"In 1,200 steps {diff} of 20 runs of DIFF get there, {norm} of wide heads with the norm, {bare} of DIFF"
    assert f"{said} without norm and {wide} of wide heads, half of the first two within 175 steps" in page
    assert (
        f"{norm} of 20 runs of wide heads and {diff} of DIFF in 1,200 steps; without it {wide} and {bare}"
        in text_of("docs/findings.md")
    )
    assert max(median(first_steps(evidence, arm, "0.6")) for arm in ("diff", "wide-norm")) == 175
    assert (
        f"{40 - bare - wide} of 40 runs without the norm count with 1,200 and {40 - diff - norm} of 40 with it" in page
    )
    assert (there["twin-norm"], there["v2-norm"]) == (20, 20)
    assert f"where the Transformer gets there in {there['twin']}" in page
    v2, twin, gate = (20 - there[arm] for arm in ("v2", "twin", "gate"))
    assert f"{v2} of its 20 runs count with 1,200, and {twin} of the Transformer's" in page
    assert f"because {gate} of its 20 runs count with 1,200, as {twin} of the Transformer's do" in page
    assert f"in {there['xsa']} of 20 runs, and without noise" in page


def test_how_many_runs_recall_without_noise(studies):
    evidence, page = studies["recall-laptop"], text_of("docs/studies/recall.md")
    without, with_norm = (
        sum(never(evidence, arm, "0") for arm in arms) for arms in (("no-norm", "wide"), ("diff", "wide-norm"))
    )
    assert f"Here {without} of 40 runs without the norm count with 1,200, and {with_norm} of 40 with it" in page
    assert [median(first_steps(evidence, arm, "0")) for arm in ("diff", "wide-norm")] == [75, 75]
    assert "for half of the runs with the norm within 75 steps" in page


def test_what_every_page_says_of_recall(found):
    _, of = study_of(found, "recall-laptop")
    noise, clean = (f"{sooner(*bounds(of[f'norm, {where}']))} times" for where in ("at 0.6 noise", "without noise"))
    second = of["subtraction, at 0.6 noise"]
    for page in map(text_of, ("README.md", "docs/findings.md", "docs/studies/recall.md")):
        assert f"{noise} as soon" in page
    assert f"recall takes {factor(*bounds(second))} of the steps. To be called equal" in text_of(
        "docs/studies/recall.md"
    )
    assert all(clean in text_of(page) for page in ("docs/findings.md", "docs/studies/recall.md"))
    assert f"beyond that by {exp(-0.223) - exp(second.low):.3f}" in text_of("docs/studies/recall.md")


def test_what_the_maps_of_v2_do_to_recall_beside_the_norm(found):
    study, of = study_of(found, "recall-laptop")
    beside = of["DIFF V2 + norm minus Transformer + norm, 0.6 noise"]
    times = factor(*bounds(beside))
    assert f"V2 {times} of the twin's" in text_of("README.md")
    assert f"V2 + norm takes {times} of the Transformer + norm's" in text_of("docs/findings.md")
    times = factor(*explored(study, beside.figure, ("v2-norm", "wide-norm"), ("0.6",), range(3000, 3020)))
    assert f"against wide heads with the norm it takes {times} (explored)" in text_of("docs/studies/recall.md")


def test_no_run_that_chose_the_rate_of_the_gate_recalls_among_noise(studies):
    (rate,) = (
        one for one in studies["recall-laptop"].index.rates if one.arm == "gate" and one.point == {"noise": "0.6"}
    )
    assert {steps for _, steps in rate.tried} == {1200}
    assert "None of the runs that choose its rate got there among noise" in text_of("docs/studies/recall.md")


def test_which_runs_of_lookup_look_up(studies):
    evidence, seeds = studies["lookup-laptop"], range(6000, 6016)
    page = text_of("docs/studies/lookup.md")
    ends, late, below = {}, [], []
    for arm in ("diff", "v2", "twin", "wide-norm", "no-norm", "twin-norm"):
        runs = [evidence.ended(arm, ())[seed] for seed in seeds]
        among4 = [
            figure.value
            for run in runs
            for figure in run.figures
            if (figure.task, figure.name, figure.at.get("needles")) == ("needle", "lookup", 4)
        ]
        below.extend(one for one in among4 if one <= 0.5)
        ends[arm] = sorted(one for one in among4 if one > 0.5)
        late.append(never(evidence, arm))
    counts = [len(found) for found in ends.values()]
    assert counts == [12, 14, 15, 15, 15, 15]
    assert late == [4, 2, 1, 1, 1, 3]
    others = [one for arm, found in ends.items() if arm not in ("diff", "v2") for one in found]
    ranges = [f"{min(found):.2f} to {max(found):.2f}" for found in (ends["diff"], ends["v2"], others)]
    words = f"by {ranges[0]}, {ranges[1]} and {ranges[2]}"
    assert f"12 of DIFF, 14 of V2 and 15 of each other arm look up, {words}" in page
    *nine, in_part = sorted(below)
    assert len(nine) == 9
    assert all(abs(one) < 0.1 for one in nine)
    assert f"One of the Transformer with the norm does in part, by {in_part:.2f}, and the other nine" in page
    assert "four of DIFF, three of the Transformer with the norm, two of V2 and one of each other arm" in page
    assert "12 of 16 DIFF, 14 V2 and 15 twin runs find" in text_of("README.md")
    assert text_of("docs/findings.md").count("12 of 16 DIFF, 14 V2 and 15 Transformer runs look up") == 2
    figure = next(one for one in evidence.index.figures if one.label == "largest hidden state")
    peaks = [fmean(one.value for one in evidence.numbers(figure, arm, ()).values()) for arm in ("diff", "v2", "twin")]
    diff, v2 = (peak / peaks[-1] for peak in peaks[:-1])
    assert f"the largest hidden state of DIFF is {diff:.2f} of the Transformer's and V2's {v2:.2f}" in page


def test_lookup_does_not_need_more_than_4_bits_of_logits(found):
    study, _ = study_of(found, "lookup-laptop")
    means = {(row.figure.label, row.arm.name): row.statistic.mean for row in study.rows}
    arms = {arm for _, arm in means}
    exact, rounded = "lookup among 4 numbers", "lookup among 4 numbers, logits of 4 bits"
    most = max(abs(means[rounded, arm] - means[exact, arm]) for arm in arms)
    assert len(arms) == 6
    page = text_of("docs/studies/lookup.md")
    assert f"With attention logits of 4 bits each arm looks up as before, to {most:.2f}" in page


def test_what_models_of_lookup_answer_for_an_absent_city(found):
    study, _ = study_of(found, "lookup-laptop")
    shares = {
        row.arm.name: row.statistic.mean
        for row in study.rows
        if row.figure.label == "names a number of the context for an absent city"
    }
    low, *_, high = sorted(shares, key=shares.__getitem__)
    assert (low, high) == ("no-norm", "twin-norm")
    said = f"from {shares[low]:.2f} (DIFF without norm) to {shares[high]:.2f} (the Transformer with the norm)"
    assert f"{said} one of the context" in text_of("docs/studies/lookup.md")


def test_what_the_second_map_does_to_lookup(found):
    study, of = study_of(found, "lookup-laptop")
    steps, share = (of[f"DIFF minus wide heads + norm, {what}"] for what in ("steps", "lookup among 4"))
    without = of["DIFF minus DIFF without norm, steps"]
    for times in (factor(*bounds(one)) for one in (steps, without)):
        for page in ("docs/findings.md", "docs/studies/lookup.md"):
            assert f"{times} times as many" in text_of(page)
        assert times in text_of("README.md")
    for page in ("docs/findings.md", "docs/studies/lookup.md"):
        assert f"by {-share.effect:.2f}" in text_of(page)
    far = [one for one in share.values.values() if one < -0.5]
    said = text_of("docs/studies/lookup.md")
    assert len(far) == 3
    assert f"makes {-sum(far) / 16:.2f} of the {-share.effect:.2f}" in said
    assert f"more of them on {steps.same_direction} of 16 seeds" in said
    arms = (first_steps(study.records, arm) for arm in ("diff", "no-norm"))
    there = [seed for seed, *steps in zip(range(6000, 6016), *arms, strict=True) if max(steps) < inf]
    both = paired_difference([without.values[seed] for seed in there], [0.0] * len(there))
    times = factor(both.mean, both.low, both.high)
    assert (
        f"On the {len(there)} seeds on which both get there DIFF takes {times} times the steps of DIFF without norm"
        in said
    )
    for arm, other, words in (
        ("no-norm", "twin", "it takes {} times as many steps"),
        ("diff", "twin-norm", "DIFF takes {} of its steps (explored)"),
    ):
        times = factor(*explored(study, without.figure, (arm, other), (), range(6000, 6016)))
        assert words.format(times) in said
    norm = of["Transformer + norm minus Transformer, steps"]
    assert norm.state == "not tested"
    assert f"takes {factor(*bounds(norm))} times as many steps, on {norm.same_direction} of 16 seeds" in said
    v2 = of["DIFF V2 minus Transformer, steps"]
    assert v2.state == "not tested"
    assert f"V2 takes {factor(*bounds(v2))} times as many steps, which is not tested" in said


def test_mqar_is_learned_or_not(studies):
    evidence = studies["synthetic-laptop"]
    figure, ends = evidence.index.figures[0], {}
    for arm in ("diff", "twin"):
        ends[arm] = sorted(
            figure_of(run, figure) for width in ("64", "32") for run in evidence.at(arm, (width,)).values()
        )
    assert f"{fmean(ends['diff']):.2f}" == "1.00"
    low = [one for one in ends["twin"] if one < 0.5]
    said, high = text_of("docs/studies/synthetic.md"), len(ends["twin"]) - len(low)
    assert f"all {len(ends['diff'])} of DIFF's runs end at 1.00, and of the Transformer's {high}, the others" in said
    assert f"the others at {low[0]:.2f} to {low[-1]:.2f}" in said


@pytest.mark.parametrize(("size", "contrast"), SIZE)
def test_recall_with_larger_heads(found, size, contrast):
    _, of = study_of(found, f"size-{size}")
    state, write, said = SIZE[size, contrast]
    assert of[contrast].state == state
    for page, words in said.items():
        assert words.format(write(*bounds(of[contrast]))) in text_of(page)


def test_the_share_of_the_size_in_what_the_norm_does(found):
    shares = []
    for slug, larger, rest in (
        ("size-transformer", "Transformer x 5 minus Transformer", "Transformer + norm minus Transformer x 5"),
        ("size-laptop", "heads x 5 minus DIFF without norm", "DIFF minus heads x 5"),
    ):
        _, of = study_of(found, slug)
        size = [of[larger].values[seed] for seed in SEEDS]
        whole = [one + of[rest].values[seed] for one, seed in zip(size, SEEDS, strict=True)]
        low, high, _ = fieller(size, whole)
        shares.append(f"{fmean(size) / fmean(whole):.2f} [{low:.2f}, {high:.2f}]")
    said = f"does {shares[0]} of what the norm does in the Transformer and {shares[1]} in DIFF"
    assert said in text_of("docs/studies/size.md")


def test_how_many_runs_recall_with_larger_heads(found):
    page, there = text_of("docs/studies/size.md"), {}
    for size, arms in (("transformer", ("twin", "twin-scaled", "twin-norm")), ("laptop", ("no-norm", "scaled"))):
        study, of = study_of(found, f"size-{size}")
        for arm in arms:
            steps = study.records.numbers(study.records.index.figures[0], arm, ())
            there[arm] = sum(steps[seed].value < 1200 for seed in SEEDS)
    assert (there["twin-norm"], there["scaled"]) == (20, 20)
    assert (
        f"{there['twin-scaled']} of 20 Transformers get there in 1,200 steps, and {there['twin']} as they are" in page
    )
    assert f"and {20 - there['twin-scaled']} of 20 Transformers at the chosen one" in page
    assert f"in all 20 runs with larger heads, and in {there['no-norm']} of 20 without" in page
    assert f"on {of['DIFF minus heads x 5'].same_direction} of 20 seeds" in page


def test_what_the_second_map_does_with_and_without_the_norm(found):
    study, of = study_of(found, "size-laptop")
    page, figure, seeds = text_of("docs/studies/size.md"), study.records.index.figures[0], range(4000, 4060)
    without = factor(*explored(study, figure, ("no-norm", "wide"), (), seeds))
    steps = {
        arm: [study.records.numbers(figure, arm, ())[seed].value for seed in seeds]
        for arm in ("diff", "wide-norm", "no-norm", "wide")
    }
    there = {arm: sum(one < 1200 for one in steps[arm]) for arm in steps}
    said = f"two maps take {without} of the steps of one wide one (explored), and get there in {there['no-norm']} of 60 runs"
    assert f"{said} where that does in {there['wide']}" in page
    assert f"{60 - there['wide']} of 60 runs of wide heads and {60 - there['no-norm']} of DIFF count with 1,200" in page
    beside = of["DIFF minus wide heads + norm"]
    assert beside.same_direction + sum(one < 0 for one in beside.values.values()) == len(seeds)
    said = f"sooner on {len(seeds) - beside.same_direction} of the 60 seeds, and the median run of both takes"
    assert f"{said} {median(steps['diff']):.0f} steps" in page
    assert f"{median(steps['wide-norm']):.0f}" == f"{median(steps['diff']):.0f}"
    assert f"The ten slowest of DIFF take {sorted(steps['diff'])[-10]:.0f} steps or more" in page
    assert (there["diff"], there["wide-norm"]) == (59, 60)
    assert f"the slowest of wide heads {max(steps['wide-norm']):.0f}" in page


def test_the_rates_of_larger_heads(studies):
    page = text_of("docs/studies/size.md")
    rates = {one.arm: one for size in ("laptop", "transformer") for one in studies[f"size-{size}"].index.rates}
    best = {arm: f"{one.learning_rate:g}" for arm, one in rates.items()}
    said = f"DIFF's best one is {best['diff']}, and {best['scaled']} with larger heads in place of the norm; the Transformer's"
    assert f"{said} are {best['twin-norm']} and {best['twin-scaled']}" in page
    for size, arm in (("laptop", "scaled"), ("transformer", "twin-scaled")):
        curves = [
            run.curves["validation_accuracy"].values
            for member, run in studies[f"size-{size}"].tuning
            if member.arm == arm
            and run.recipe["training"]["optimizer"]["learning_rate"] == 2 * rates[arm].learning_rate
        ]
        assert (len(curves), sum(max(values) < 0.9 for values in curves)) == (3, 2)
    assert "two of three runs at twice the chosen rate do not get there" in page
    tried = dict(rates["diff"].tried)
    assert (rates["diff"].learning_rate, tried[0.01], rates["wide-norm"].learning_rate) == (0.005, 1200, 0.0025)
    assert 0.5 < tried[0.0025] - tried[0.005] < 1.5
    said = "Its best rate, 0.005, beat 0.0025 by one step on the three seeds that choose, and at 0.01 none of them gets there."
    assert f"{said} Wide heads with the norm have 0.0025." in page


def test_what_size_and_norm_do_at_one_rate(studies):
    tried = {
        one.arm: dict(one.tried)[0.00125]
        for size in ("laptop", "transformer")
        for one in studies[f"size-{size}"].index.rates
    }
    steps = {arm: f"{mean:,.0f}" for arm, mean in tried.items()}
    said = f"takes {steps['twin-norm']} steps with the norm, {steps['twin-scaled']} with larger heads and {steps['twin']} with"
    page = text_of("docs/studies/size.md")
    assert f"{said} neither, and DIFF {steps['diff']}, {steps['scaled']} and {steps['no-norm']}" in page


def start_sizes(preset, arm, study="size", vocab_size=34, length=62):
    """Root mean squares of the heads' output of each layer in new models of three seeds, on tokens at random."""
    run = next(one for one in Design(load_study(study), preset).reported() if one.arm == arm)
    sizes = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = DiffTransformerForCausalLM(run.recipe.model_config(vocab_size=vocab_size))
        found = []
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, inputs, found=found: found.append(inputs[0].square().mean().sqrt().item())
            )
        with torch.no_grad():
            model(input_ids=torch.randint(0, vocab_size, (64, length)))
        sizes.append(found)
    return list(zip(*sizes, strict=True))


def test_the_size_of_the_heads_at_the_start():
    diff, bare, scaled = (start_sizes("laptop", arm) for arm in ("diff", "no-norm", "scaled"))
    said = load_study("size").about
    assert f"about {fmean(sum(bare, ())):.2f} (root mean square)" in said
    assert f"DIFF's is {fmean(diff[0]):.2f} in the first layer and {fmean(diff[1]):.2f} in the second" in said
    assert f"as large on average: {min(min(scaled)):.1f} to {max(max(scaled)):.1f} in both" in said
    twin, normed, large = (start_sizes("transformer", arm) for arm in ("twin", "twin-norm", "twin-scaled"))
    first, second = (f"{min(layer):.1f} to {max(layer):.1f}" for layer in large)
    sizes = f"about {fmean(sum(twin, ())):.1f} at the start, {fmean(sum(normed, ())):.0f} with the norm"
    words = f"heads are {sizes}, and, multiplied by 5, {first} in the first layer and {second} in the second"
    assert words in load_study("size").presets["transformer"].about
    assert words in text_of("docs/studies/size.md")


def test_the_size_of_the_heads_at_the_start_of_parts():
    of = {"study": "parts", "vocab_size": 2048, "length": 64}
    twin, normed = (fmean(sum(start_sizes("size", arm, **of), ())) for arm in ("twin", "twin-norm"))
    first, *_, last = (f"{fmean(layer):.1f}" for layer in start_sizes("size", "twin-scaled", **of))
    sizes = f"about {twin:.1f} (root mean square) in rows of 64 tokens at the start, {normed:.0f} with the norm"
    words = f"heads are {sizes}, and, multiplied by 5, from {first} in the first layer to {last} in the fourth"
    assert words in load_study("parts").presets["size"].about
    assert f"at the start {first} in the first layer and {last} in the fourth" in text_of("docs/studies/parts.md")


def test_larger_heads_choose_their_rate_in_parts(studies):
    chosen = next(one for one in studies["parts-size"].index.rates if one.arm == "twin-scaled")
    tried = dict(chosen.tried)
    assert chosen.learning_rate == 0.016
    assert f"chosen by {tried[0.032] - tried[0.016]:.3f} nats" in text_of("docs/studies/parts.md")

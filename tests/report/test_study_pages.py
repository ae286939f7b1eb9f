"""Pages of studies: whole, offline, the same numbers everywhere, one colour for each arm, and states that are computed."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml

from difftransformer_lab.cli import report as command
from difftransformer_lab.plots.style import COLOURS, MORE_COLOURS, REFERENCE_COLOUR, arm_styles
from difftransformer_lab.report import Studied, judge, read_claims, read_studies, studied, write_evidence
from difftransformer_lab.report.answers import shared_words
from difftransformer_lab.report.claims import Claim, ClaimTest, Explored, Named
from difftransformer_lab.report.lead import lead, what_would_decide
from difftransformer_lab.report.page import Page as ReportPage
from difftransformer_lab.report.page import all_tables, write_page
from difftransformer_lab.report.studied import with_shared
from difftransformer_lab.report.study_page import brief_answer, claims_table, found_words, studies_page, study_page
from difftransformer_lab.report.tables import Group, Table
from difftransformer_lab.results import (
    Change,
    ChosenRate,
    Contrast,
    Correction,
    Question,
    RunFigure,
    StudyArm,
    StudyAxis,
    StudyFigure,
    Term,
    write_result,
)
from tests.report.test_page import Page, check_page
from tests.support.simulated_study import LOSS, falling, planned, record, save, study

RECIPES = Path(__file__).parents[2] / "recipes" / "studies"
CONTROLS = ["diff", "wide", "norm", "no-norm", "zero", "init", "one", "added", "mean", "normal", "other", "twin"]
SEEN = StudyFigure(
    label="retrieval, seen cities", task="needle", name="accuracy", at={"cities": "seen"}, better="higher",
    unit="share", paper={"diff": 0.85, "twin": 0.55}, source="Table 2",
)  # fmt: skip
STEPS = StudyFigure(label="steps to 50 %", curve="validation_accuracy", reaches=0.5, unit="steps")


def controls(seen, noise=0.02, seeds=5):
    """A study of controls: the share of right answers of each arm, and a loss that is the same for all."""
    rng = np.random.default_rng(0)

    def make(arm, point, seed):
        loss = 1.5 + rng.normal(0, 0.01)
        values = {SEEN.label: float(np.clip(seen[arm] + rng.normal(0, noise), 0, 1)), LOSS.label: loss}
        curves = {
            "validation_accuracy": falling(0, values[SEEN.label], 3000, rng),
            "train_loss_nats": falling(6, loss - 0.1, 3000, rng, 0.02),
            "validation_loss_nats": falling(6, loss, 3000, rng, 0.002),
        }
        by_position = {"task": "perplexity", "name": "nll by position", "unit": "nats/token", "better": "lower"}
        more = [
            RunFigure(**by_position, at={"start": start, "end": start + 16}, value=loss + 1 / (start + 1), n=1)
            for start in range(0, 64, 16)
        ]
        seconds = 110.0 if arm == "diff" else 100.0
        return record([SEEN, LOSS], values, arm=arm, seed=seed, curves=curves, more=more, seconds=seconds)

    arms = [StudyArm(name=arm, label=arm.upper(), about=f"About {arm}.") for arm in CONTROLS if arm in seen]
    return study(arms, [SEEN, LOSS, STEPS], seeds, make, name="controls", question="Is it the subtraction?", planned=99)


class Built(NamedTuple):
    studies: list[Studied]
    pages: dict[str, ReportPage]
    folder: Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of a study with many arms, of one with two axes, and of one of scaling."""
    records, folder = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("pages")
    rng = np.random.default_rng(1)
    save(controls({arm: 0.9 if arm in ("diff", "no-norm", "init") else 0.1 for arm in CONTROLS}), records)
    axes = [
        StudyAxis(name="size", values=["0.3M", "1M", "8M"], numbers=[3e5, 1e6, 8e6]),
        StudyAxis(name="tokens", values=["5M", "20M", "80M"], numbers=[5e6, 2e7, 8e7]),
    ]

    def make(arm, point, seed):
        size, tokens = (axis.numbers[axis.values.index(value)] for axis, value in zip(axes, point, strict=True))
        n = size * (2 if arm == "diff" else 1)
        loss = 1.5 + 12 * n**-0.25 + 40 * (tokens / 1e3) ** -0.3 + rng.normal(0, 0.002)
        return record([LOSS], {LOSS.label: loss}, arm=arm, seed=seed, parameters=int(size), tokens=int(tokens))

    tried = {1e-3: [(1e-3, 1.5), (2e-3, 1.6), (3e-3, 1.7)], 2e-3: [(1e-3, 1.6), (2e-3, 1.5), (3e-3, 1.7)]}
    rates = [
        ChosenRate(arm="diff", point={"size": size, "tokens": "5M"}, learning_rate=rate, tried=tried[rate])
        for size, rate in {"0.3M": 2e-3, "8M": 1e-3}.items()
    ]
    parts = {"axes": axes, "analysis": "scaling", "name": "scaling", "rates": rates}
    save(study(["diff", "softmax"], [LOSS], 3, make, **parts), records)
    studies = read_studies(records)
    built = {one.evidence.slug: study_page(one) for one in studies}
    for slug, page in built.items():
        write_page(page, folder / slug)
    write_page(studies_page(studies), folder)
    return Built(studies, built, folder)


def test_rates_at_the_edge_of_those_tried_are_said(pages):
    text = (pages.folder / "scaling-laptop" / "index.html").read_text()
    assert "1 of 2 chosen learning rates are at the edge of those tried" in text
    assert "diff at size 8M (0.001)" in text


def test_pages_stand_alone_and_show_every_table(pages):
    assert pages.pages.keys() == {"controls-laptop", "scaling-laptop"}
    for slug, built in pages.pages.items():
        assert len(all_tables(built)) >= 6
        check_page(pages.folder / slug / "index.html", all_tables(built))


def test_the_index_links_every_study(pages):
    page = Page((pages.folder / "index.html").read_text())
    assert {"controls-laptop/index.html", "scaling-laptop/index.html"} <= set(page.links)
    assert not [link for link in page.links if not (link.startswith("#") or (pages.folder / link).is_file())]


def test_numbers_of_the_page_are_those_of_the_records(pages):
    evidence = pages.studies[0].evidence
    values = {arm: [run.figures[0].value for run in evidence.at(arm, ()).values()] for arm in ("diff", "twin")}
    page = Page((pages.folder / "controls-laptop" / "index.html").read_text())
    difference = np.subtract(values["diff"], values["twin"]).mean()
    assert f"{np.mean(values['diff']):.3f} against {np.mean(values['twin']):.3f}" in page.words
    assert f"{difference:+.3f} [" in page.words
    assert "DIFF is better than TWIN on retrieval, seen cities (" in page.words
    assert "60 of 99 planned runs" in page.words
    assert "39 of 99 planned runs are missing" in page.words
    assert "Holm" not in page.words
    assert "0.85 (+0.30)" in page.cells
    assert page.cells.count("1.10") == 2  # DIFF's time over its twin's, a step and a run
    assert "5 of 5" in page.cells


def test_the_command_writes_the_same_pages_each_time(tmp_path, capsys):
    evidence = controls({"diff": 0.9, "twin": 0.1}, seeds=2)
    path, folder, alone = save(evidence, tmp_path / "records"), tmp_path / "pages", tmp_path / "alone"
    other = dataclasses.replace(evidence, index=dataclasses.replace(evidence.index, name="other"))
    save(other, tmp_path / "records")
    assert command.run(str(tmp_path / "records"), out=str(folder)) == 0
    assert command.run(str(path), out=str(alone)) == 0
    index = write_page(studies_page(read_studies(tmp_path / "records")), tmp_path / "again").read_text()
    assert (folder / "index.html").read_text() == index
    assert "Claims of the paper" in index
    files = [file for file in alone.rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        assert (folder / "controls-laptop" / file.relative_to(alone)).read_bytes() == file.read_bytes()
    assert (alone / "tables" / "figures.csv").is_file()
    assert command.run(str(path.parent), out=str(tmp_path / "one")) == 0  # a folder of one study shows that study
    assert "Is it the subtraction?" in (tmp_path / "one" / "index.html").read_text()
    assert capsys.readouterr().out.count("Report: ") == 3


def test_the_command_names_the_folder_of_the_records(tmp_path, monkeypatch):
    parts = {"name": "mine", "command": "difftransformer study mine.yaml --preset laptop"}
    made = study(
        ["diff", "twin"], [LOSS], 1, lambda arm, point, seed: record([LOSS], {LOSS.label: 1.0}, arm=arm), **parts
    )
    path = save(made, tmp_path / "my results")
    monkeypatch.chdir(path.parent)
    for given in (path, Path("laptop.json"), Path()):
        words = shlex.split(what_would_decide(read_studies(given)[0])[1])
        assert Path(words[words.index("--results") + 1]).resolve() == tmp_path / "my results"


def test_a_page_of_a_folder_that_lacks_a_figure_says_so(tmp_path, capsys):
    """Two settings are too few for a law."""
    axes = [StudyAxis(name=name, values=["1", "2"], numbers=[1e6, 2e6]) for name in ("size", "tokens")]
    for name in ("one", "two"):
        parts = {"axes": axes, "analysis": "scaling", "name": name}
        save(
            study(
                ["diff", "twin"],
                [LOSS],
                2,
                lambda arm, point, seed: record([LOSS], {LOSS.label: 1.0}, arm=arm),
                **parts,
            ),
            tmp_path,
        )
    assert command.run(str(tmp_path), out=str(tmp_path / "pages")) != 0
    assert "two-laptop: scaling: diff over tokens: 2 settings have paired runs" in " ".join(
        capsys.readouterr().err.split()
    )


def test_no_measure_takes_the_name_of_another_table():
    """Measures are called as tables of every page are."""
    figures = [StudyFigure(label=label, task="needle", name=label) for label in ("costs", "runs", "arms", "verdicts")]
    axes = [StudyAxis(name="size", values=["small", "large"])]
    made = study(
        ["diff", "twin"],
        figures,
        2,
        lambda arm, point, seed: record(figures, {"costs": 1.0, "runs": 2.0}, arm=arm),
        axes=axes,
    )
    names = [table.name for table in all_tables(study_page(studied(made)))]
    assert len(set(names)) == len(names)


def test_a_study_without_runs_has_a_page(tmp_path):
    evidence = controls({"diff": 0.9, "twin": 0.1})
    empty = dataclasses.replace(evidence, index=dataclasses.replace(evidence.index, members=[]), runs={}, files={})
    text = write_evidence(read_studies(save(empty, tmp_path)), tmp_path / "pages").read_text()
    assert "0 of 99 planned runs" in text
    assert "Claims of the paper" not in text
    page = (tmp_path / "pages" / "controls-laptop" / "index.html").read_text()
    assert "have no pair of runs with the same seed and data yet" in page


def test_every_arm_has_a_colour_of_its_own_in_all_studies():
    styles = arm_styles(CONTROLS, "twin")
    looks = [tuple(map(str, style.values())) for style in styles.values()]
    assert len(set(looks)) == len({style["color"] for style in styles.values()}) == len(CONTROLS)
    assert len({(style["marker"], str(style["linestyle"])) for style in styles.values()}) == len(CONTROLS)
    others = arm_styles(["diff_v2", "wide", "diff", "softmax"], "softmax")
    assert styles["twin"]["color"] == others["softmax"]["color"] == REFERENCE_COLOUR
    assert all(styles[arm] == others[arm] for arm in ("diff", "wide"))
    assert len({*COLOURS, *MORE_COLOURS, REFERENCE_COLOUR}) == len(COLOURS) + len(MORE_COLOURS) + 1


def test_latex_and_markdown_escape_their_own_characters():
    table = Table("t", "T", (Group("a_b|c", numeric=False), Group("50 %")), [["x|y & {z}", "1 \u00b1 2"]], ["Note."])
    assert (
        table.markdown({"other": "u"}) == "| a_b\\|c | 50 % |\n| --- | ---: |\n| x\\|y & {z} | 1 \u00b1 2 |\n\nNote.\n"
    )
    assert r"x|y \& \{z\} & 1 $\pm$ 2 \\" in table.latex()
    assert r"a\_b|c & 50 \% \\" in table.latex()


CLAIM = Claim(
    claim="Retrieval",
    paper="p",
    tests=[ClaimTest(study="controls", contrast="DIFF minus TWIN", favours="above")],
    explored=[Explored(study="controls", arm="diff", figure=SEEN.label)],
)
DIFF, TWIN, WIDE = (Term(arms=[arm], weight=weight) for arm, weight in (("diff", 1.0), ("twin", -1.0), ("wide", -1.0)))
PRIMARY = Contrast(
    name="DIFF minus TWIN", figure=SEEN.label, terms=[DIFF, TWIN], first_seed=0, seeds=12, smallest=0.1,
    above="subtraction retrieves more", below="subtraction retrieves less", within="no difference as large as 0.1",
)  # fmt: skip
SECOND = dataclasses.replace(PRIMARY, name="DIFF minus WIDE", terms=[DIFF, WIDE])


def confirming(seen, *contrasts, at="2026-01-01T00:00:00Z", noise=0.02, seeds=12, **parts):
    """A study of controls with a plan."""
    plan = planned([Question(question="Does subtraction retrieve?", contrasts=list(contrasts or [PRIMARY]))], at=at)
    evidence = controls(seen, noise, seeds)
    return dataclasses.replace(evidence, index=dataclasses.replace(evidence.index, plan=plan, **parts))


@pytest.mark.parametrize(("diff", "twin", "smallest", "parts", "state"), [
    (0.9, 0.1, 0.1, {}, "reproduced here"), (0.1, 0.9, 0.1, {}, "opposite"),
    (0.5, 0.5, 0.1, {}, "no difference as large as the paper's"),
    (0.55, 0.5, 0.1, {}, "no difference as large as the paper's"),  # though it is above zero
    (0.5, 0.5, None, {"noise": 0.2}, "tested, not decided"),
    (0.9, 0.1, 0.1, {"at": "2026-01-03T00:00:00Z"}, "planned, not decided"),  # the plan is younger than its runs
    (0.9, 0.1, 0.1, {"seeds": 11}, "planned, not decided"),
])  # fmt: skip
def test_the_state_of_a_claim_follows_from_a_registered_contrast(diff, twin, smallest, parts, state):
    contrast = dataclasses.replace(PRIMARY, smallest=smallest)
    (judged,) = judge([CLAIM], [studied(confirming({"diff": diff, "twin": twin}, contrast, **parts))])
    assert judged.state == state


def test_a_claim_is_never_decided_by_exploration():
    for seen in ({"diff": 0.9, "twin": 0.1}, {"diff": 0.1, "twin": 0.9}, {"diff": 0.5, "twin": 0.5}):
        (judged,) = judge([CLAIM], [studied(controls(seen))])
        assert judged.state == "explored, not confirmed"
        (said,) = judged.evident
        assert said.words.endswith(" of 5 seeds; explored with the normal start, not confirmed")
    assert judge([CLAIM], [])[0].state == "not run yet"
    assert judge([CLAIM], [studied(controls({"diff": 0.9, "twin": 0.1}, seeds=1))])[0].state == "not run yet"
    weak = dataclasses.replace(CLAIM, explored=[dataclasses.replace(CLAIM.explored[0], weak="Few questions.")])
    assert judge([weak], [studied(controls(seen))])[0].state == "not tested with enough power"
    assert judge([Claim(claim="c", paper="p", not_testable="why")], [])[0].state == "not testable here"
    waiting = judge([Claim(claim="c", paper="p", not_run="many runs")], [])
    assert claims_table(waiting).rows == [["c", "p", "not run yet", "", "", "many runs", "", ""]]


def test_a_claim_whose_only_evidence_is_confounded_is_open_and_a_corrected_study_says_what_stands():
    correction = Correction(stands="Open: it copies.", why="Any number is right in 1/N.")
    seen = {"diff": 0.9, "twin": 0.1}
    found = studied(confirming(seen, correction=correction))
    claim = dataclasses.replace(CLAIM, tests=[dataclasses.replace(CLAIM.tests[0], confounded="Copying does it.")])
    (judged,) = judge([claim], [found])
    assert (judged.state, [said.vote for said in judged.evident]) == ("open", ["confounded"])
    assert judged.evident[0].words.endswith("). Copying does it.")
    other = dataclasses.replace(claim, tests=[*claim.tests, *CLAIM.tests])
    assert judge([other], [found])[0].state == "reproduced here"
    ((*_, slug, scale, _, _, vote),) = claims_table([judged]).rows
    assert (slug, scale, vote) == ("controls-laptop", "500k parameters, 12 tokens a parameter", "confounded")
    assert brief_answer(found) == "Open: it copies."
    assert lead(found).answer.startswith("Correction. Open: it copies. Any number is right in 1/N. What it answered: ")


def test_what_was_explored_is_told_only_while_no_contrast_is_decided():
    explored = studied(controls({"diff": 0.9, "twin": 0.1}))
    for diff, smallest, noise, votes in (
        (0.9, 0.1, 0.02, ["for"]),
        (0.5, 0.1, 0.02, ["small"]),
        (0.5, None, 0.2, ["open", "explored"]),
    ):
        contrast = dataclasses.replace(PRIMARY, smallest=smallest)
        tested = studied(confirming({"diff": diff, "twin": 0.5 if diff == 0.5 else 0.1}, contrast, noise=noise))
        assert [said.vote for said in judge([CLAIM], [tested, explored])[0].evident] == votes


def test_claims_for_and_against_are_mixed_for_and_small_are_in_part_and_others_stand_beside():
    studies = [studied(confirming(seen)) for seen in ({"diff": 0.9, "twin": 0.1}, {"diff": 0.1, "twin": 0.9})]
    assert judge([CLAIM], studies)[0].state == "mixed"
    studies[1] = studied(confirming({"diff": 0.5, "twin": 0.5}))
    assert judge([CLAIM], studies)[0].state == "reproduced in part"
    beside = Named(study="controls", contrast="DIFF minus WIDE")
    seen = {"diff": 0.9, "wide": 0.1, "twin": 0.1}
    (judged,) = judge([dataclasses.replace(CLAIM, beside=[beside])], [studied(confirming(seen, PRIMARY, SECOND))])
    assert [said.vote for said in judged.evident] == ["for", "beside"]
    alone = Claim(claim="c", paper="p", beside=[beside])
    assert judge([alone], [studied(confirming(seen, PRIMARY, SECOND))])[0].state == "no contrast of its own"
    unrun = dataclasses.replace(SECOND, first_seed=3000)
    assert judge([alone], [studied(confirming(seen, PRIMARY, unrun))])[0].state == "not run yet"
    later = dataclasses.replace(CLAIM, tests=[ClaimTest(study="controls", contrast="DIFF minus WIDE", favours="above")])
    first = dataclasses.replace(PRIMARY, terms=[TWIN, dataclasses.replace(WIDE, weight=1)], smallest=None)
    stopped = confirming(seen, first, SECOND)
    assert judge([later], [studied(stopped)])[0].state == "planned, not decided"
    assert judged.evident[1].words.startswith("DIFF minus WIDE: +0.")


def test_claims_name_figures_that_the_studies_have():
    claims = read_claims()
    assert len(claims) == 10
    for claim in claims:
        assert bool(claim.tests or claim.explored or claim.beside) != bool(claim.not_testable)
        if claim.not_testable:
            assert re.search(r"could be tested from about [\d.]+B parameters", claim.not_testable)
        for one in claim.explored:
            path = RECIPES / f"{one.study}.yaml"
            if path.is_file():
                recipe = yaml.safe_load(path.read_text("utf-8"))
                assert one.arm in recipe["arms"]
                assert one.need or one.figure in [figure["label"] for figure in recipe["figures"]], claim.claim


def test_the_page_of_a_plan_opens_with_its_questions(tmp_path):
    rates = [
        ChosenRate(arm=arm, point={}, learning_rate=1e-3, tried=[(5e-4, 0.2), (1e-3, 0.8), (2e-3, 0.5)])
        for arm in ("diff", "twin")
    ]
    changes = [Change(when="2026-02-01", what="Two seeds were added.")]
    seen = {"diff": 0.9, "wide": 0.9, "twin": 0.1}
    page = study_page(studied(confirming(seen, PRIMARY, SECOND, rates=rates, changes=changes)))
    assert [section.slug for section in page.sections[:3]] == ["plan", "tuning", "arms"]
    (question,) = found_words(studied(confirming(seen, PRIMARY, SECOND)))
    assert question.subject == "Does subtraction retrieve?"
    assert page.lead.answer.startswith("Subtraction retrieves more, by more than 0.1 (DIFF minus TWIN: +0.")
    assert page.lead.table.states["subtraction retrieves more, by more than 0.1"] == "good"
    assert re.match(r"DIFF minus TWIN: \+0\.\d+ \[\+0\.\d+, \+0\.\d+\], above zero in 12 of 12 seeds: ", question.text)
    said = "subtraction retrieves more, by more than 0.1"
    assert f"{said} (registered; exact sign-flip test, p < 0.001). Further contrasts decided: 1 of 1." in question.text
    contrasts = page.sections[0].tables[0].folded()
    assert [row[1] for row in contrasts] == ["DIFF minus TWIN", "DIFF minus WIDE"]
    assert [row[3] for row in contrasts] == ["12 of 12"] * 2
    assert contrasts[0][-1] == said
    assert contrasts[1][-1] == "no difference as large as 0.1, within \u00b10.1"
    text = Page((write_page(page, tmp_path)).read_text())
    changed = "1 February 2026: Two seeds were added."
    for words in ("plans/simulated.yaml", "5" * 64, "c" * 12, "Registered: every run", changed):
        assert words in text.words
    assert "0.8000 *" in text.cells
    assert "arms: - diff" in re.sub(r"\s+", " ", page.sections[0].texts[0][2])


def test_a_plan_younger_than_its_runs_is_not_called_registered():
    study = studied(confirming({"diff": 0.9, "twin": 0.1}, at="2026-01-03T00:00:00Z"))
    assert "(planned, not registered; " in found_words(study)[0].text
    first = "Planned, not registered: runs/diff-seed0.json began on 2 January 2026, 03:0"
    assert study_page(study).sections[0].notes[1].startswith(first)


def test_every_answer_of_the_index_is_short():
    long = "a meaning of so many words that no line of any index of studies could ever hold them all in one"
    wordy = dataclasses.replace(PRIMARY, name="DIFF minus TWIN, each at its own best start and size", above=long)
    seen = {"diff": 0.9, "twin": 0.1}
    evidences = [confirming(seen, wordy), confirming(seen, wordy, seeds=3), confirming(seen), controls(seen)]
    for evidence in evidences:
        assert len(brief_answer(studied(evidence)).split()) <= 25
    assert brief_answer(studied(evidences[2])).endswith(
        "12 of 12 seeds: subtraction retrieves more, by more than 0.1 (registered)."
    )


def test_studies_say_which_runs_they_share(tmp_path):
    first = controls({"diff": 0.9, "twin": 0.1}, seeds=3)
    again = [dataclasses.replace(member, file=f"../controls/{member.file}") for member in first.index.members[:2]]
    other = dataclasses.replace(first.index, name="other", members=again)
    digest = [dataclasses.replace(again[0], file="runs/other-name-seed0-0123456789.json")]
    save(first, tmp_path)
    write_result(other, tmp_path / "other" / "laptop.json")
    found = {one.evidence.slug: one for one in read_studies(tmp_path)}
    assert found["controls-laptop"].shared == {"other-laptop": 2}
    assert shared_words(found["other-laptop"]).startswith("Shares 2 runs with controls-laptop:")
    assert "Shares 2 runs with controls-laptop" in " ".join(
        note for section in study_page(found["other-laptop"]).sections for note in section.notes
    )
    renamed = dataclasses.replace(first.index, name="third", members=digest)
    own = dataclasses.replace(digest[0], file="runs/diff-seed0-0123456789.json")
    named = dataclasses.replace(first.index, members=[own])
    pair = [studied(dataclasses.replace(first, index=index)) for index in (named, renamed)]
    assert [one.shared for one in with_shared(pair)] == [{"third-laptop": 1}, {"controls-laptop": 1}]
    assert study_page(pair[0]).sections[-1].notes[1] == "Disclosed: None known."

"""Retrieval: an oracle scores everything, a guesser scores chance, and every model gets the same documents."""

import math
import re
from dataclasses import replace

import pytest
import torch

from difftransformer.data import CITIES_SEEN, CITIES_UNSEEN, byte_tokenizer
from difftransformer.data.tokenizer import Tokenizer
from difftransformer.errors import DataError
from difftransformer_lab.evals import TaskContext, run_task
from difftransformer_lab.evals.tasks.needle import (
    ANSWER_NLL,
    CHANCE,
    COPYING,
    LOOKUP,
    MADE_UP,
    MADE_UP_COPYING,
    NeedleTask,
    Options,
)
from difftransformer_lab.statistics import wilson_interval
from tests.support.fakes import Guesser, Oracle, Telling, Uniform

# As a study asks: each cell with documents of its own, and each kind of city apart.
GRID = Options(
    text="validation", cities="apart", paired=False, lengths=[128, 200], needles=[[1, 1], [2, 2], [4, 2]],
    depths=[0.0, 0.5, 1.0], documents=4, digits=3,
)  # fmt: skip
CHOSEN = Options(text="validation", paired=False, lengths=[96], needles=[[2, 1]], documents=3, digits=3)


def drawn(shards, options, context_tokens=64):
    where = {"tokenizer": shards.tokenizer, "context_tokens": context_tokens}
    return NeedleTask(options, TaskContext(**where, validation=lambda: shards.tokens("validation")))


def cells(model, shards, options):
    rows = run_task(model, drawn(shards, options)).measurements
    return [row for row in rows if row.name == "accuracy" and "depth" in row.at]


def test_the_oracle_is_right_in_every_cell(oracle, toy_shards):
    """And where cities are of several kinds, over all cells of each; it tells no likelihoods, so that there is no loss."""
    everything = run_task(oracle, drawn(toy_shards, GRID)).measurements
    assert {row.name for row in everything} == {"accuracy", CHANCE, COPYING, LOOKUP}
    assert all(row.value == pytest.approx(1) for row in everything if row.name != CHANCE)
    rows = [row for row in everything if row.name == "accuracy"]
    assert [(row.at, row.n) for row in rows[:2]] == [({"cities": "seen"}, 2 * 3 * 4 * 5), ({"cities": "unseen"}, 120)]
    found = [row for row in rows if "depth" in row.at]
    assert [row.at for row in found] == [
        {"cities": cities, "needles": needles, "asked": asked, "length_tokens": length, "depth": depth}
        for needles, asked in ((1, 1), (2, 2), (4, 2))
        for length in (128, 200)
        for depth in (0.0, 0.5, 1.0)
        for cities in ("seen", "unseen")
    ]
    for row in found:
        assert (row.n, row.value) == (4 * row.at["asked"], 1), row


def test_figures_over_cells_are_those_of_all_their_answers(guesser, toy_shards):
    """Over each kind of city, number of needles and length the figure follows from the counts of the cells."""
    options = replace(GRID, digits=1, needles=[[1, 1]])
    rows = run_task(guesser(1), drawn(toy_shards, options)).measurements
    rows = [row for row in rows if row.name == "accuracy"]
    cell_rows = [row for row in rows if "depth" in row.at]
    assert sum(row.value for row in cell_rows) > 0
    for row in rows:
        inside = [cell for cell in cell_rows if row.at.items() <= cell.at.items()]
        assert row.n == sum(cell.n for cell in inside)
        assert row.value == pytest.approx(sum(cell.value * cell.n for cell in inside) / row.n)
        assert (row.low, row.high) == wilson_interval(round(row.value * row.n), row.n)
        assert row.detail == ("depth" in row.at)


def test_a_right_city_with_one_wrong_digit_is_wrong(oracle, toy_shards):
    honest = oracle.continue_greedily

    def slip(prompts, tokens):
        made = honest(prompts, tokens)
        digits = toy_shards.tokenizer.encode("\n0123456789")[1:]
        last = made[:, -1]
        made[:, -1] = torch.where(last == digits[7], digits[8], digits[7])
        return made

    oracle.continue_greedily = slip
    assert sum(row.value for row in cells(oracle, toy_shards, GRID)) == 0


class TellingOracle(Telling, Oracle):
    """Is certain of every right answer."""


class TellingGuesser(Telling, Guesser):
    """Says a random number, and takes every token for equally likely."""

    def nll(self, input_ids, targets):
        return Uniform(self.tokenizer.vocab_size).nll(input_ids, targets)


def test_the_loss_of_the_answer_stands_wherever_the_accuracy_does(toy_shards):
    """None for the oracle, and for equally likely tokens that of their number, in cells, over them and of each document."""
    task = drawn(toy_shards, GRID)
    tokens = {len(request.right) for request in task.requests}
    assert tokens == {1 + GRID.digits}
    chance = (1 + GRID.digits) * math.log(toy_shards.tokenizer.vocab_size)
    knowing, guessing = TellingOracle(toy_shards.tokenizer), TellingGuesser(toy_shards.tokenizer, 3)
    for model, expected in ((knowing, 0), (guessing, chance)):
        scores = run_task(model, task)
        found = [row for row in scores.measurements if row.name == ANSWER_NLL]
        places = [(row.at, row.n, row.units, row.detail) for row in scores.measurements if row.name == "accuracy"]
        assert [(row.at, row.n, row.units, row.detail) for row in found] == places
        for row in found:
            assert (row.unit, row.better) == ("nats", "lower")
            assert row.value == pytest.approx(expected)
        right, losses = ([one for one in scores.items if one.name.startswith(k)] for k in ("accuracy", ANSWER_NLL))
        assert [(one.item, one.weight) for one in losses] == [(one.item, one.weight) for one in right]
        assert all(one.score / one.weight == pytest.approx(expected) for one in losses)


def test_the_right_answer_is_asked_as_the_text_goes_on(toy_shards):
    for request, (*_, number) in zip((task := drawn(toy_shards, CHOSEN)).requests, task._trials, strict=True):
        text = toy_shards.tokenizer.decode(request.prompt)
        assert toy_shards.tokenizer.decode((*request.prompt, *request.right)) == f"{text} {number}"


def asked_one_by_one(shards, answers, **options):
    """The figures of one cell of four needles, where answer i says answers[i](numbers of the context, the right one)."""
    chosen = replace(CHOSEN, depths=[0.5], documents=len(answers), **options)
    task = drawn(shards, chosen)
    said = []
    for trial, answer in zip(task._trials, answers, strict=True):
        text = answer([*trial.numbers], trial.right)
        said.append(shards.tokenizer.encode(f"a {text}\n")[len(shards.tokenizer.encode("a")) :])
    return task.score(said)


def right_one(numbers, right):
    return right


def another(numbers, right):
    return next(number for number in numbers if number != right)


def made_up(numbers, right):
    return next(f"{n:03d}" for n in range(1000) if f"{n:03d}" not in numbers)


def words(numbers, right):
    return f"of {right}"


def test_copying_and_lookup_by_hand(toy_shards):
    """Of ten answers with N = 4 three are right, four name another needle's number, two that of none, one begins with words."""
    answers = [right_one] * 3 + [another] * 4 + [made_up] * 2 + [words]
    scores = asked_one_by_one(toy_shards, answers, needles=[[4, 1]])
    whole = {row.name: row for row in scores.measurements if row.at == {"needles": 4, "asked": 1}}
    assert {name: row.n for name, row in whole.items()} == dict.fromkeys(("accuracy", CHANCE, COPYING, LOOKUP), 10)
    assert whole["accuracy"].value == 0.3
    assert (whole[CHANCE].value, whole[CHANCE].better, whole[CHANCE].low) == (0.25, None, None)
    assert (whole[COPYING].value, whole[COPYING].better) == (0.7, None)
    assert (whole[COPYING].low, whole[COPYING].high) == wilson_interval(7, 10)
    # 3 - 4/3 of 10 questions; or of p = (3 + 3/4) / 10, where three answers are replaced by one of the four numbers.
    lookup = whole[LOOKUP]
    assert (lookup.value, lookup.unit, lookup.better) == (pytest.approx(1 / 6), "beyond 1/N", "higher")
    assert lookup.value == pytest.approx((0.375 - 0.25) / 0.75)
    assert (lookup.low, lookup.high) == pytest.approx([(p - 0.25) / 0.75 for p in wilson_interval(3.75, 10)])
    assert lookup.standard_error == pytest.approx(math.sqrt(0.375 * 0.625 / 10) / 0.75)
    items = [one.score / one.weight for one in scores.items if one.name == f"{LOOKUP} N=4 R=1"]
    assert items == pytest.approx([1] * 3 + [-1 / 3] * 4 + [0] * 3)
    assert {row.detail for row in scores.measurements if "depth" in row.at} == {True}


def test_a_model_that_copies_at_random_looks_nothing_up(toy_shards):
    """With each of its four numbers once it is right in 1/N, and lookup is 0; with one number lookup has no meaning."""
    pick = [lambda numbers, right, place=place: numbers[place] for place in range(4)]
    scores = asked_one_by_one(toy_shards, pick * 25, needles=[[4, 1]])
    whole = {row.name: row for row in scores.measurements if row.at == {"needles": 4, "asked": 1}}
    assert (whole["accuracy"].value, whole[COPYING].value) == (0.25, 1)
    assert whole[LOOKUP].value == pytest.approx(0, abs=1e-12)
    assert whole[LOOKUP].low < 0 < whole[LOOKUP].high
    single = asked_one_by_one(toy_shards, [right_one, made_up], needles=[[1, 1]])
    assert LOOKUP not in {row.name for row in single.measurements}
    assert next(row.value for row in single.measurements if row.name == CHANCE) == 1


def test_over_several_numbers_of_needles_chance_is_the_mean_of_1_over_n(oracle, toy_shards):
    rows = run_task(oracle, drawn(toy_shards, replace(GRID, needles=[[1, 1], [2, 1], [4, 1], [6, 1]]))).measurements
    found = [row for row in rows if row.at == {"cities": "seen"}]
    assert {row.name for row in found} == {"accuracy", CHANCE, COPYING}
    assert next(row.value for row in found if row.name == CHANCE) == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 6) / 4)
    places = [row.at for row in rows if row.name == LOOKUP and "length_tokens" not in row.at]
    assert places == [
        {"cities": kind, "needles": n, "asked": 1} for n in (2, 4, 6) for kind in ("seen", "unseen")
    ]  # fmt: skip


def test_absent_cities_stand_in_no_needle_and_change_no_other_question(toy_shards):
    plain, more = drawn(toy_shards, GRID), drawn(toy_shards, replace(GRID, absent=True))
    assert more.requests[: len(plain.requests)] == plain.requests
    added = list(zip(more.requests, more._trials, strict=True))[len(plain.requests) :]
    assert len(added) == 3 * 2 * 2 * 4  # numbers of needles, lengths, kinds of city, documents
    asked = set()
    for request, trial in added:
        text = toy_shards.tokenizer.decode(request.prompt)
        needles = dict(re.findall(r"\nThe special magic (.+) number is: (\d{3})", text))
        city = re.search(r"\nThe special magic (.+) number is:$", text)[1]
        assert city in (CITIES_SEEN if trial.at["cities"] == "seen" else CITIES_UNSEEN)
        assert city not in needles
        assert set(needles.values()) == set(trial.numbers)
        assert len(trial.numbers) == trial.at["needles"]
        assert trial.right is None
        assert len(request.prompt) + request.tokens + 1 == trial.at["length_tokens"]
        asked.add(city)
    assert len(asked) > 20


def test_what_is_made_up_by_hand(toy_shards):
    """The first answer is of a city that is there; of four absent ones two get a needle's number, one another, one words."""
    given = [right_one] * 4 + [another, another, made_up, words]
    task_options = replace(CHOSEN, depths=[0.5], documents=4, needles=[[2, 1]], absent=True)
    task = drawn(toy_shards, task_options)
    said = [answer([*trial.numbers], trial.right) for trial, answer in zip(task._trials, given, strict=True)]
    start = len(toy_shards.tokenizer.encode("a"))
    scores = task.score([toy_shards.tokenizer.encode(f"a {text}\n")[start:] for text in said])
    found = {row.name: row for row in scores.measurements if row.at == {"needles": 2}}
    assert {name: (row.value, row.n, row.better) for name, row in found.items()} == {
        MADE_UP: (0.75, 4, "lower"),
        MADE_UP_COPYING: (0.5, 4, "lower"),
    }
    assert (found[MADE_UP].low, found[MADE_UP].high) == wilson_interval(3, 4)
    assert next(row.value for row in scores.measurements if row.name == "accuracy") == 1
    items = [one.score for one in scores.items if one.name == f"{MADE_UP} N=2 R=0"]
    assert items == [1, 1, 1, 0]


def test_a_guesser_scores_chance(guesser, toy_shards):
    """300 documents of each kind; the interval of 95 % holds chance with this seed, and is far from 1."""
    options = replace(GRID, lengths=[], needles=[[1, 1]], depths=[0.5], documents=300, digits=1)
    found = cells(guesser(1), toy_shards, options)
    trials = sum(row.n for row in found)
    assert trials == 600
    low, high = wilson_interval(round(sum(row.value * row.n for row in found)), trials)
    assert low <= 0.1 <= high
    assert 0.05 < low < high < 0.2


@pytest.mark.parametrize(("cities", "allowed"), [
    ("seen", CITIES_SEEN), ("unseen", CITIES_UNSEEN), ("all", CITIES_SEEN + CITIES_UNSEEN),
])  # fmt: skip
def test_only_cities_of_the_chosen_kind_are_named(cities, allowed, toy_shards):
    named = set()
    for request in drawn(toy_shards, replace(GRID, cities=cities)).requests:
        text = toy_shards.tokenizer.decode(request.prompt)
        named |= {city for city in CITIES_SEEN + CITIES_UNSEEN if f"magic {city} number" in text}
    assert named <= set(allowed)
    assert len(named) > 10


def test_kinds_of_cities_apart_are_those_of_each_kind_alone(toy_shards):
    both = drawn(toy_shards, GRID).requests
    alone = {kind: iter(drawn(toy_shards, replace(GRID, cities=kind)).requests) for kind in ("seen", "unseen")}
    asked = [request for needles in GRID.needles for _ in range(6) for kind in alone for request in
             [next(alone[kind]) for _ in range(4 * needles[1])]]  # fmt: skip
    assert list(both) == asked


def test_every_model_gets_the_same_documents_and_another_seed_others(toy_shards):
    first, second, other = (
        [request.prompt for request in drawn(toy_shards, options).requests]
        for options in (CHOSEN, CHOSEN, replace(CHOSEN, seed=1))
    )
    assert first == second
    assert not set(first) & set(other)
    # No two cells share their documents either.
    assert len(set(first)) == len(first)


def test_paired_cells_share_their_needles(toy_shards):
    """At every depth the same sentences stand in the same haystack, but for their places."""
    task = drawn(toy_shards, replace(CHOSEN, paired=True))
    prompts = [toy_shards.tokenizer.decode(request.prompt) for request in task.requests]
    by_document = [prompts[document :: CHOSEN.documents] for document in range(CHOSEN.documents)]
    for document in by_document:
        assert len(document) == 5
        assert len({tuple(sorted(line for line in text.split("\n") if "magic" in line)) for text in document}) == 1
        assert len(set(document)) > 1


def test_prompt_and_answer_fit_into_the_length(toy_shards):
    task = drawn(toy_shards, replace(GRID, lengths=[200]))
    assert {len(request.prompt) for request in task.requests} == {200 - 3 - 2}
    task = drawn(toy_shards, replace(GRID, lengths=[]), context_tokens=128)
    assert {len(request.prompt) for request in task.requests} == {128 - 3 - 2}


def test_needles_that_do_not_fit(toy_shards):
    with pytest.raises(DataError, match="longer than the context"):
        drawn(toy_shards, replace(GRID, lengths=[40], needles=[[6, 1]], digits=7))


def test_held_out_text_needs_a_run(toy_shards):
    with pytest.raises(DataError, match="only a run's folder tells which text was held out"):
        NeedleTask(GRID, TaskContext(tokenizer=toy_shards.tokenizer, context_tokens=64))


def test_cells_differ_in_length_and_depth_alone(text):
    """The same city, number and haystack; the answer where the cell says; length for prompt and answer together."""
    task = NeedleTask(Options(text=text, lengths=[200, 320], documents=2), Oracle(byte_tokenizer()))
    rows = [bytes(id for id in request.prompt[1:]).decode() for request in task.requests]
    assert [len(request.prompt) + request.tokens + 1 for request in task.requests] == [200] * 10 + [320] * 10
    for document in range(2):
        chosen = rows[document::2]
        needles = {re.search(r"\nThe special magic (.+) number is: (\d{7})", row).groups() for row in chosen}
        assert len(needles) == 1
        haystacks = [re.sub(r"\nThe special magic .+ number is:( \d{7})?", "", row) for row in chosen]
        longest = max(haystacks, key=len)
        for haystack in haystacks:  # a line end may stand where the needle needed one
            assert sum(a != b for a, b in zip(haystack, longest, strict=False)) <= 2
        for row, haystack, depth in zip(chosen, haystacks, [0.0, 0.25, 0.5, 0.75, 1.0] * 2, strict=True):
            assert row.index("\nThe special magic") / len(haystack) == pytest.approx(depth, abs=0.1)


def chatting(template):
    made = byte_tokenizer()
    return Tokenizer(made.backend, chat_template=template)


def test_a_chat_models_prompt(text):
    tokenizer = chatting("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>")
    options = Options(text=text, lengths=[600], depths=[0.5], documents=2, prompt="chat")
    task = NeedleTask(options, Oracle(tokenizer))
    for request in task.requests:
        prompt = tokenizer.decode(request.prompt)
        assert prompt.startswith("<user>Somewhere in the text")
        question = re.search(r"\n\nQuestion: What is the special magic number for (.+)\?</s><assistant>$", prompt)
        assert len(re.findall(rf"\nThe special magic {question[1]} number is: \d{{7}}\n", prompt)) == 1
        assert len(request.prompt) + request.tokens <= 600
    answers = [tokenizer.encode(f"It is {number}, I think") for *_, number in task._trials]
    assert task.score(answers).measurements[0].value == 1
    assert task.score([tokenizer.encode("1234567")] * 2).measurements[0].value == 0
    with pytest.raises(DataError, match="no chat template"):
        NeedleTask(options, Oracle(byte_tokenizer()))
    with pytest.raises(DataError, match="does not write a user's message as it is"):
        NeedleTask(options, Oracle(chatting("{{ messages[0].content | upper }}")))

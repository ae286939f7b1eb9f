"""Needle documents: exact lengths, places, and numbers."""

import re
from collections import Counter

import numpy as np
import pytest
import tokenizers

from difftransformer.data import (
    CITIES_SEEN,
    CITIES_UNSEEN,
    RetrievalMix,
    Tokenizer,
    evaluation_document,
    needle_document_tokens,
    training_document,
)
from difftransformer.data.needles import FULL, answer_tokens, draw_number
from difftransformer.errors import ConfigError, DataError

SENTENCE = re.compile(r"^The special magic ([A-Z][a-z]+) number is: (\d+)$", re.MULTILINE)


def stream_of(tokenizer, corpus):
    ids = [[*tokenizer.encode(document.text), tokenizer.end_of_text] for document in corpus]
    return np.concatenate(ids).astype(np.uint16)


@pytest.fixture(scope="module")
def stream(tokenizer, corpus):
    return stream_of(tokenizer, corpus)


@pytest.fixture(scope="module")
def bpe_stream(bpe, corpus):
    return stream_of(bpe, corpus)


def scale(tokenizer):
    """Contexts of bytes must be longer to hold as much."""
    return 4 if tokenizer.vocab_size == 258 else 1


def train_row(tokenizer, stream, seed, **keywords):
    context_tokens = keywords.pop("context_tokens", 320 * scale(tokenizer))
    mix = RetrievalMix(**{"share": 1.0, "min_needles": 1, "max_needles": 3, "asks": 4, "digits": 5, **keywords})
    return training_document(np.random.default_rng(seed), tokenizer, stream, context_tokens=context_tokens, mix=mix)


def test_the_cities_are_distinct_and_no_name_is_part_of_another():
    cities = (*CITIES_SEEN, *CITIES_UNSEEN)
    assert (len(CITIES_SEEN), len(CITIES_UNSEEN)) == (64, 24)
    assert len(set(cities)) == 88
    assert not [(a, b) for a in cities for b in cities if a != b and a in b]


def test_the_sentence_is_the_one_of_the_paper_s_protocol():
    assert FULL.stub("Paris") == "\nThe special magic Paris number is:"


def needles_and_questions(text):
    """The (city, number) pairs of the context and those asked back: a city's first sentence is its needle."""
    found = SENTENCE.findall(text)
    count = len(dict(found))
    needles, asked = found[:count], found[count:]
    assert len(dict(needles)) == count == len(set(found))
    return needles, asked


@pytest.mark.parametrize("context", [271, 320, 500])
@pytest.mark.parametrize("seed", range(6))
def test_a_training_row_is_full_and_asks_back_its_needles(tokenizer, stream, seed, context):
    context *= scale(tokenizer)
    row = train_row(tokenizer, stream, seed, context_tokens=context, min_needles=2)
    assert len(row) == context + 1
    assert row[0] == tokenizer.end_of_text
    assert tokenizer.end_of_text not in row[1:]
    text = tokenizer.decode(row)
    needles, asked = needles_and_questions(text)
    assert 2 <= len(needles) <= 3
    assert 1 <= len(asked) <= 4
    assert set(asked) <= set(needles)
    assert text.endswith("\n".join(f"The special magic {city} number is: {number}" for city, number in asked))
    assert all(len(number) == 5 for _, number in needles)


def test_counts_of_needles_and_questions_are_drawn_from_their_ranges(bpe, bpe_stream):
    counts = [
        [len(part) for part in needles_and_questions(bpe.decode(train_row(bpe, bpe_stream, seed, context_tokens=400)))]
        for seed in range(150)
    ]
    assert {needles for needles, _ in counts} == {1, 2, 3}
    assert {questions for _, questions in counts} == {1, 2, 3, 4}
    # Each question is drawn anew, so one document asks now one needle several times and now several needles.
    kinds = set()
    for seed in range(60):
        row = train_row(bpe, bpe_stream, seed, context_tokens=400, min_needles=3)
        _, asked = needles_and_questions(bpe.decode(row))
        kinds.add((len(asked), len(set(asked))))
    assert {(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3)} <= kinds


def test_a_dense_document_fills_its_room_with_questions(tokenizer, stream):
    longest = max(len(tokenizer.encode(f"{FULL.stub(city)} 01234")) for city in CITIES_SEEN)
    for seed in range(8):
        row = train_row(tokenizer, stream, seed, min_needles=2, dense=1.0)
        needles, asked = needles_and_questions(tokenizer.decode(row))
        assert set(asked) <= set(needles)
        assert len(asked) >= len(row) // longest - len(needles) - 1 > 2
    dense = [
        len(needles_and_questions(tokenizer.decode(train_row(tokenizer, stream, seed, dense=0.5)))[1]) > 4
        for seed in range(80)
    ]
    assert 0.3 < np.mean(dense) < 0.7


def test_terse_documents_keep_city_and_number_and_the_wording_within_a_document(bpe, bpe_stream):
    wordings = set()
    is_full = []
    for seed in range(150):
        text = bpe.decode(train_row(bpe, bpe_stream, seed, min_needles=2, terse=0.5))
        found = re.findall(rf"^(.*?) ({'|'.join(CITIES_SEEN)})(\D*)(\d{{5}})$", text, re.MULTILINE)
        pairs = [(city, number) for _, city, _, number in found]
        assert len({(before, after) for before, _, after, _ in found}) == 1
        assert 2 <= len(set(pairs)) == len(dict(pairs)) < len(pairs)
        wordings.add((found[0][0], found[0][2]))
        is_full.append(found[0][0] == "The special magic" and found[0][2] == " number is: ")
    afters = ("", " ", ": ", " number is: ")
    assert wordings == {(before, after) for before in ("", "The special magic") for after in afters}
    # Half of the documents are worded in full, and one in eight of the rest.
    assert 0.42 < np.mean(is_full) < 0.7


def test_a_short_context_holds_fewer_needles(bpe, bpe_stream):
    counts = set()
    for seed in range(60):
        needles, asked = needles_and_questions(
            bpe.decode(train_row(bpe, bpe_stream, seed, context_tokens=150, max_needles=40, asks=40))
        )
        counts.add(len(needles))
        assert asked
    assert min(counts) == 1
    assert 2 <= max(counts) <= 4


def test_rows_follow_their_seed_and_needles_lie_everywhere(tokenizer, stream):
    assert train_row(tokenizer, stream, 1) == train_row(tokenizer, stream, 1) != train_row(tokenizer, stream, 2)
    starts = []
    for seed in range(120):
        text = tokenizer.decode(train_row(tokenizer, stream, seed, max_needles=1, asks=1))
        first, last = SENTENCE.finditer(text)
        starts.append(first.start() / last.start())
    assert min(starts) < 0.15
    assert max(starts) > 0.75
    assert 0.3 < np.mean(starts) < 0.6
    assert len({SENTENCE.findall(tokenizer.decode(train_row(tokenizer, stream, s)))[0][0] for s in range(120)}) > 40


def test_needles_have_the_tokens_of_the_whole_text(tokenizer):
    """A needle glued from pieces is what the tokenizer makes of the text, in the context as in the question."""
    stream = np.array(tokenizer.encode("some words:\n    more words\n\nend\n") * 200)
    row = train_row(tokenizer, stream, 0)
    # From the first line end on nothing is cut in the middle of a word.
    start = row.index(tokenizer.encode("\n")[0], 5)
    assert tokenizer.encode(tokenizer.decode(row[start:])) == row[start:]
    question = evaluate(tokenizer, stream)
    for prompt, answer in zip(question.prompts, question.answers, strict=True):
        whole = tokenizer.encode(tokenizer.decode(prompt[-40:]) + f" {answer}\n")
        continuation = tokenizer.encode(f" {answer}\n")
        assert whole[-len(continuation) :] == continuation
        assert whole[: -len(continuation)][-10:] == prompt[-10:]
        assert len(continuation) == answer_tokens(len(answer))


def test_evaluation_asks_for_the_numbers_of_training(bpe, bpe_stream):
    """A number that training leaves out is one that a model learns not to say, though it finds it."""
    trained, asked = Counter(), Counter()
    for seed in range(400):
        text = bpe.decode(train_row(bpe, bpe_stream, seed, max_needles=4, min_needles=4, digits=1))
        trained.update({number for _, number in SENTENCE.findall(text)})
        question = evaluate(bpe, bpe_stream, seed=seed, digits=1, needles=4)
        asked.update(question.numbers)
    assert set(trained) == set(asked) == set("0123456789")
    assert max(asked.values()) < 1.5 * min(asked.values())
    assert max(trained.values()) < 1.5 * min(trained.values())


@pytest.mark.parametrize("digits", [1, 2, 7, 9])
def test_drawn_numbers_have_their_digits(digits):
    rng = np.random.default_rng(0)
    numbers = [draw_number(rng, digits) for _ in range(300)]
    assert {len(number) for number in numbers} == {digits}
    assert len(set(numbers)) == 10 if digits == 1 else len(set(numbers)) > 90
    assert digits == 1 or any(number.startswith("0") for number in numbers)


def evaluate(tokenizer, stream, *, seed=0, **keywords):
    settings = {"depth": 0.5, "needles": 4, "asked": 2, "digits": 5, **keywords}
    settings.setdefault("length_tokens", 600 * scale(tokenizer))
    return evaluation_document(np.random.default_rng(seed), tokenizer, stream, **settings)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(("needles", "asked"), [(1, 1), (4, 2), (6, 2)])
def test_an_evaluation_document_holds_every_needle_once_at_its_place(tokenizer, stream, depth, needles, asked):
    length = 600 * scale(tokenizer)
    for seed in range(8):
        question = evaluate(tokenizer, stream, seed=seed, depth=depth, needles=needles, asked=asked)
        assert len(question.prompts) == len(question.answers) == len(question.cities) == asked
        assert len(set(question.cities)) == asked
        contexts = set()
        for index, prompt in enumerate(question.prompts):
            city, answer = question.cities[index], question.answers[index]
            assert len(prompt) == length - 7  # room for a space, 5 digits and a line end
            assert prompt[0] == tokenizer.end_of_text
            assert tokenizer.end_of_text not in prompt[1:]
            text = tokenizer.decode(prompt)
            found = SENTENCE.findall(text)
            contexts.add(tuple(found))
            assert len(found) == len(dict(found)) == len({number for _, number in found}) == needles
            assert dict(found)[city] == answer
            for name, number in found:
                assert text.count(number) == 1
                assert text.count(f"The special magic {name} number is:") == 1 + (name == city)
            assert text.endswith(f"\nThe special magic {city} number is:")
            start, end = question.spans[index]
            assert tokenizer.decode(prompt[start:end]) == f"\nThe special magic {city} number is: {answer}"
            query = question.query_starts[index]
            assert tokenizer.decode(prompt[query:]) == f"\nThe special magic {city} number is:"
        assert len(contexts) == 1
        start, end = question.spans[0]
        query = question.query_starts[0]
        if depth == 0.0:
            assert start == 1
        elif depth == 1.0:
            assert end == query
        else:
            # At the nearest line end, or right beside another needle.
            needle = end - start
            assert abs((start - 1) - depth * (query - 1 - needle)) <= max(16, query / 64) + needle


def test_without_a_needle_asked_for_the_city_is_in_none(tokenizer, stream):
    for seed in range(8):
        question = evaluate(tokenizer, stream, seed=seed, needles=3, asked=0)
        (prompt,), (city,) = question.prompts, question.cities
        assert len(prompt) == 600 * scale(tokenizer) - 7
        text = tokenizer.decode(prompt)
        found = dict(SENTENCE.findall(text))
        assert sorted(found.values()) == sorted(question.numbers)
        assert len(found) == 3
        assert city not in found
        assert text.endswith(f"\nThe special magic {city} number is:")
        assert (question.answers, question.answer_ids, question.spans) == ([], [], [])
    with pytest.raises(ConfigError, match="needles from 64 to 64: allowed are 1 <= fewest <= most <= 63"):
        evaluate(tokenizer, stream, needles=64, asked=0)


def test_depths_are_right_on_average(bpe, bpe_stream):
    for depth in (0.25, 0.5, 0.75):
        met = []
        for seed in range(60):
            question = evaluate(bpe, bpe_stream, seed=seed, depth=depth, needles=6)
            start, end = question.spans[0]
            met.append((start - 1) / (question.query_starts[0] - 1 - (end - start)))
        assert np.mean(met) == pytest.approx(depth, abs=0.01)


def test_text_without_line_ends_still_puts_needles_on_lines_of_their_own(tokenizer):
    stream = np.array(tokenizer.encode("one long line of words that does not end " * 300))
    for depth in (0.0, 0.3, 0.5, 1.0):
        question = evaluate(tokenizer, stream, depth=depth, needles=3)
        found = SENTENCE.findall(tokenizer.decode(question.prompts[0]))
        assert len(found) == 3
        start, end = question.spans[0]
        met = (start - 1) / (question.query_starts[0] - 1 - (end - start))
        assert met == pytest.approx(depth, abs=0.08)
    needles, asked = needles_and_questions(tokenizer.decode(train_row(tokenizer, stream, 0, min_needles=3)))
    assert len(needles) == 3
    assert asked


def test_documents_are_drawn_afresh_from_the_seed_and_the_filler_is_the_corpus(bpe, bpe_stream, corpus):
    one = evaluate(bpe, bpe_stream, seed=1)
    assert one == evaluate(bpe, bpe_stream, seed=1)
    assert one.prompts != evaluate(bpe, bpe_stream, seed=2).prompts
    filler = SENTENCE.sub("", bpe.decode(one.prompts[0]))
    lines = [line for line in filler.splitlines()[3:-3] if len(line) > 20]
    everything = "".join(document.text for document in corpus)
    assert len(lines) > 10
    assert np.mean([line in everything for line in lines]) > 0.9


def test_unseen_cities_are_used_when_asked_for(bpe, bpe_stream):
    names = set()
    for seed in range(40):
        question = evaluate(bpe, bpe_stream, seed=seed, cities=CITIES_UNSEEN)
        names |= {city for city, _ in SENTENCE.findall(bpe.decode(question.prompts[0]))}
    assert names <= set(CITIES_UNSEEN)
    assert len(names) > 15


def test_a_document_longer_than_the_context_says_how_much_it_needs(bpe, bpe_stream):
    settings = {"min_needles": 3, "max_needles": 3}
    with pytest.raises(
        DataError, match=r"longer than the context: 3 needles and 1 question take (\d+).*has 65"
    ) as caught:
        train_row(bpe, bpe_stream, 0, context_tokens=64, **settings)
    needed = int(re.search(r"take (\d+)", str(caught.value)).group(1))
    assert len(train_row(bpe, bpe_stream, 0, context_tokens=needed - 1, **settings)) == needed
    with pytest.raises(DataError, match="longer than the context"):
        train_row(bpe, bpe_stream, 0, context_tokens=needed - 2, **settings)
    most = needle_document_tokens(bpe, needles=3, asks=1, digits=5, cities=CITIES_SEEN)
    for seed in range(30):
        assert len(train_row(bpe, bpe_stream, seed, context_tokens=most - 1, **settings)) == most
    with pytest.raises(
        DataError, match=r"longer than the context: 4 needles and 1 question take \d+ .*has 100; .*--needles, --digits"
    ):
        evaluate(bpe, bpe_stream, length_tokens=100)


def test_impossible_requests_are_refused(bpe, bpe_stream):
    def trains(**changes):
        train_row(bpe, bpe_stream, 0, **changes)

    def asks(**changes):
        evaluate(bpe, bpe_stream, **changes)

    for made, changes, words in (
        (trains, {"digits": 0}, "digits is 0; a magic number has 1 to 9 digits"),
        (trains, {"digits": 10}, "digits is 10; a magic number has 1 to 9 digits"),
        (trains, {"min_needles": 0}, "needles from 0 to 3: allowed are 1 <= fewest <= most <= 64"),
        (trains, {"max_needles": 65}, "needles from 1 to 65"),
        (trains, {"asks": 0}, "0 questions"),
        (asks, {"depth": 1.5}, r"depth is 1\.5; it must lie between 0"),
        (asks, {"needles": 2, "asked": 3}, "asked is 3 of 2 needles"),
        (
            asks,
            {"digits": 1, "needles": 11, "length_tokens": 900},
            "11 needles of 1 digits: there are 10 numbers; add digits",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            made(**changes)
    with pytest.raises(DataError, match="the token stream is empty"):
        train_row(bpe, bpe_stream[:0], 0)


def test_numbers_that_all_occur_in_the_text_are_refused(bpe):
    stream = np.array(bpe.encode("".join(f"{number:03d}\n" for number in range(1000))))
    words = r"20 draws of 4 all occur in .* tokens of corpus text as well; use more digits"
    with pytest.raises(DataError, match=words):
        evaluate(bpe, stream, digits=3, length_tokens=5000)
    assert evaluate(bpe, stream, digits=2, length_tokens=5000).answers


def test_a_tokenizer_with_merged_digits_gives_exact_lengths_too(corpus):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": 500, "special_tokens": ["</s>"], "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(**settings, initial_alphabet=alphabet)
    numbers = " ".join(str(number * number) for number in range(3000))
    backend.train_from_iterator([corpus[0].text, numbers], trainer)
    tokenizer = Tokenizer(backend, end_of_text="</s>", pad="</s>")
    assert len(tokenizer.encode(" 1234567")) < 8
    stream = stream_of(tokenizer, corpus)
    row = train_row(tokenizer, stream, 0, min_needles=3)
    assert len(row) == 321
    needles, asked = needles_and_questions(tokenizer.decode(row))
    assert len(needles) == 3
    assert asked
    question = evaluate(tokenizer, stream)
    assert [len(prompt) for prompt in question.prompts] == [593, 593]
    assert len(SENTENCE.findall(tokenizer.decode(question.prompts[0]))) == 4
    assert question.answers[0] in tokenizer.decode(question.prompts[0][slice(*question.spans[0])])

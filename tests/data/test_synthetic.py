"""Synthetic tasks are read by solvers that see the sequences alone, and counted against the published settings."""

import numpy as np
import pytest

from difftransformer.data import DataConfig
from difftransformer.data.synthetic import MQAR, TASKS, draw_examples, synthetic_task
from difftransformer.errors import ConfigError, DataError


def drawn(name, *, training=False, seed=0, **options):
    """Inputs and targets of one setting of a task, (N, L) each."""
    (found,) = draw_examples(synthetic_task(f"synthetic:{name}", options), seed, training=training)
    assert found.inputs.shape == found.targets.shape
    assert 0 <= found.inputs.min() <= found.inputs.max() < synthetic_task(f"synthetic:{name}", options).vocab_size
    return found.inputs, found.targets


def answers_of(target_row):
    return [(place, target) for place, target in enumerate(target_row.tolist()) if target != -100]


@pytest.mark.parametrize("options", [{}, {"filler": "random"}, {"passes": 2}], ids=str)
def test_mqar(options):
    """Each key is asked for once, at an even place, and its value stands after it among the pairs."""
    inputs, targets = drawn("mqar", vocab_size=256, test=[[64, 6, 300]], **options)
    shown = 12 * options.get("passes", 1)
    for row, target_row in zip(inputs.tolist(), targets, strict=True):
        pairs = dict(zip(row[0:12:2], row[1:12:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == 6
        assert all(1 <= key < 128 <= value for key, value in pairs.items())
        assert row[:shown] == row[:12] * options.get("passes", 1)
        asked = answers_of(target_row)
        assert sorted(row[place] for place, _ in asked) == sorted(pairs)
        assert all(pairs[row[place]] == value and place >= shown and place % 2 == 0 for place, value in asked)
        others = [row[place] for place in range(shown, 64) if target_row[place] == -100]
        assert any(others) == (options.get("filler") == "random")


def test_distances_of_mqar_follow_the_power_law():
    """With one pair, the place of the query has probability proportional to i ** (a - 1)."""
    _, targets = drawn("mqar", vocab_size=64, power=0.5, test=[[22, 1, 20_000]])
    places, counts = np.unique((targets != -100).argmax(1), return_counts=True)
    assert places.tolist() == list(range(2, 22, 2))
    expected = np.arange(1, 11) ** -0.5
    expected *= 20_000 / expected.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-square of 9 degrees, p = 0.001


def test_every_key_and_value_is_drawn_equally_often():
    inputs, _ = drawn("mqar", vocab_size=20, test=[[16, 4, 9_000]])
    keys, key_counts = np.unique(inputs[:, 0:8:2], return_counts=True)
    values, value_counts = np.unique(inputs[:, 1:8:2], return_counts=True)
    assert (keys.tolist(), values.tolist()) == (list(range(1, 10)), list(range(10, 20)))
    assert np.abs(key_counts - 4_000).max() < 250
    assert np.abs(value_counts - 3_600).max() < 250


def test_published_protocols_of_mqar():
    """Lengths, pairs and numbers of examples as in Zoology's figure 2 and in figure 2 of Based."""
    task = synthetic_task("synthetic:mqar", {"protocol": "zoology-256"})
    assert (task.vocab_size, task.power, task.filler) == (8192, 0.01, "zero")
    assert (task.train, task.test) == ([(256, 16, 100_000)], [(256, 16, 3_000)])
    based = synthetic_task("synthetic:mqar", {"protocol": "based", "vocab_size": 1024})
    assert (based.vocab_size, based.filler) == (1024, "random")
    assert [count for *_, count in based.train] == [100_000, 20_000, 20_000, 20_000, 20_000]
    assert [(length, pairs) for length, pairs, _ in based.test] == [
        (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256),
    ]  # fmt: skip
    sets = draw_examples(synthetic_task("synthetic:mqar", {"protocol": "based"}), 0, training=False)
    assert [one.inputs.shape for one in sets] == [(1000, length) for length in (64, 64, 64, 128, 256, 512, 1024)]
    assert [one.at for one in sets][-1] == {"pairs": 256, "length": 1024}
    assert sorted(MQAR.published) == ["based", "zoology-128", "zoology-256", "zoology-512", "zoology-64"]


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.8])
@pytest.mark.parametrize("multi_query", [True, False])
def test_recall(noise, multi_query):
    """A reader that remembers pairs answers every repeated key, and finds no other answers."""
    special = 0 if multi_query else 1
    options = {"vocab_size": 24 + special, "noise_vocab_size": 8, "noise_share": noise, "multi_query": multi_query}
    inputs, targets = drawn("noisy-recall", length=64, test_examples=400, **options)
    assert inputs.shape[1] == 63 + special
    noisy = 0
    for row, target_row in zip(inputs.tolist(), targets, strict=True):
        memory, expected = {}, []
        slots = [*range(0, 62, 2), *([] if multi_query else [62])]
        for place in slots:
            if row[place] == 24:
                continue
            if row[place] >= 16:
                noisy += 1
                assert row[place + 1] >= 16
                continue
            assert row[place] < 8 <= row[place + 1] < 16
            if row[place] in memory:
                assert memory[row[place]] == row[place + 1]
                expected.append((place, row[place + 1]))
            memory[row[place]] = row[place + 1]
        if not multi_query:
            assert row[62] == 24
            expected = []
        expected.append((len(row) - 1, memory[row[-1]]))
        assert answers_of(target_row) == expected
    share, slots = noisy / (400 * 31), 30 / 31 * noise  # one of 31 pairs is never noise
    assert abs(share - slots) < 4 * (max(noise * (1 - noise), 1e-9) / (400 * 31)) ** 0.5


def test_recall_trains_on_several_lengths():
    options = {"length": 32, "train_lengths": [8, 16, 64], "examples": 300, "test_examples": 50}
    task = synthetic_task("synthetic:noisy-recall", options)
    train = draw_examples(task, 0, training=True)
    assert [one.inputs.shape for one in train] == [(100, 7), (100, 15), (100, 63)]
    assert [one.at["length"] for one in train] == [8, 16, 64]
    assert [one.inputs.shape for one in draw_examples(task, 0, training=False)] == [(50, 31)]


def test_training_on_all_tokens_and_on_answers():
    """All tokens are MAD's training targets: each is the next input."""
    inputs, targets = drawn("recall", training=True, examples=50, test_examples=20)
    assert (targets[:, :-1] == inputs[:, 1:]).all()
    again, answers = drawn("recall", training=True, examples=50, test_examples=20, train_on="answers")
    assert (again == inputs).all()
    scored = answers != -100
    assert 0.2 < scored.mean() < 0.5  # 8 keys among 64 pairs: nearly every value, and no key
    assert (answers[scored] == targets[scored]).all()
    assert not scored[:, 1::2].any()


def test_published_settings_of_mad():
    recall, noisy = (synthetic_task(f"synthetic:{name}", {}) for name in ("recall", "noisy-recall"))
    assert [(task.vocab_size, task.length, task.examples, task.test_examples) for task in (recall, noisy)] == [
        (16, 128, 12_800, 1_280), (32, 128, 12_800, 1_280),
    ]  # fmt: skip
    assert (noisy.noise_vocab_size, noisy.noise_share) == (16, 0.2)


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_a_function_of_the_seed_and_held_out_ones_never_train(name):
    options = {"length": 8, "examples": 500, "test_examples": 50}  # so short that unchecked draws would meet
    if name == "mqar":
        options = {"train": [[16, 2, 300]], "test": [[16, 2, 50]], "vocab_size": 16}
    held, again, other = (drawn(name, seed=seed, **options) for seed in (0, 0, 1))
    assert all((one == two).all() for one, two in zip(held, again, strict=True))
    assert (held[0] != other[0]).any()
    train, _ = drawn(name, training=True, **options)
    assert not {row.tobytes() for row in held[0]} & {row.tobytes() for row in train}


def test_too_few_different_examples():
    with pytest.raises(DataError, match=r"of 10 training examples are held out however often"):
        drawn("recall", training=True, vocab_size=2, length=4, examples=10, test_examples=10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mqar2", {}, "choose one of synthetic:mqar"),
        ("mqar", {"protocol": "zoology"}, "options.protocol: no 'zoology'; choose one of zoology-64"),
        ("mqar", {"test": [[64, 17, 5]]}, "17 pairs take an even length of at least 68"),
        ("mqar", {"vocab_size": 8}, "4 pairs take at least 10"),
        ("mqar", {"power": 0.0}, "power=0.0"),
        ("mqar", {"train": []}, "give at least one"),
        ("recall", {"lenght": 64}, "options.lenght: unknown key; did you mean length?"),
        ("recall", {"length": 63}, "length=63: give an even length"),
        ("recall", {"vocab_size": 1}, "no room for a key and a value"),
        ("noisy-recall", {"noise_share": 1.0}, "noise_share=1.0"),
        ("recall", {"noise_share": 0.1}, "noise_vocab_size=0"),
        ("recall", {"examples": 0}, "examples=0"),
    ],
)
def test_impossible_options(name, options, message):
    with pytest.raises(ConfigError) as met:
        synthetic_task(f"synthetic:{name}", options)
    assert message in str(met.value)
    assert "\n" not in str(met.value)


def test_a_negative_seed_is_one_line():
    with pytest.raises(ConfigError, match=r"split_seed=-1: synthetic:mqar is drawn by it; give 0 or more"):
        DataConfig(source="synthetic:mqar", split_seed=-1)

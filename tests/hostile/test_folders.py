"""Damaged models, runs and results: every command ends with one line and exit status 2, or does its work."""

import random

import pytest

from tests.support import damage
from tests.support.forks import Case

pytestmark = pytest.mark.slow
COUNT = 320
SHORT = ("--max-new-tokens", "3")
COMMANDS = {
    "ours": (
        ("generate", "ours", "text", *SHORT),
        ("generate", "ours", "text", "--chat", *SHORT),
        ("info", "ours"),
        ("eval", "perplexity", "ours", "--text", "text.txt", "--windows", "2"),
        ("export", "ours", "new"),
        ("convert", "ours", "new", "--to", "diffllama"),
        ("eval", "suite.yaml", "ours", "--out", "new"),
        ("train", "start.yaml", "--out", "new"),
        ("eval", "ours", "--recipe", "recipe.yaml"),
        ("tokenize", "text.txt", "--tokenizer", "ours", "--out", "new"),
        ("upcycle", "ours", "new", "--to", "diff"),
    ),
    "sharded": (
        ("generate", "sharded", "text", *SHORT),
        ("export", "sharded", "new"),
        ("convert", "sharded", "new", "--to", "diffllama"),
    ),
    "llama": (
        ("generate", "llama", "text", *SHORT),
        ("upcycle", "llama", "new", "--to", "diff", "--text", "text.txt", "--tokens", "20"),
        (
            "eval",
            "needle",
            "llama",
            "--text",
            "text.txt",
            "--lengths",
            "[80]",
            "--documents",
            "1",
            "--depths",
            "[0.5]",
            "--digits",
            "2",
        ),
        ("info", "llama"),
        ("generate", "llama", "text", "--chat", *SHORT),
    ),
    "diffllama": (
        ("generate", "diffllama", "text", *SHORT),
        ("convert", "diffllama", "new", "--to", "difftransformer"),
    ),
    "run": (
        ("train", "recipe.yaml", "--out", "run"),
        ("eval", "run"),
        ("generate", "run", "text", *SHORT),
        ("export", "run", "new"),
        ("eval", "perplexity", "run", "--text", "validation", "--windows", "2"),
        ("train", "recipe.yaml", "--out", "run", "--set", "training.steps=3"),
    ),
    "shards": (("train", "recipe.yaml", "--out", "new"),),
    "results.json": (("report", "results.json", "--out", "new"), ("report", "results.json")),
}


def cases(whole, folder):
    for index in range(COUNT):
        draw = random.Random(f"folder {index}")
        kind = draw.choice([*COMMANDS, "ours", "llama", "run"])
        place = folder / f"{index:03d}"
        place.mkdir()
        for name in ("text.txt", "recipe.yaml", "start.yaml", "suite.yaml"):
            (place / name).write_bytes((whole / name).read_bytes())
        copy = damage.copied(whole / kind, place / kind)
        done = [
            damage.damage_folder(draw, copy) if copy.is_dir() else damage.damage_json(draw, copy)
            for _ in range(draw.choice((1, 1, 2)))
            if copy.exists()
        ]
        words = draw.choice(COMMANDS[kind])
        yield Case(f"{index}: {' '.join(words)}: {', '.join(done)}", list(words), str(place))


def test_damaged_folders(whole, server, tmp_path):
    outcomes = server.run(list(cases(whole, tmp_path)))
    wrong = [f"{o.case.name}: {', '.join(o.faults())}: {o.err[-1000:]}" for o in outcomes if o.faults()]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}\n" + "\n".join(wrong)
    assert not list(tmp_path.rglob("pickled"))
    assert sum(outcome.status == 2 for outcome in outcomes) > COUNT / 2

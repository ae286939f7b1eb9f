"""Hostile recipes, suites and texts: every command ends with exit status 2 and one line, or does its work."""

import pytest
import yaml

from tests.support.forks import Case

pytestmark = pytest.mark.slow

LAUGHS = "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True))
ROOT_LAUGHS = "".join(
    f"- &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
# Whole files in place of a recipe, of a suite or of a value of --set.
DOCUMENTS = {
    "nothing": "",
    "null": "null",
    "a list": "- 1",
    "a text": "x",
    "junk": "\x80\x81",
    "NUL": "name: a\0b",
    "a tab": "\tname: x",
    "a bomb": "a: &a [x,x,x]\n" + LAUGHS,
    "a bomb as a list": "- &a [x,x,x]\n" + ROOT_LAUGHS,
    "itself": "&a [*a, *a]",
    "itself in a mapping": "&a {name: *a}",
    "brackets": "[" * 50_000,
    "dashes": "- " * 50_000,
    "braces": "{a: " * 20_000,
    "quotes": '"' * 10_001,
    "a long integer": "name: " + "9" * 5000,
    "a long hexadecimal": "name: 0x" + "f" * 9000,
    "base 60": "name: 1" + ":59" * 3000,
    "half a surrogate": 'name: "\\ud800"',
    "an object": "!!python/object/apply:os.system ['touch pickled']",
    "a date": "name: 2024-13-45",
    "integer keys": "1: 2",
    "a set": "!!set {name}",
    "merged": "<<: [*x, 3]",
    "percent": "%YAML 9.9\n---\nx",
    "two documents": "name: x\n---\nname: y",
    "megabytes": "name: " + "x" * 3_000_000,
    "binary": "name: !!binary AAAA\n",
    "duplicates": "name: x\nname: y",
    "an anchor": "name: *x",
    "control": "name: \x1b[31m",
}
KEYS = {
    "name": (
        "../../x",
        "",
        " ",
        ".",
        "..",
        "/tmp/x",
        "a/b",
        "a\\b",
        "a\nb",
        "[bold]x[/y]",
        "\x1b[31mx",
        "x" * 3000,
        3,
        None,
        "\u202ex",
    ),
    "model.hidden_size": (10**30, 10**10, 2**31, -1, 1.5, "32", True, float("nan")),
    "model.num_hidden_layers": (10**7, 10**30, 0),
    "model.rope_parameters": (
        {"rope_type": "x", "rope_theta": 1},
        {"rope_theta": float("inf")},
        [1],
        {"rope_type": "yarn", "rope_theta": 1e4},
    ),
    "model.attention_type": ("\x1b[2J", "nothing", 3),
    "training.steps": (10**30, -1, "9" * 50),
    "training.batch_tokens": (10**18, 10**30, 0, 2**62),
    "training.context_stages": ([[0, 10**18]], [[0]], [], [[5, 64]], [[0, 64], [0, 64]], "x"),
    "training.seed": (2**63, 2**62, -1),
    "training.optimizer.learning_rate": (1e308, float("inf"), "1e-3"),
    "data.source": ("../../../etc/shadow", "", "a\0b", "\x1b[31m", "hf:", "/dev/null", "/proc/self/mem", "."),
    "data.tokenizer": ("", "a\0b", "text.txt", ".", "/etc/passwd"),
    "data.folder": ("text.txt", "/dev/null/x", "/proc/x", ""),
    "data.vocab_size": (10**18, 1),
    "evaluation": (
        3,
        [3],
        [{"task": "needle", "label": "../x"}],
        [{"task": "x"}],
        {"nll": 3},
        [{"task": "needle", "options": {"documents": 10**12}}],
        [{"task": "perplexity", "options": []}],
    ),
    "compare.seeds": (10**9, 10**30),
    "start_from": ("nowhere", "a\0b", ".", "/etc", ""),
}
TEXTS = {
    "x.txt": (
        b"",
        b"\n",
        b"\x00" * 99,
        b"\xff\xfe",
        b"a" * 100_000,
        "\u202e\x1b[31m".encode() * 99,
        "\U0001f98a".encode() * 3000,
        b" " * 5000,
        b"\xed\xa0\x80",
    ),
    "x.jsonl": (
        b"{",
        b"[1]",
        b"null",
        b'{"text": 3}',
        b'{"text": "\\ud800"}',
        b'{"text": "a", "name": "\\udfff"}',
        b"[" * 100_000,
        b'{"text": ' + b"9" * 5000 + b"}",
        b'{"text": "a\\u0000b \\u001b[31m"}\n' * 50,
        b'{"text": NaN}',
        b'{"t": 1}',
        b"\xff",
        b'{"text": "' + b"x" * 300_000 + b'"}',
    ),
}
ROWS = {
    "x.csv": (
        b"",
        b"text,label",
        b"text,label\na",
        b'text,label\n"' + b"x" * 200_000 + b'",a\n' * 2,
        b'text,label\n"a',
        b"text\tlabel\na\tb",
        b"text,label\n\x00,\x00\n" * 9,
        b"label,text,label\na,b,c",
        b'text,label\n"a\nb","c\nd"\n',
        b"text,label\n\xff,a",
        b"text,label\r\na,b\rc,d\n",
        b"text,label\na,b,c,d,e\n",
    ),
    "x.jsonl": (
        b'{"text": "a", "label": "\\ud800"}',
        b'{"text": "a", "label": {"x": 1}}',
        b'{"text": [], "label": "a"}',
        b'{"text": "a", "label": 1e999}',
        b"[" * 99_999,
    ),
}


def cases(whole, folder):
    recipe = yaml.safe_load((whole / "recipe.yaml").read_text())
    recipe["training"]["steps"] = 1
    count = 0

    def case(name, words, **files):
        nonlocal count
        place = folder / f"{count:03d}" / "here"
        place.mkdir(parents=True)
        for path in ("ours", "llama", "text.txt"):
            (place / path).symlink_to(whole / path)
        for file, content in files.items():
            (place / file.replace("_", ".")).write_bytes(content)
        count += 1
        return Case(f"{name}: {' '.join(words)[:80]}", words, str(place))

    for index, (name, text) in enumerate(DOCUMENTS.items()):
        raw = text.encode("utf-8", "surrogatepass") if name != "junk" else b"\x80\x81"
        words = [
            ["train", "x.yaml"],
            ["eval", "x.yaml", "ours"],
            ["eval", "ours", "--recipe", "x.yaml"],
        ][index % 3]
        yield case(name, words, x_yaml=raw)
        if "\0" not in text and len(text) < 100_000:
            yield case(
                f"--set {name}",
                ["train", "r.yaml", "--set", f"model.rope_parameters={text}"],
                r_yaml=yaml.safe_dump(recipe).encode(),
            )
    for key, values in KEYS.items():
        *parents, last = key.split(".")
        for value in values:
            changed = yaml.safe_load(yaml.safe_dump(recipe))
            place = changed
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
            if key == "start_from":
                changed["model"] = {}
            yield case(f"{key}={str(value)[:30]!r}", ["train", "r.yaml"], r_yaml=yaml.safe_dump(changed).encode())
    for name, contents in TEXTS.items():
        for content in contents:
            yield case(
                f"{name} {content[:20]}",
                ["tokenize", name, "--tokenizer", "byte", "--out", "new"],
                **{name.replace(".", "_"): content},
            )
    for name, contents in ROWS.items():
        for content in contents:
            words = ["eval", "icl", "ours", "--train-file", name, "--items", "2", "--shots", "[1]", "--out", "new"]
            yield case(f"{name} {content[:20]}", words, **{name.replace(".", "_"): content})
    for content in TEXTS["x.txt"]:
        yield case(
            f"a prompt {content[:20]}",
            ["generate", "ours", "--prompt-file", "x.txt", "--max-new-tokens", "2"],
            x_txt=content,
        )


def test_hostile_texts(whole, server, tmp_path):
    outcomes = server.run(list(cases(whole, tmp_path)))
    wrong = [f"{o.case.name}: {', '.join(o.faults())}: {o.err[-1000:]}" for o in outcomes if o.faults()]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}\n" + "\n".join(wrong)
    assert len(outcomes) > 150
    assert sum(outcome.status == 2 for outcome in outcomes) > len(outcomes) / 2
    assert not list(tmp_path.rglob("pickled"))
    # Names of a recipe lead to its folders and nowhere else.
    assert {path.name for path in tmp_path.glob("*/*")} == {"here"}
    assert {path.name for path in tmp_path.glob("*")} == {f"{index:03d}" for index in range(len(outcomes))}

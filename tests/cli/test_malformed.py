"""Damaged models, runs, shards, recipes and texts, and malformed command lines: one line, exit status 2, nothing is run."""

import json
import shutil
import struct

import pytest
import yaml

from difftransformer_lab.cli.main import main
from tests.analysis.conftest import make_comparison
from tests.conftest import TOY
from tests.support import tiny_folders
from tests.support.simulated_study import save

pytestmark = pytest.mark.slow
PICKLE = b"cos\nsystem\n(S'touch pickled'\ntR."


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model, a text, a recipe, its run with shards, and results."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_folders.saved(folder / "ours")
    (folder / "text.txt").write_text("".join(f"line {i} tells of {i * i} things\n" for i in range(900)))
    recipe = json.loads(json.dumps(TOY))
    recipe["data"] |= {"source": str(folder / "text.txt"), "folder": str(folder / "shards"), "tokenizer": "byte"}
    recipe["training"] |= {"steps": 2, "context_stages": [[0, 64]], "checkpoint_every": 1, "retrieval": None}
    recipe["evaluation"] = []
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    save(make_comparison(seeds=1, layers=2, needle_counts=1), folder).rename(folder / "results.json")
    return folder


@pytest.fixture
def refuses(whole, tmp_path, monkeypatch, capfd):
    """Run a command in a copy of `whole`, some of whose files have other contents; it must end with 2 and one line."""

    def run(words, contents):
        here = tmp_path / "here"
        shutil.copytree(whole, here)
        recipe = (here / "recipe.yaml").read_text().replace(str(whole), str(here))
        (here / "recipe.yaml").write_text(recipe)
        for name, content in contents.items():
            (path,) = here.glob(name) if "*" in name else [here / name]
            content = content(path.read_bytes()) if callable(content) else content
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        monkeypatch.chdir(here)
        capfd.readouterr()
        status = main([*words])
        line = capfd.readouterr().err
        assert (status, line.count("\n")) == (2, 1), line
        assert "Traceback" not in line
        assert line[:-1].isprintable()
        assert len(line) < 3000
        assert not list(tmp_path.rglob("pickled"))
        assert {path.name for path in tmp_path.iterdir()} == {"here"}

    return run


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def header(**changes):
    """Change the header of a safetensors file in its first tensor."""

    def change(content):
        (size,) = struct.unpack("<Q", content[:8])
        document = json.loads(content[8 : 8 + size])
        document[min(set(document) - {"__metadata__"})] |= changes
        text = json.dumps(document).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return change


def setting(**changes):
    return lambda content: json.dumps(json.loads(content) | changes).encode()


DEEP = "[" * 100_000
JSON = {
    "empty": "", "null": "null", "list": "[1]", "half": cut, "deep": DEEP, "digits": "9" * 5000, "bytes": b"\xff\xfe",
}  # fmt: skip
WEIGHTS = {
    "cut": cut, "long header": lambda content: struct.pack("<Q", 2**63) + content[8:], "no header": b"{}",
    "pickle": PICKLE, "offsets": header(data_offsets=[0, 10**18]), "dtype": header(dtype="F99"),
    "shape": header(shape=[2**32, 2**32]), "more": lambda content: content + b"x",
}  # fmt: skip
CONFIGS = {
    "type": setting(model_type=["llama"]), "control": setting(model_type="\x1b[31m"),
    "huge": setting(hidden_size=10**30), "negative": setting(num_hidden_layers=-1), "text": setting(hidden_size="x"),
    "other weights": setting(transformers_weights="../x.bin"),
}  # fmt: skip
GENERATE, TRAIN = ("generate", "ours", "text", "--max_new_tokens", "2"), ("train", "recipe.yaml", "--out", "new")


@pytest.mark.parametrize("damage", [*JSON, *CONFIGS])
def test_configurations(refuses, damage):
    refuses(GENERATE, {"ours/config.json": (JSON | CONFIGS)[damage]})


@pytest.mark.parametrize("damage", JSON)
def test_tokenizers(refuses, damage):
    refuses(GENERATE, {"ours/tokenizer.json": JSON[damage]})


@pytest.mark.parametrize("damage", ["half", "deep", "digits"])
def test_results(refuses, damage):
    refuses(("report", "results.json"), {"results.json": JSON[damage]})


CONVERT = ("convert", "ours", "new", "--to", "diffllama")


@pytest.mark.parametrize(("words", "damage"), [
    *((GENERATE, damage) for damage in WEIGHTS), *((CONVERT, damage) for damage in ("cut", "pickle", "shape")),
])  # fmt: skip
def test_weights(refuses, words, damage):
    refuses(words, {"ours/model.safetensors": WEIGHTS[damage]})


DOCUMENTS = {
    "nothing": "", "a list": "- 1", "bytes": b"\x80\x81", "NUL": "name: a\0b", "a tab": "\tname: x",
    "brackets": "[" * 50_000, "digits": "name: " + "9" * 5000, "hexadecimal": "name: 0x" + "f" * 9000,
    "an object": "!!python/object/apply:os.system ['touch pickled']", "a date": "name: 2024-01-02",
    "no date": "name: !!timestamp x", "no truth": "name: !!bool x", "keys": "1: 2",
    "two documents": "name: x\n---\nname: y", "an anchor": "name: *x", "control": "name: \x1b[31m",
}  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS)
def test_recipes(refuses, document):
    refuses(TRAIN, {"recipe.yaml": DOCUMENTS[document]})


SETTINGS = (
    "name=../x", "model.hidden_size=" + "9" * 30, "model.rope_parameters=[1]", "model.attention_type=nothing",
    "training.batch_tokens=" + "9" * 18, "training.context_stages=[[5,64]]", "training.optimizer.learning_rate=inf",
    "training.steps=!!timestamp x", "data.source=", "data.source=/dev/null", "data.tokenizer=.", "data.folder=text.txt",
    "evaluation=[{task: x}]", "start_from=nowhere", "=", "x.y.z=1", "model.\x1b=1",
)  # fmt: skip


@pytest.mark.parametrize("change", SETTINGS)
def test_settings(refuses, change):
    refuses((*TRAIN, "--set", change), {})


TEXTS = {
    "empty.txt": b"", "encoding.txt": b"\xff\xfe", "surrogate.txt": b"\xed\xa0\x80 and more", "half.jsonl": b"{",
    "list.jsonl": b"[1]", "number.jsonl": b'{"text": 3}', "half-pair.jsonl": b'{"text": "\\ud800"}',
    "half-name.jsonl": b'{"text": "a", "name": "\\udfff"}', "deep.jsonl": DEEP.encode(),
    "digits.jsonl": b'{"text": ' + b"9" * 5000 + b"}", "bytes.jsonl": b'{"text": "\xff"}',
    "roles.jsonl": b'{"messages": [{"role": "\\u001b[31m", "content": "x"}]}', "ids.jsonl": b'{"input_ids": [1, -5]}',
    "a.jsonl.gz": b"x",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_texts(refuses, name):
    refuses(("tokenize", name, "--tokenizer", "byte", "--out", "new"), {name: TEXTS[name]})


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b""], ids=["cut", "flip", "empty"])
@pytest.mark.parametrize("name", ["shards/*/train-00000.bin", "run/checkpoints/step-000002/model.safetensors"])
def test_shards_and_checkpoints(refuses, name, damage):
    refuses(("train", "recipe.yaml", "--out", "run", "--set", "training.steps=3"), {name: damage})


LINES = (
    "", "\x1b[2J\nx", "evla", "generate", "generate nowhere text", "generate ours text --device cuda:99",
    "train recipe.yaml --set training.steps", "eval needle ours --text text.txt --lengths [" + "9" * 25 + "] --out new",
    "eval perplexity ours --text text.txt --windows -1 --out new", "convert ours new --to nothing", "export ours text.txt",
    "tokenize hf:x:y:z:w", "report text.txt", "info /dev/null", "plan recipe.yaml --gpus 0", "upcycle text.txt new --to diff",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_command_lines(refuses, line):
    refuses(line.split(" "), {})

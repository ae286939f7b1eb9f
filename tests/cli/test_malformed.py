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


def offsets(content):
    """Let the first tensor of a safetensors file end behind the file."""
    (size,) = struct.unpack("<Q", content[:8])
    document = json.loads(content[8 : 8 + size])
    document[min(set(document) - {"__metadata__"})] |= {"data_offsets": [0, 10**18]}
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def setting(**changes):
    return lambda content: json.dumps(json.loads(content) | changes).encode()


DEEP, SURROGATE = "[" * 100_000, b'{"text": "\\ud800"}'
GENERATE, TRAIN = "generate ours text --max-new-tokens 2", "train recipe.yaml --out new"
GO_ON = "train recipe.yaml --out run --set training.steps=3"


@pytest.mark.parametrize(("line", "name", "content"), [
    *((GENERATE, "ours/config.json", one) for one in (cut, DEEP, setting(model_type="\x1b[31m"), setting(hidden_size=10**30))),
    *((GENERATE, "ours/tokenizer.json", one) for one in (cut, DEEP)),
    *((GENERATE, "ours/model.safetensors", one) for one in (cut, PICKLE, offsets)),
    ("convert ours new --to diffllama", "ours/model.safetensors", PICKLE),
    ("report results.json", "results.json", cut),
    (TRAIN, "recipe.yaml", "- 1"),
    (TRAIN, "recipe.yaml", "[" * 50_000),
    (TRAIN, "recipe.yaml", "name: 0x" + "f" * 9000),
    (TRAIN, "recipe.yaml", "!!python/object/apply:os.system ['touch pickled']"),
    *((GO_ON, name, one) for name in ("shards/*/train-00000.bin", "run/checkpoints/step-000002/model.safetensors")
      for one in (cut, flip)),
    *((f"tokenize {name} --tokenizer byte --out new", name, one) for name, one in (
        ("a.txt", b"\xff\xfe"), ("a.jsonl", b"{"), ("a.jsonl", SURROGATE), ("a.jsonl", DEEP), ("a.jsonl.gz", b"x"))),
])  # fmt: skip
def test_damaged_files(refuses, line, name, content):
    refuses(line.split(" "), {name: content})


@pytest.mark.parametrize("line", [
    "", "\x1b[2J\nx", "generate nowhere text", "generate ours text --device cuda:99", "export ours text.txt", "info /dev/null",
    f"eval needle ours --text text.txt --lengths [{'9' * 25}] --out new", "upcycle text.txt new --to diff",
    *(f"{TRAIN} --set {change}" for change in (
        "name=../x", f"model.hidden_size={'9' * 30}", "training.optimizer.learning_rate=inf", "data.source=/dev/null",
        "data.folder=text.txt", "start_from=nowhere", "=", "model.\x1b=1")),
])  # fmt: skip
def test_command_lines(refuses, line):
    refuses(line.split(" "), {})

"""What the documents show works: Python blocks run, commands parse, links lead somewhere."""

import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from difftransformer_lab.cli.main import main, module_name, split_verb
from tests.support.missing import without

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<code>.*?)^ *```", re.M | re.S)
# Documents that are run as a whole, in order. A word after the language says more of a block: `tools` needs the extras eval,
# quant and tools, and is run by `make test-all`; `after` reads what a command before it wrote; `shown` is only parsed.
RUN_IN_ORDER = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "conversion", "evaluation", "evaluation-tasks", "huggingface", "upcycling", "variants",
    )
]  # fmt: skip
# The guide to reports has no blocks.
RUN_IN_ORDER += [path for path in sorted((ROOT / "docs" / "guides").glob("*.md")) if path.stem != "report"]
TOO_LONG = ("bench", "compare variants")
SHELLS = ("bash", "console", "sh", "shell")
OTHER_DEPENDENCIES = (
    "transformers", "tokenizers", "safetensors", "scipy", "yaml", "jsonargparse", "rich", "matplotlib", "jinja2",
)  # fmt: skip
# [text](target), ![picture](target), src="target" and href="target"; code is taken out before.
LINK = re.compile(r"\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)|(?:src|href|srcset)=\"([^\"]+)\"")


def name(path):
    return str(path.relative_to(ROOT))


def all_blocks(path):
    """(first line, language, words after it, code) of every block."""
    text = path.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].split("\n"))
        yield text.count("\n", 0, match.start("code")) + 1, match["language"], match["info"].split(), code


def blocks(path, *languages):
    """(first line, code) of every block of these languages."""
    return [(line, code) for line, language, _, code in all_blocks(path) if language in languages]


def commands(path):
    """(line, words) of every `difftransformer ...` command in a shell block, and of those in the text that have arguments."""
    found = [(line, words) for line, code in blocks(path, *SHELLS) for words in commands_of(code)]
    text = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
    for match in re.finditer(r"`(difftransformer\s[^`]+)`", text):
        (words,) = commands_of(" ".join(match[1].split()).replace(" TASK", " perplexity"))
        if len(words) > len(split_verb(words)[0].split()):
            found.append((text.count("\n", 0, match.start()) + 1, words))
    return found


def commands_of(code):
    """The words of every `difftransformer ...` command, continued lines joined."""
    found = []
    has_prompt = any(line.startswith("$ ") for line in code.split("\n"))
    for line in re.sub(r"\\\n\s*", " ", code).split("\n"):
        if has_prompt and not line.startswith("$ "):
            continue
        for part in re.split(r"&&|;|\|", line.removeprefix("$ ") if has_prompt else line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"\w+=\S*", words[0]):
                words.pop(0)
            if "difftransformer_lab" in words:  # python -m, torchrun ... -m
                words = ["difftransformer", *words[words.index("difftransformer_lab") + 1 :]]
            if words[:1] == ["difftransformer"]:
                found.append(words[1:])
    return found


def headings(path):
    """Anchors of a document's headings, as GitHub makes them."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    """One after the other in one namespace, in an empty folder, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, language, info, code in all_blocks(path):
        if language in ("python", "py") and not {"tools", "after"} & set(info):
            compiled = compile("\n" * (line - 1) + code, str(path), "exec")
            if "shown" not in info:
                exec(compiled, namespace)


@pytest.mark.slow
def test_the_page_of_the_layer_needs_torch_alone(tmp_path):
    code = "\n".join(code for _, code in blocks(ROOT / "docs" / "guides" / "layer.md", "python"))
    (tmp_path / "page.py").write_text(without(*OTHER_DEPENDENCIES) + code, encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def place(toy_file, tmp_path, monkeypatch):
    """An empty folder with what the documents name: a trained run and a prompt."""
    folder = tmp_path / "place"
    assert main(["train", str(toy_file), "--out", str(folder / "runs" / "demo")]) == 0
    *_, last = sorted((folder / "runs" / "demo" / "checkpoints").iterdir())
    last.rename(last.with_name("step-000500"))
    (folder / "prompt.txt").write_text("abc")
    monkeypatch.chdir(folder)
    return folder


def run_in_order(path, monkeypatch, capsys, *, tools):
    """Python blocks in one namespace and commands between them; how many of each."""
    namespace, ran = {"__name__": "__main__"}, [0, 0]
    for line, language, info, code in all_blocks(path):
        if "shown" in info or ("tools" in info and not tools):
            continue
        if language in ("python", "py"):
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
            ran[0] += 1
        for words in commands_of(code) if language in SHELLS else []:
            if shlex.join(words).startswith(TOO_LONG):
                continue
            monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
            status = main(words)
            assert status == 0, f"{name(path)}:{line}: difftransformer {shlex.join(words)}: {capsys.readouterr().err}"
            ran[1] += 1
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN_IN_ORDER, ids=name)
def test_blocks_and_commands_run_in_order(path, place, monkeypatch, capsys):
    assert sum(run_in_order(path, monkeypatch, capsys, tools=False)) >= 1


@pytest.mark.slow
@pytest.mark.tools
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # transformers, to itself
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # lm-eval
def test_blocks_that_need_tools_run_in_order(place, monkeypatch, capsys):
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    path = ROOT / "docs" / "huggingface.md"
    without = [info for *_, info, _ in all_blocks(path) if "tools" not in info]
    python, shell = run_in_order(path, monkeypatch, capsys, tools=True)
    assert python >= 4
    assert shell >= 2
    assert len(without) < len(list(all_blocks(path)))


def parsed(words, monkeypatch):
    """What the verb's function would be called with; an error of the parser otherwise."""
    calls = []
    module = importlib.import_module(f"difftransformer_lab.cli.{module_name(split_verb(words)[0])}")
    real = module.run

    def record(*args, **options):
        calls.append(options)
        return 0

    record.__signature__ = inspect.signature(real)
    record.__doc__, record.__module__, record.__qualname__ = real.__doc__, real.__module__, real.__qualname__
    record.__annotations__ = real.__annotations__
    monkeypatch.setattr(module, "run", record)
    status = main(words)
    return status, calls


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_parse(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "tasks").mkdir()  # a folder that a Python block makes, and whose absence the parser refuses
    monkeypatch.chdir(tmp_path)
    for line, words in commands(path):
        where = f"{name(path)}:{line}: difftransformer {shlex.join(words)}"
        if not words or words[0].startswith("-"):
            assert main(words) == 0, where
            continue
        if {"--help", "-h", "--list"} & set(words):
            continue
        with monkeypatch.context() as patch:
            status, calls = parsed(words, patch)
        assert status == 0, f"{where}: {capsys.readouterr().err}"
        assert len(calls) == 1
        recipe = calls[0].get("recipe")
        if recipe and recipe.startswith("recipes/"):
            assert (ROOT / recipe).is_file(), where


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_blocks_say_their_language_and_what_is_named_exists(path):
    """Scripts and modules of the repository, and targets of make."""
    text = path.read_text(encoding="utf-8")
    own = re.sub(r"^```\{include\}.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^ *```", own, re.MULTILINE)) == 2 * len(list(all_blocks(path)))
    for script in re.findall(r"\bpython ((?:benchmarks|docs|examples|tests)/\S+\.py)", text):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"-m,? (difftransformer[\w.]*|tests[\w.]+)", text):
        place = ROOT / ("" if module.startswith("tests") else "src") / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    listed = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line, code in blocks(path, *SHELLS):
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE):
            assert target in listed, f"{name(path)}:{line}: make {target}"


def test_the_readme_shows_commands():
    assert {"compare", "train"} <= {words[0] for _, words in commands(README)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]+`", "", BLOCK.sub("", path.read_text(encoding="utf-8")))
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), f"{name(path)}: {target}"
        assert not anchor or place.suffix != ".md" or anchor in headings(place), f"{name(path)}: {target}"

"""What the documents show works: Python blocks run, commands parse, links lead somewhere."""

import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from difftransformer.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "console", "sh", "shell")
# [text](target), ![picture](target), src="target" and href="target"; code is taken out before.
LINK = re.compile(r"\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)|(?:src|href|srcset)=\"([^\"]+)\"")


def name(path):
    return str(path.relative_to(ROOT))


def blocks(path, *languages):
    """(first line, code) of every block of these languages."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        if match["language"] in languages:
            indent = len(match["indent"])
            code = "\n".join(line[indent:] for line in match["code"].split("\n"))
            found.append((text.count("\n", 0, match.start("code")) + 1, code))
    return found


def commands(path):
    """(line, words) of every `difftransformer ...` command in a shell block, continued lines joined."""
    found = []
    for start, code in blocks(path, *SHELLS):
        has_prompt = any(line.startswith("$ ") for line in code.split("\n"))
        joined = re.sub(r"\\\n\s*", " ", code)
        for line in joined.split("\n"):
            text = line.removeprefix("$ ") if has_prompt else line
            if has_prompt and not line.startswith("$ "):
                continue
            for part in re.split(r"&&|;|\|", text):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"\w+=\S*", words[0]):
                    words.pop(0)
                if words[1:3] == ["-m", "difftransformer"]:
                    words = ["difftransformer", *words[3:]]
                if words[:1] == ["difftransformer"]:
                    found.append((start, words[1:]))
    return found


def headings(path):
    """Anchors of a document's headings, as GitHub makes them."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_is_a_readme():
    assert README.is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    """One after the other in one namespace, in an empty folder, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(path, "python", "py"):
        compiled = compile("\n" * (line - 1) + code, str(path), "exec")
        exec(compiled, namespace)


def parsed(words, monkeypatch):
    """What the verb's function would be called with; an error of the parser otherwise."""
    calls = []
    module = importlib.import_module(f"difftransformer.cli.{words[0].replace('-', '_')}")
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
def test_commands_parse(path, monkeypatch, capsys):
    for line, words in commands(path):
        where = f"{name(path)}:{line}: difftransformer {shlex.join(words)}"
        if not words or words[0].startswith("-"):
            assert main(words) == 0, where
            continue
        assert words[0] in VERBS, where
        if {"--help", "-h"} & set(words):
            continue
        with monkeypatch.context() as patch:
            status, calls = parsed(words, patch)
        assert status == 0, f"{where}: {capsys.readouterr().err}"
        assert len(calls) == 1
        recipe = calls[0].get("recipe")
        if recipe and recipe.startswith("recipes/"):
            assert (ROOT / recipe).is_file(), where


def test_the_readme_shows_commands():
    assert {"compare", "train"} <= {words[0] for _, words in commands(README)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_make_targets_exist(path):
    listed = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line, code in blocks(path, *SHELLS):
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE):
            assert target in listed, f"{name(path)}:{line}: make {target}"


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

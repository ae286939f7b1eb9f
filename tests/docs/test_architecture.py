"""What the architecture page and the contributor's guide name exists, and their figures show what the script says."""

import ast
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import load

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src" / "difftransformer", ROOT / "src" / "difftransformer_lab")
GUIDES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
FIGURES = ROOT / "docs" / "figures"
COMMANDS = ("difftransformer", "make", "python", "pip")


def code_spans(path):
    """Everything between backticks, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return sorted(set(re.findall(r"`([^`\n]+)`", text)))


@cache
def names_in(path):
    """Names that a Python file defines, methods as Class.method; words that a C++ file holds."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return frozenset(re.findall(r"\w+", text))
    found = set()

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
                found.update(prefix + name.id for name in names if isinstance(name.ctx, ast.Store))
            elif isinstance(child, ast.arg):
                found.add(child.arg)
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return frozenset(found)


@cache
def all_names():
    """Names that any file of the package defines, methods also without their class, and those of modules and packages."""
    paths = [path for source in SOURCES for path in source.rglob("*")]
    names = {name for path in paths if path.suffix in (".py", ".cpp", ".h") for name in names_in(path)}
    return names | {name.rpartition(".")[2] for name in names} | {path.stem for path in (*SOURCES, *paths)}


@cache
def is_written(name):
    """Whether a file of the package names a file that it writes or reads."""
    paths = (path for source in SOURCES for path in source.rglob("*.py"))
    return any(f'"{name}"' in path.read_text(encoding="utf-8") for path in paths)


def place_of(path):
    """A path as the guides write it: from the repository's root, or from that of one of the two packages."""
    return next((base / path for base in (ROOT, *SOURCES) if (base / path).exists()), None)


def missing(span):
    """Why a code span names nothing that exists, or None."""
    if span.split()[0] in COMMANDS or span.startswith("--"):
        return None
    if re.fullmatch(r"[\w./-]+\.(py|md|toml|yaml|txt|h|cpp|json|j2)|[\w./-]+/", span):
        return None if place_of(span) or is_written(span) else "no such path"
    if re.fullmatch(r"_\w+", span):  # the end of names
        return None if any(name.endswith(span) for name in all_names()) else "no name ends so"
    if re.fullmatch(r"[\w.]+", span):
        known = span in all_names() or span.rpartition(".")[2] in all_names()
        return None if known else "no such name in the package"
    return None


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_named_files_and_functions_exist(path):
    found = {span: missing(span) for span in code_spans(path)}
    assert {span: why for span, why in found.items() if why} == {}


def test_the_functions_and_tests_beside_the_equations_exist():
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for test in re.findall(r"`(tests/[\w./]+)`", text):
        assert (ROOT / test).exists(), test
    for name in re.findall(r"`(difftransformer(?:_lab)?\.[\w.]+)`", text):
        assert pkgutil.resolve_name(name) is not None


def test_a_wrong_path_and_a_wrong_name_are_found():
    assert all(missing(name) for name in ("ops/no_such_file.py", "no_such_function", "no_such_folder/"))
    assert not any(missing(name) for name in ("ops/reference.py", "differential_attention"))


@pytest.fixture(scope="module")
def script():
    return load(FIGURES / "architecture.py")


def test_the_steps_of_both_walks_exist(script):
    for step in (*script.QUERY, *script.TOKEN):
        assert step.name in names_in(place_of(step.file)), f"{step.file}: {step.name}"


def test_committed_figures_show_the_texts_of_the_script(script):
    for name, draw in script.FIGURES.items():
        written = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
        shown = {text.strip() for text in re.findall(r"<!--(.*?)-->", written, re.DOTALL)}
        drawn = {text.get_text() for axes in draw().axes for text in axes.texts if text.get_text()}
        assert {text.replace("--", "- -") for text in drawn} == {text.replace("--", "- -") for text in shown}, (
            f"{name}.svg is not what docs/figures/architecture.py draws; run the script"
        )

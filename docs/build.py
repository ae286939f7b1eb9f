"""Build the documentation site: `make docs`, or `python docs/build.py FOLDER`.

Sphinx reads a copy of this folder to which pages are added: the API reference, with a page for each package, and the
changelog and the contributor's guide of the repository. The navigation is the list of links in index.md. Every warning is
an error.
"""

import ast
import importlib
import inspect
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LIBRARY = ("ops", "attention", "model", "families", "hub", "data", "train")
LABORATORY = ("evals", "studies", "report", "bench", "results")
PACKAGES = (*(f"difftransformer.{name}" for name in LIBRARY), *(f"difftransformer_lab.{name}" for name in LABORATORY))
# Modules whose public names are documented on their package's page, and which the package itself does not import.
MODULES = {"difftransformer.attention": {"encoder": ["DifferentialEncoderLayer"]}}
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#]+\.(?:md|ipynb))\)", re.MULTILINE)


def public_names(package: str) -> list[str]:
    """Names that a package imports from its own modules or defines in its `__init__.py`: its public names."""
    tree = ast.parse((ROOT / "src" / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    blocks = [tree, *(node for node in tree.body if isinstance(node, ast.If))]
    found = set()
    for node in (node for block in blocks for node in block.body):
        if isinstance(node, ast.ImportFrom) and is_own(node, package):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    public = (name for name in found if not name.startswith("_"))
    return sorted(public, key=lambda name: (name.isupper(), name[0].isupper(), name))  # functions, classes, constants


def is_own(node: ast.ImportFrom, package: str) -> bool:
    """Whether an import takes names from modules of the package itself."""
    return node.level == 1 or (node.module or "").startswith(f"{package}.")


def entry(package: str, name: str) -> str:
    """The directive that documents one name."""
    thing = getattr(importlib.import_module(package), name)
    full = f"{package}.{name}"
    if inspect.isclass(thing):
        return f".. autoclass:: {full}\n   :members:\n"
    if callable(thing):
        return f".. autofunction:: {full}\n"
    entries = ", ".join(f"``{key}``" for key in thing) if isinstance(thing, dict | tuple | list) else f"``{thing!r}``"
    return f".. py:data:: {name}\n   :type: {type(thing).__name__}\n\n   {entries}\n"


def write_api(folder: Path) -> None:
    """Write a page for each package, in reStructuredText as the docstrings are."""
    folder.mkdir()
    for package in PACKAGES:
        parts = [package, "=" * len(package), "", f".. automodule:: {package}", ""]
        parts += [entry(package, name) for name in public_names(package)]
        parts += [
            entry(f"{package}.{module}", name) for module, names in MODULES.get(package, {}).items() for name in names
        ]
        (folder / f"{package}.rst").write_text("\n".join(parts), encoding="utf-8")


def write_pages(folder: Path) -> None:
    """Copy this folder, bring in pages of the repository, and turn the list of index.md into the navigation."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "static"))
    write_api(folder / "api")
    for name, page in OUTSIDE.items():
        (folder / page).write_text((ROOT / name).read_text(encoding="utf-8").replace("](docs/", "]("), encoding="utf-8")
    for page in folder.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name, own in OUTSIDE.items():
            text = re.sub(
                rf"\]\((\.\./)+{re.escape(name)}", f"]({'../' * len(page.relative_to(folder).parts[1:])}{own}", text
            )
        page.write_text(text, encoding="utf-8")
    index = folder / "index.md"
    text = index.read_text(encoding="utf-8")
    index.write_text(text + navigation(text), encoding="utf-8")
    api = folder / "api.md"
    pages = "".join(f"api/{package}\n" for package in PACKAGES)
    api.write_text(f"{api.read_text(encoding='utf-8')}\n```{{toctree}}\n:hidden:\n\n{pages}```\n", encoding="utf-8")


def navigation(text: str) -> str:
    """A hidden table of contents for each section of index.md that lists pages."""
    trees = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        caption, pages = section.partition("\n")[0], ENTRY.findall(section)
        lines = "".join(f"{title} <{page}>\n" for title, page in pages)
        trees.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}```\n" if pages else "")
    return "".join(trees)


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    # The notebooks' models are small. Where other programs take the cores, threads that wait for one another lose minutes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as place:
        pages = Path(place) / "pages"
        write_pages(pages)
        shutil.rmtree(target, ignore_errors=True)
        words = ["-b", "html", "-c", str(DOCS), "-d", str(Path(place) / "trees"), "-W", "--keep-going", "-q"]
        return sphinx([*words, str(pages), str(target)])


if __name__ == "__main__":
    sys.exit(main())

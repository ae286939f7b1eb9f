"""Build the documentation site: `make docs`, or `python docs/build.py FOLDER`.

Sphinx reads a copy of this folder to which pages are added: the API reference, with a page for each package, and the
changelog and the contributor's guide of the repository. The navigation is the list of links in index.md, where indented
items belong to the page above them. Pictures have a second form for dark pages: an SVG in other colours, or the PNG of that
name with `-dark`. Every warning is an error.
"""

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from inserted import Inserted

import difftransformer
from difftransformer import __version__
from difftransformer_lab.plots import dark_svg

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LIBRARY = ("ops", "attention", "model", "families", "hub", "data", "train", "errors")
LABORATORY = ("evals", "studies", "analysis", "results")
PACKAGES = (*(f"difftransformer.{name}" for name in LIBRARY), *(f"difftransformer_lab.{name}" for name in LABORATORY))
# Modules whose public names are documented on their package's page, and which the package itself does not import.
MODULES = {"difftransformer.attention": {"encoder": ["DifferentialEncoderLayer"]}}
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
API = "api.md"
EXPLORER = "explorer.html"
FRAME = f"""<iframe class="explorer" src="{EXPLORER}" title="Attention maps of every head of demo" loading="lazy"></iframe>"""
PICTURE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+)\.(svg|png)\)")
ENTRY = re.compile(r"^( *)- \[([^\]]+)\]\(([^)#]+\.(?:md|ipynb))\)", re.MULTILINE)


def public_names(package: str) -> list[str]:
    """Names that a package imports from its own modules or defines in its `__init__.py`, or a module in its file."""
    place = ROOT / "src" / package.replace(".", "/")
    tree = ast.parse(
        (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text(encoding="utf-8")
    )
    blocks = [tree, *(node for node in tree.body if isinstance(node, ast.If))]
    found = set()
    for node in (node for block in blocks for node in block.body):
        if isinstance(node, ast.ImportFrom) and is_own(node, package):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    public, first = (name for name in found if not name.startswith("_")), difftransformer.__all__
    return sorted(public, key=lambda name: (name not in first, name.isupper(), name[0].isupper(), name))


def summary(package: str) -> str:
    """The first sentence of a package's docstring."""
    words = " ".join((importlib.import_module(package).__doc__ or "").split("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".")


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
    """Write a page for each package, in reStructuredText as the docstrings are, and their list."""
    folder.mkdir()
    shown = "".join(f"- [`{package}`](api/{package}.rst): {summary(package)}\n" for package in PACKAGES)
    words = "Public names are those that a package imports in its `__init__.py`. Those of `difftransformer` itself come first."
    (folder.parent / API).write_text(f"# API\n\n{words}\n\n{shown}", encoding="utf-8")
    for package in PACKAGES:
        title = package.rpartition(".")[2]  # short enough for a telephone
        parts = [title, "=" * len(title), "", f".. automodule:: {package}", ""]
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
    inserted = Inserted(folder)
    for page in folder.rglob("*.md"):
        text = inserted.fill(page.read_text(encoding="utf-8"))
        for name, own in OUTSIDE.items():
            text = re.sub(
                rf"\]\((\.\./)+{re.escape(name)}", f"]({'../' * len(page.relative_to(folder).parts[1:])}{own}", text
            )
        page.write_text(with_dark_pictures(text, page.parent), encoding="utf-8")
    page = folder / "how-it-works.md"
    page.write_text(page.read_text("utf-8").replace("<!-- explorer -->", FRAME), encoding="utf-8")
    for page in (folder / "notebooks").glob("*.ipynb"):
        notebook = json.loads(page.read_text("utf-8"))
        notebook["cells"][0]["source"].append(colab_link(page.name))
        page.write_text(json.dumps(notebook), encoding="utf-8")
    for page, tree in navigation(folder).items():
        with (folder / page).open("a", encoding="utf-8") as file:
            file.write(tree)


def with_dark_pictures(text: str, folder: Path) -> str:
    """Let each picture be followed by its dark form; the theme shows one of them."""

    def pair(match: re.Match) -> str:
        words, name, ending = match.groups()
        if ending == "svg":
            svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
            (folder / f"{name}-dark.svg").write_text(dark_svg(svg), encoding="utf-8")
        return f"![{words}]({name}.{ending}){{.only-light}}\n![{words}]({name}-dark.{ending}){{.only-dark}}"

    return PICTURE.sub(pair, text)


def colab_link(notebook: str, root: Path = ROOT) -> str:
    """The link that opens a notebook in Colab; empty unless pyproject.toml names a repository on GitHub under its urls."""
    repository = (
        tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {}).get("Repository", "")
    )
    if not repository.startswith("https://github.com/"):
        return ""
    revision = "main" if ".dev" in __version__ else f"v{__version__}"
    place = repository.removeprefix("https://github.com/").rstrip("/")
    address = f"https://colab.research.google.com/github/{place}/blob/{revision}/docs/notebooks/{notebook}"
    return f"\n\n[Open in Colab]({address})"


def write_explorer(path: Path) -> None:
    """Write the maps of the shipped model, which `how-it-works.md` shows in a frame."""
    from difftransformer.hub import open_model, open_tokenizer, source_folder
    from difftransformer.ops import use_backend
    from difftransformer_lab.explorer import maps

    with source_folder("demo") as folder, use_backend("reference"):
        maps(open_model(folder), open_tokenizer(folder), names=("demo",)).save(path)


def run_notebooks(folder: Path, place: Path) -> None:
    """Run each notebook once, two at a time, and keep the outputs, which are not in git."""
    profile = place / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n", encoding="utf-8")  # errors alone
    os.environ["IPYTHONDIR"] = str(profile.parent)
    paths = sorted(folder.glob("*.ipynb"))
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(run_notebook, paths, [place / path.stem for path in paths]))


def run_notebook(path: Path, work: Path) -> None:
    """Run a notebook in a folder of its own."""
    import nbformat
    from nbclient import NotebookClient

    started, notebook = time.monotonic(), nbformat.read(path, as_version=4)
    work.mkdir()
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(work)}}).execute()
    nbformat.write(notebook, path)
    print(f"{path.name} ran for {time.monotonic() - started:.0f} seconds", flush=True)


def navigation(folder: Path) -> dict[str, str]:
    """Hidden tables of contents, by the page that they belong to."""
    trees = {"index.md": ""}
    below = {API: [("", f"api/{package}") for package in PACKAGES]}
    below["findings.md"] = [
        (f"Study {page.stem.replace('-', ', ', 1).replace('-', ' ')}", str(page.relative_to(folder)))
        for page in sorted(folder.glob("studies/*.md"))
    ]
    for section in re.split(r"^## ", (folder / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        caption, _, listed = section.partition("\n")
        top: list[tuple[str, str]] = [("API", API)] if caption == "Reference" else []
        for indent, title, page in ENTRY.findall(listed):
            (below.setdefault(top[-1][1], []) if indent else top).append((title, page))
        if top:
            trees["index.md"] += table_of_contents(top, caption="" if caption.startswith("#") else caption)
    return trees | {page: table_of_contents(pages) for page, pages in below.items() if pages}


def table_of_contents(pages: list[tuple[str, str]], caption: str = "") -> str:
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    lines = "".join(f"{title} </{page}>\n" if title else f"/{page}\n" for title, page in pages)
    return f"\n```{{toctree}}\n{options}\n{lines}```\n"


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    # The notebooks' models are small. Where other programs take the cores, threads that wait for one another lose minutes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    target, start = Path(sys.argv[1]).absolute(), time.monotonic()
    print("The site takes about 5 minutes on two idle cores; most of it are the notebooks, which run once.", flush=True)
    with tempfile.TemporaryDirectory() as place:
        pages = Path(place) / "docs"
        write_pages(pages)
        if os.environ.get("DIFFTRANSFORMER_NOTEBOOKS") != "off":
            run_notebooks(pages / "notebooks", Path(place) / "run")
        shutil.copy(ROOT / "README.md", place)  # a part of which worth.md includes
        shutil.rmtree(target, ignore_errors=True)
        words = ["-b", "html", "-c", str(DOCS), "-d", str(Path(place) / "trees"), "-W", "--keep-going", "-q"]
        status = sphinx([*words, str(pages), str(target)])
        write_explorer(target / EXPLORER)
        print(f"{target / 'index.html'}, after {time.monotonic() - start:.0f} seconds")
        return status


if __name__ == "__main__":
    sys.exit(main())

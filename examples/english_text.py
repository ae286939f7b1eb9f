"""Make a folder of English prose from Debian's documentation packages, which are free and need no model hub.

    python examples/english_text.py english
    difftransformer tokenize english --vocab-size 2048

Needs Debian or Ubuntu (a container will do), but not root. apt-get downloads the packages, half a gigabyte in Debian 12. Their
HTML, or else their plain text, becomes one file per document and one line per paragraph, without code, tables and repeated
paragraphs. `english/packages.tsv` says which versions of the packages the text is from. A package that the system does not
have is named and left out, since names differ between releases.
"""

import argparse
import gzip
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from difftransformer.data.held_out import LONG_CHARACTERS, is_table_row, line_hashes
from difftransformer.data.packages import MOST_SEEN, MOST_TABLE

PACKAGES = """
ada-reference-manual-2012 anarchism apache2-doc argyll-doc autoconf-doc bash-doc bind9-doc borgbackup-doc brz-doc
c++-annotations-html cinder-doc clang-16-doc clisp-doc cmake-doc crawl-common csound-doc debian-faq debian-handbook
debian-policy developers-reference dict-devil dict-foldoc docutils-doc dpdk-doc emscripten-doc erlang-doc
exim4-doc-html fai-doc ganeti-doc gap-doc gettext-doc git-doc gitmagic gnu-standards gnustep-base-doc grass-doc
harden-doc haskell98-report installation-guide-amd64 kea-doc krb5-doc libboost1.81-doc libreoffice-help-en-us
libvirt-doc linux-doc-6.1 mailman3-doc maxima-doc mh-book mit-scheme-doc neutron-doc nodejs-doc nova-doc ntpsec-doc
numba-doc nut-doc octave-doc openafs-doc perl-doc png-definitive-guide postfix-doc postgresql-doc-15
python-celery-doc python-django-doc python-hypothesis-doc python-pytest-doc python-scipy-doc python-scrapy-doc
python-sqlalchemy-doc python-sympy-doc python3.11-doc r-doc-html renpy-doc rsyslog-doc sbcl-doc shorewall-doc
slurm-wlm-doc sphinx-doc sqlite3-doc swi-prolog-doc swift-doc systemtap-doc user-mode-linux-doc varnish-doc
wireshark-doc xen-doc zoneminder-doc zsh-doc
"""
"""Packages of Debian 12 (main)."""
HTML, TEXT = r"\.x?html?(\.en)?(\.gz)?", r"\.(txt|pod|dict)(\.gz|\.dz)?"
FOREIGN = r"/(?!en)[a-z]{2}[-_][A-Z]{2}/"
LEFT_OUT = r"head|script|style|nav|header|footer|pre|table|form|button|svg|math"
INLINE = r"a|abbr|b|big|cite|code|dfn|em|font|i|img|kbd|q|s|samp|small|span|strike|strong|sub|sup|tt|u|var|wbr"
FREQUENT = frozenset({
    "the", "of", "and", "to", "a", "in", "is", "that", "for", "it", "as", "with", "on", "be", "this", "are", "by", "or", "from",
    "not",
})  # fmt: skip
LEAST_FREQUENT = 0.2
"""Less than this share of the words of API listings and of other languages are the most frequent English words."""
LEAST_WORDS = 100


def blocks(page: str) -> list[str]:
    """Return the text of each block of an HTML page, without code and tables."""
    page = re.sub(rf"<!--.*?-->|<({LEFT_OUT})\b.*?</\1\s*>", "<p>", page, flags=re.DOTALL | re.IGNORECASE)
    page = re.sub(rf"</?({INLINE})\b[^>]*>", "", page, flags=re.IGNORECASE)
    return [html.unescape(block) for block in re.split(r"</?[A-Za-z!?][^>]*>", page)]


def prose(paragraphs: list[str]) -> list[str]:
    """Return the paragraphs that are sentences: five words or more and a full stop, as in C4 (arXiv:1910.10683)."""
    lines = dict.fromkeys(" ".join(paragraph.split()) for paragraph in paragraphs)
    ends = ((line, line.rstrip("\"')\u201d\u2019").endswith((".", "!", "?"))) for line in lines)
    return [line for line, ended in ends if ended and line.count(" ") > 3 and len(line) >= LONG_CHARACTERS]


def read(folder: Path, seen: set[int]) -> Iterator[tuple[Path, str]]:
    """Yield path and text of the English documents of an unpacked package, without paragraphs in `seen`, which grows."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if not re.search(FOREIGN, str(path))]
    pages = [path for path in files if re.search(HTML + "$", path.name)]
    for path in pages or [path for path in files if re.search(TEXT + "$", path.name)]:
        data = path.read_bytes()
        try:
            text = (gzip.decompress(data) if path.suffix in (".gz", ".dz") else data).decode("utf-8")
        except (UnicodeDecodeError, gzip.BadGzipFile):
            continue
        text = re.sub(r"\b[A-Z]<([^<>]*)>", r"\1", text) if path.suffix == ".pod" else text
        lines = prose(blocks(text) if pages else re.split(r"\n\s*\n", text))
        words = " ".join(lines).lower().split()
        if len(words) < LEAST_WORDS or sum(word in FREQUENT for word in words) < LEAST_FREQUENT * len(words):
            continue
        hashes = list(line_hashes(lines))
        new = [line for line, number in zip(lines, hashes, strict=True) if number not in seen]
        seen.update(hashes)
        if len(new) >= (1 - MOST_SEEN) * len(lines) and sum(map(is_table_row, lines)) <= MOST_TABLE * len(lines):
            yield path.relative_to(folder), "\n".join(new) + "\n"


def run(*command: str | Path, folder: Path | None = None) -> str:
    """Return what a command prints, or end with its last error."""
    try:
        done = subprocess.run(command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is not there; this needs Debian or Ubuntu, or a container of one of them")
    if done.returncode:
        error = (done.stderr.strip() or "no message").splitlines()[-1].removeprefix("E: ")
        sys.exit(
            f"{command[0]}: {error} (if its lists of packages are old or missing, run `apt-get update` as root first)"
        )
    return done.stdout


def main() -> None:
    """Download the packages and write their text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make")
    out = parser.parse_args().out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        sys.exit(f"{out} exists and is not an empty folder; name another one")
    shown = run("apt-cache", "show", "--no-all-versions", *PACKAGES.split())
    versions = dict(re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)$", shown, re.MULTILINE))
    if missing := [name for name in PACKAGES.split() if name not in versions]:
        print(f"left out, as apt does not have them: {', '.join(missing)}", file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        (debs := Path(temporary, "debs")).mkdir()
        (made := Path(temporary, "made")).mkdir()
        print(f"downloading {len(versions)} packages", flush=True)
        run("apt-get", "download", *(f"{name}={version}" for name, version in versions.items()), folder=debs)
        rows, seen = ["package\tversion\tsha256\tdocuments\tcharacters"], set[int]()
        for name, version in versions.items():
            (deb,) = debs.glob(f"{name}_*.deb")
            run("dpkg-deb", "-x", deb, debs / name)
            texts = dict(read(debs / name, seen))
            for path, text in texts.items():
                target = made / name / f"{path}.txt"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            shutil.rmtree(debs / name)
            characters = sum(map(len, texts.values()))
            sha256 = hashlib.sha256(deb.read_bytes()).hexdigest()
            rows.append(f"{name}\t{version}\t{sha256}\t{len(texts)}\t{characters}")
            print(f"{name} {version}: {len(texts):,} documents, {characters:,} characters", flush=True)
        (made / "packages.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        made.rename(out)


if __name__ == "__main__":
    main()

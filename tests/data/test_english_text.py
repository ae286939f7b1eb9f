"""`examples/english_text.py`: what it keeps of packages made here, and what it says when apt fails."""

import gzip
import hashlib
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "english_text.py"
SENTENCE = "This is sentence {} of the {} and it says what is in the book that you have in a hand or in the other."
APT = {
    "apt-cache": """printf 'Package: git-doc\\nSource: git\\nVersion: 1:2\\n\\nPackage: perl-doc\\nVersion: 3\\n'""",
    "apt-get": """test "$*" = "download git-doc=1:2 perl-doc=3" && touch git-doc_1%3a2_all.deb perl-doc_3_all.deb""",
    "dpkg-deb": """name=${2##*/}; cp -r "$FILES/${name%%_*}" "$3" """,
}


def sentences(word, first, count):
    return [SENTENCE.format(number, word) for number in range(first, first + count)]


def page(*paragraphs):
    shown = "".join(f"<p>{paragraph}\n" for paragraph in paragraphs)
    head = "<head><title>A title of this page that is a sentence.</title><style>p { of the }</style></head>"
    code = "<pre>if it is the code, then it is not in the text.</pre><nav><ul><li>See the next page of this book.</ul></nav>"
    return f"<html>{head}<body><h1>Heading</h1>{shown}<script>var a = 'b of the c and d.';</script>{code}</body></html>"


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script with commands of our own in place of apt's, and returns the error that it ends with."""
    commands = tmp_path / "commands"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setenv("FILES", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "out" / "english")])

    def run(**changed):
        for name, body in {**APT, **changed}.items():
            (commands / name).write_text(f"#!/bin/sh\n{body}\n")
            (commands / name).chmod(0o755)
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as error:
            return error.code
        return None

    return run


def test_what_is_kept(tmp_path, run, capsys):
    apples, pears = sentences("apple", 0, 12), sentences("pear", 0, 12)
    french = [
        f"Le livre numéro {number} est sur la table de la cuisine avec les autres livres." for number in range(20)
    ]
    git, perl = tmp_path / "git-doc", tmp_path / "perl-doc"
    write(
        git,
        doc__a_html=page(
            "<b>This</b> is <a href='.'>of &amp; the</a>\n  <code>git add</code> book.", "Too short.", *apples
        ),
        doc__b_html=page(*apples[:9], *pears[:3]),  # three quarters stood in a
        doc__c_html_gz=page(*apples[:2], *pears[3:]),
        doc__copy_html=page(*apples),
        doc__french_html=page(*french),
        doc__source_txt="\n\n".join(sentences("plum", 0, 12)),  # a package with pages has no other text
    )
    write(
        perl,
        doc__perl_pod="=head1 NAME\n\nThis is where\nC<if> is the name of a book.\n\n"
        + "\n\n".join(sentences("plum", 12, 12)),
    )
    assert run() is None
    out = tmp_path / "out" / "english"
    found = {path.relative_to(out).as_posix(): path.read_text("utf-8") for path in out.rglob("*.txt")}
    assert {name: text.splitlines() for name, text in found.items()} == {
        "git-doc/doc/a.html.txt": ["This is of & the git add book.", *apples],
        "git-doc/doc/c.html.gz.txt": pears[3:],
        "perl-doc/doc/perl.pod.txt": ["This is where if is the name of a book.", *sentences("plum", 12, 12)],
    }
    empty = hashlib.sha256().hexdigest()
    first, second = (sum(len(text) for name, text in found.items() if name.startswith(one)) for one in ("git", "perl"))
    assert (out / "packages.tsv").read_text("utf-8").splitlines()[1:] == [
        f"git-doc\t1:2\t{empty}\t2\t{first}",
        f"perl-doc\t3\t{empty}\t1\t{second}",
    ]
    assert capsys.readouterr().err.startswith(
        "left out, as apt does not have them: ada-reference-manual-2012, anarchism,"
    )
    assert [path.name for path in out.parent.iterdir()] == ["english"]
    assert run() == f"{out} exists and is not an empty folder; name another one"


@pytest.mark.parametrize(("command", "says"), [("apt-cache", "No packages found"), ("apt-get", "Failed to fetch it")])
def test_failures_of_apt_in_one_line(tmp_path, run, command, says):
    advice = "(if its lists of packages are old or missing, run `apt-get update` as root first)"
    assert (
        run(**{command: f"echo 'W: It is slow' >&2; echo 'E: {says}' >&2; exit 100"}) == f"{command}: {says} {advice}"
    )
    assert not list((tmp_path / "out").glob("*"))


def test_a_system_without_apt(tmp_path, run, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run() == "apt-cache is not there; this needs Debian or Ubuntu, or a container of one of them"

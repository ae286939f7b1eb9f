"""Where a result was measured: the commit by git's own word, the compiler by its own, and the work of other processes."""

import io
import shutil
import subprocess
from pathlib import Path

import pytest

from difftransformer.errors import ConfigError
from difftransformer.ops.build import Library
from difftransformer_lab import environment as module
from difftransformer_lab.results import Environment

ROOT = Path(__file__).parents[1]


def git(*words, cwd=ROOT):
    return subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def in_folder(monkeypatch):
    """Lets `commit` look as if the package lay in a folder."""

    def move(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(module.__file__, folder)
        monkeypatch.setattr(module, "__file__", str(folder / Path(module.__file__).name))
        module.commit.cache_clear()
        return module.commit()

    yield move
    module.commit.cache_clear()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_commit_is_that_of_the_checkout():
    found = module.environment().commit
    assert found.removesuffix("-dirty") == git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/results")
    assert found.endswith("-dirty") == bool(changed + git("status", "--porcelain", "--", ":/src", ":/recipes"))


def test_the_runs_of_a_plan_need_committed_code(in_folder, tmp_path, monkeypatch):
    """Records of runs may change, and files beside the code; a commit that only HEAD holds is soon gone."""
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'user.name=a' 'user.email=a@b.c'")

    def refusal():
        module.commit.cache_clear()
        try:
            module.check_committed()
        except ConfigError as error:
            return str(error)

    records, new, readme = tmp_path / "docs/results/a.json", tmp_path / "src/new file.py", tmp_path / "README"
    records.parent.mkdir(parents=True)
    records.write_text("{}")
    readme.write_text("")
    git("init", "--quiet", str(tmp_path))
    in_folder(tmp_path / "src" / "package")
    git("add", ".", cwd=tmp_path)
    git("commit", "--quiet", "-m", "all", cwd=tmp_path)
    records.write_text("changed")
    (tmp_path / "notes").write_text("")
    assert refusal() is None
    assert module.commit() == git("rev-parse", "HEAD", cwd=tmp_path)
    again = "then start the study again: its records name a commit"
    for path, said in ((readme, "README"), (new, '"src/new file.py"')):
        path.write_text("changed")
        assert refusal() == f"the plan's runs need committed code, and {said} is not; commit or stash it, {again}"
        assert module.commit() == git("rev-parse", "HEAD", cwd=tmp_path) + "-dirty"
        git("add", str(path), cwd=tmp_path)
        git("commit", "--quiet", "-m", "more", cwd=tmp_path)
        assert refusal() is None
    git("checkout", "--quiet", "--detach", cwd=tmp_path)
    assert refusal() is None  # the branch holds it
    readme.write_text("again")
    git("commit", "--quiet", "-a", "-m", "of no branch", cwd=tmp_path)
    here = git("rev-parse", "HEAD", cwd=tmp_path)
    assert refusal() == f"no branch holds commit {here}, whose code runs; git branch NAME {here}, {again}"
    git("branch", "kept", here, cwd=tmp_path)
    assert refusal() is None


def test_a_package_inside_another_project_has_not_its_commit(in_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_installed_commit", lambda: "")
    git("init", "--quiet", str(tmp_path))
    (tmp_path / "theirs").write_text("x")
    git("add", "theirs", cwd=tmp_path)
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "theirs", cwd=tmp_path)
    assert in_folder(tmp_path / "venv" / "difftransformer") == ""
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    module.commit.cache_clear()
    assert module.commit() == ""


def test_the_compiler_is_read_from_the_library(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text("int f() { return 1; }")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=False).stdout.strip()
    version = version or subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    assert version in Library(library, "avx2", is_new=False).compiler
    library.write_bytes(b"\x7fELF")
    assert Library(library, "avx2", is_new=False).compiler == ""
    library.unlink()
    assert Library(library, "avx2", is_new=False).compiler == ""


def test_words_for_a_page():
    known = dict.fromkeys(("difftransformer", "python", "torch", "transformers", "platform"), "1")
    where = Environment(**known, processor="CPU X", device="cpu", threads=2)
    assert where.where == "cpu (CPU X, 2 threads) by difftransformer 1"
    commit = "0123456789abcdef-dirty"
    where = Environment(**known, processor="CPU X", device="cpu", threads=1, commit=commit, instruction_set="avx2")
    assert where.where == "cpu (CPU X, avx2, 1 thread) by difftransformer 1 (commit 0123456789ab with changes)"


def test_the_work_of_others_by_hand(monkeypatch):
    """16 s of busy cores (idle and waiting ones aside, other machines' share included) less 4 s of this process."""
    stat = "cpu  1000 0 400 9999 5 50 50 100 7 0\ncpu0 1 2\n"
    monkeypatch.setattr(module, "open", lambda *_, **__: io.StringIO(stat), raising=False)
    monkeypatch.setattr(module.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(module.os, "times", lambda: (2.0, 1.0, 0.5, 0.5, 1e6))
    assert module.foreign_cpu_seconds() == pytest.approx(12.0)

"""What `make dist` writes: a wheel whose CPU kernels nobody has to build, and a source package."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import hatch_build
from difftransformer.attention import VARIANTS
from difftransformer.ops import processor
from tests.support.cases import needs_kernels

pytestmark = [pytest.mark.slow(minutes=4), needs_kernels]

ROOT = Path(__file__).parents[2]
MOST_MIB = 700  # of one compiler process, for small machines

PROGRAM = """
import logging, torch
from difftransformer.ops import build, differential_attention
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 70, 32, requires_grad=True) for _ in range(3))
def run(backend):
    out = differential_attention(query, key, value, 0.5, is_causal=True, backend=backend)
    return out, *torch.autograd.grad(out.sum(), (query, key, value))
for made, right in zip(run("cpu"), run("reference")):
    torch.testing.assert_close(made, right, rtol=1e-4, atol=1e-5)
print(build.open_library().path)
"""


def run(*command, cwd=ROOT, status=0, **environment):
    """Output and errors of a process."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=kept | environment, cwd=cwd, **streams, check=False)
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture
def build(monkeypatch, capfd):
    """build(folder, compiler): what `make dist` runs, in this process; returns its status and what it said."""

    def start(folder, compiler):
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setattr(sys, "argv", ["hatch_build.py", str(folder)])
        status = hatch_build.main()
        return status, "".join(capfd.readouterr())

    return start


def environment_with(wheel, folder):
    """The interpreter of a virtual environment that has this one's packages and a wheel."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    Path(site, "below.pth").write_text(sysconfig.get_paths()["purelib"])
    words = ["install", "--no-deps", "--no-index", "--no-build-isolation", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *words)
    return python


def test_a_wheel_with_kernels(distribution, tmp_path):
    peaks = (distribution / "peaks").read_text().splitlines()
    assert max(int(line.split()[0]) for line in peaks) < MOST_MIB

    (wheel,) = distribution.glob("*.whl")
    assert re.search(r"-py3-none-(manylinux_2_\d+|linux|macosx_\d+_\d+)_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist() if "/prebuilt/" in name}
    assert (
        names == {f"{isa}.so" for isa in processor.of_architecture()} >= {f"{isa}.so" for isa in processor.available()}
    )
    (package,) = distribution.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        inside = archive.getnames()
    assert not [name for name in inside if name.endswith(".so") or "prebuilt" in name]
    assert any(name.endswith("/hatch_build.py") for name in inside)

    # No compiler, nowhere to write: nothing is built.
    python = environment_with(wheel, tmp_path / "environment")
    cache = tmp_path / "cache"
    alone = {"CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(cache)}
    for isa in processor.available():
        library = Path(run(python, "-c", PROGRAM, cwd=tmp_path, **alone, **{processor.VARIABLE: isa}).strip())
        assert library.is_relative_to(tmp_path / "environment")
        assert library.name == f"{isa}.so"
    assert not cache.exists()


def test_without_a_compiler_the_wheel_is_for_any_machine(tmp_path, build):
    status, said = build(tmp_path, "/nonexistent")
    assert status == 0
    assert "the wheel is without CPU kernels" in said
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "difftransformer/ops/csrc/forward.cpp" in names
    assert not [name for name in names if name.endswith(".so")]


def test_the_source_archive_alone_installs_and_works(tmp_path):
    """All that the package reads at run time comes along: recipes, templates, C++ sources, the mark of typed packages."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    (package,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    documents = {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "docs/index.md"}
    assert documents | {"Makefile", "constraints.txt"} <= inside
    python = environment_with(package, tmp_path / "environment")
    program = "import difftransformer, pathlib; print(pathlib.Path(difftransformer.__file__).parent)"
    home = Path(run(python, "-c", program, cwd=tmp_path).strip().splitlines()[-1])
    assert home.is_relative_to(tmp_path)
    source = ROOT / "src"
    needed = {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    recipes = Path("difftransformer_lab") / "recipes"
    needed |= {recipes / path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.yaml")}
    installed = {path.relative_to(home.parent) for path in home.parent.rglob("*")}
    assert needed - installed == set()
    command = python.parent / "difftransformer"
    assert "525,056 parameters" in run(command, "train", "demo", "--dry-run", cwd=tmp_path)
    run(command, "report", ROOT / "docs" / "results" / "demo.json", "--out", tmp_path / "page", cwd=tmp_path)
    assert "<svg" in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


def environment_of(wheel, folder, *names):
    """The interpreter of a virtual environment with a wheel, the named packages and what these require, and nothing else."""
    python, site = environment_with(wheel, folder), next(folder.glob("lib/python*/site-packages"))
    (site / "below.pth").unlink()
    waiting, linked = [*names], set()
    while waiting:
        name = waiting.pop()
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another system
            continue
        if package.metadata["Name"] in linked:
            continue
        linked.add(package.metadata["Name"])
        for top in {file.parts[0] for file in package.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
        waiting += [re.match(r"[\w.-]+", line)[0] for line in package.requires or [] if "extra ==" not in line]
    return python


ALONE = """
import importlib.util, torch
assert not [name for name in ("transformers", "numpy", "yaml", "safetensors", "scipy") if importlib.util.find_spec(name)]
from difftransformer import DifferentialAttention, ops
from difftransformer.attention import VARIANTS
x = torch.randn(2, 5, 32, requires_grad=True)
layer = DifferentialAttention(32, 2)
layer(x)[0].sum().backward()
assert torch.isfinite(x.grad).all()
query, key, value = torch.randn(3, 1, 2, 7, 8)
print(tuple(ops.differential_attention(query, key, value, 0.5, is_causal=True).shape), len(VARIANTS))
"""


def test_torch_alone_and_no_command(tmp_path):
    """The wheel with torch has functions and layers; with what the library requires, the command says what it lacks."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    python = environment_of(wheel, tmp_path / "torch", "torch")
    said = run(
        python, "-W", "ignore", "-c", ALONE, cwd=tmp_path, CXX="/nonexistent", TORCH_EXTENSIONS_DIR=str(tmp_path)
    )
    assert said.splitlines()[-1] == f"(1, 2, 7, 8) {len(VARIANTS)}"
    required = [
        re.match(r"[\w.-]+", line)[0] for line in metadata.requires("difftransformer") if "extra ==" not in line
    ]
    python = environment_of(wheel, tmp_path / "library", *required)
    for command in ([python.parent / "difftransformer"], [python, "-m", "difftransformer_lab"]):
        assert run(*command, "train", "demo", cwd=tmp_path, status=2) == (
            "difftransformer: jsonargparse is not installed; pip install 'difftransformer[lab]'\n"
        )


def test_a_compiler_that_fails_makes_no_wheel(tmp_path, build):
    status, said = build(tmp_path / "made", "false")
    assert status == 1
    assert "the kernels cannot be compiled" in said
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (b"GLIBC_2.14 GLIBC_2.32 GLIBCXX_3.4.21", "manylinux_2_32"),
        (b"GLIBC_2.14 GLIBC_2.17 GLIBCXX_3.4.29", "manylinux_2_34"),
        (b"GLIBC_2.14 GLIBCXX_3.4.30", "manylinux_2_35"),
        (b"GLIBC_2.38 GLIBCXX_3.4.24", "manylinux_2_38"),
        (b"GLIBC_2.38 GLIBCXX_3.4.99", ""),
        (b"", ""),
    ],
)
def test_the_wheels_name_says_what_it_needs(symbols, tag, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sysconfig.get_platform", lambda: "macosx-11.0-arm64")
    assert hatch_build.platform_tag([b"", symbols]) == (f"{tag}_x86_64" if tag else "macosx_11_0_arm64")

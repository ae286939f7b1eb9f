"""The command as a user runs it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from difftransformer_lab.cli.main import main
from tests.support import fresh
from tests.support.tiny_models import tiny, tokens


@pytest.fixture
def ours(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "ours")
    return model


@torch.no_grad()
def test_there_and_back(ours, tmp_path, capsys):
    (tmp_path / "ours" / "README.md").write_text("x")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "diffllama"]) == 0
    out = capsys.readouterr().out
    assert "theirs: diffllama, 28 tensors" in out
    assert "bytes; 1 other file copied" in out
    assert (tmp_path / "theirs" / "generation_config.json").is_file()
    assert "Not copied: README.md" in out
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "back"), "--to", "difftransformer"]
    assert main([*words, "--from", "diffllama"]) == 0
    assert main([*words[:2], str(tmp_path / "back2"), *words[3:], "--from=diffllama"]) == 0
    ids = tokens(1, 9)
    for name in ("theirs", "back", "back2"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.allclose(loaded(ids).logits, ours(ids).logits, atol=5e-5)


def test_errors_take_one_line(ours, tmp_path, fails):
    """`test_convert_refusals.py` has the others."""
    theirs = tmp_path / "theirs"
    assert "--to is missing; choose one of difftransformer, diffllama" in fails("convert", tmp_path / "ours", theirs)
    assert "not a layout" in fails("convert", tmp_path / "ours", theirs, "--to", "gguf")
    assert "give TARGET" in fails("convert", tmp_path / "ours")
    assert not theirs.exists()


KILLED = """
import os, sys
from difftransformer.families import checkpoint_io
from difftransformer_lab.cli.main import main
checkpoint_io.write_weights = lambda *given, **options: os._exit(9)
main(sys.argv[1:])
"""


def test_what_a_killed_conversion_leaves_is_swept(ours, tmp_path):
    """Inside of an export, beside what that leaves itself."""
    words = ["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "diffllama"]
    process = fresh.Fresh(KILLED, *words).finish()
    assert process.returncode == 9, process.stderr
    assert not (tmp_path / "theirs").exists()
    assert len(list(tmp_path.iterdir())) > 1
    assert main(words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]

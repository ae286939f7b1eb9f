"""A user's program under type checkers: the public names have types, and a wrong argument is found."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
from difftransformer import (
    DifferentialAttention, DifferentialEncoderLayer, DiffTransformerConfig, DiffTransformerForCausalLM, accelerate,
    attention_maps, differential_attention,
)
from difftransformer.families import convert_folder, upcycle_folder
from difftransformer.attention import check_causality

query = torch.randn(1, 2, 4, 8)
reveal_type(differential_attention(query, query, query, 0.5, is_causal=True))
reveal_type(attention_maps(query, query))
layer = DifferentialAttention(embed_dim=64, num_heads=2)
reveal_type(layer.lam())
config = DiffTransformerConfig(vocab_size=99)
reveal_type(config.twin("softmax"))
reveal_type(upcycle_folder("a", "b", to="diff").added_parameters)
reveal_type(check_causality(lambda x: x, query).is_causal)
differential_attention(query, query, query, "half")
DifferentialEncoderLayer(64, 8, head_count=8, norm_first="yes")
"""

EXPECTED = [
    "torch._tensor.Tensor", "tuple[torch._tensor.Tensor, torch._tensor.Tensor]", "torch._tensor.Tensor | None",
    "difftransformer.model.config.DiffTransformerConfig", "int", "bool",
]  # fmt: skip


PYRIGHT = shutil.which("basedpyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def program(tmp_path):
    assert (ROOT / "src" / "difftransformer" / "py.typed").is_file()
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path / "program.py"


@pytest.mark.slow
def test_a_users_program_is_checked_by_mypy(program):
    words = ["--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", str(program.parent / "cache")]
    command = [sys.executable, "-m", "mypy", *words, program.name]
    where = {"cwd": program.parent, "env": os.environ | {"MYPYPATH": str(ROOT / "src")}}
    lines = subprocess.run(command, **where, capture_output=True, text=True, check=False).stdout.splitlines()
    shown = [line.partition("Revealed type is ")[2].strip('"') for line in lines if "Revealed" in line]
    assert shown == EXPECTED, lines
    errors = [line for line in lines if ": error:" in line]
    assert len(errors) == 2, lines
    assert 'Argument 4 to "differential_attention"' in errors[0]
    assert '"norm_first"' in errors[1]


@pytest.mark.slow
@pytest.mark.skipif(PYRIGHT is None, reason="basedpyright is not installed; CONTRIBUTING.md says how to run it")
def test_a_users_program_is_checked_by_pyright(program):
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    words = ["--outputjson", "--pythonpath", sys.executable, program.name]
    done = subprocess.run([PYRIGHT, *words], cwd=program.parent, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    shown = [one["message"] for one in found if one["severity"] == "information"]
    kinds = [re.sub(r"\w+\.", "", kind) for kind in EXPECTED]
    assert [message.rpartition(' is "')[2].rstrip('"') for message in shown] == kinds
    errors = [one["message"] for one in found if one["severity"] != "information"]
    assert len(errors) == 2, errors
    assert 'parameter "lam" of type "Tensor | float" in function "differential_attention"' in errors[0]
    assert 'parameter "norm_first" of type "bool"' in errors[1]

"""Exported code in a new environment that has torch and transformers, and not this package."""

import copy
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from tests.support.tiny_folders import tokens, with_code

pytestmark = pytest.mark.slow
MODELS = {
    "softmax": {},
    "diff": {},
    "diff_v2": {},
    "grouped_diff": {"num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 6, "num_noise_heads": 2},
    "grouped_diff_v2": {"num_noise_heads": 1},
    "dex": {"dex_heads": [[0, 3], [1, 2]]},
    "options": {
        "attention_type": "diff", "num_key_value_heads": 2, "lambda_form": "head", "head_norm": "plain", "shared_key": True,
        "value_head_dim": 12, "sliding_window": 12, "qk_norm": True,
    },
}  # fmt: skip
CODE = """
import json, sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

try:
    import difftransformer
    raise SystemExit("difftransformer can be imported")
except ImportError:
    pass
inputs = torch.load("inputs.pt", weights_only=True)
ids, mask, results = inputs["ids"], inputs["mask"], {}
greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
for name in sys.argv[1:]:
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=False)
        raise SystemExit("transformers knows the model type")
    except ValueError:
        pass
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        result = {"logits": model(ids).logits}
        result["padded"] = model(ids, attention_mask=mask, position_ids=positions).logits
        result["greedy"] = model.generate(ids, attention_mask=mask, **greedy)
        result["static"] = model.generate(
            ids, attention_mask=mask, cache_implementation="static", disable_compile=True, **greedy
        )
        result["loss"] = model(ids, labels=ids).loss
        model.save_pretrained(f"{name}-again")
        AutoTokenizer.from_pretrained(name, trust_remote_code=True).save_pretrained(f"{name}-again")
        for file in Path(name).glob("*.py"):
            assert (Path(f"{name}-again") / file.name).read_bytes() == file.read_bytes()
        before, after = (json.loads((Path(f) / "config.json").read_text()) for f in (name, f"{name}-again"))
        assert before == after, before.items() ^ after.items()
        again = AutoModelForCausalLM.from_pretrained(f"{name}-again", trust_remote_code=True)
        assert torch.equal(again(ids).logits, result["logits"])
        half = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype=torch.bfloat16)
        vectors = {key: tensor.dtype for key, tensor in half.named_parameters() if "lambda_q" in key or "lambda_k" in key}
        assert set(vectors.values()) <= {torch.float32}, vectors
    results[name] = result
write = pipeline("text-generation", model=name, trust_remote_code=True)
results["text"] = write("the quick", max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
torch.save(results, "results.pt")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment with links to all installed packages but this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", symlinks=True)
    (target,) = (folder / "venv").glob("lib/python*/site-packages")
    for place in (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")):
        for entry in Path(place).iterdir():
            if "difftransformer" not in entry.name and entry.suffix != ".pth" and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return folder / "venv" / "bin" / "python"


@torch.no_grad()
def test_it_computes_and_generates_the_same(python, tmp_path):
    ours = {name: with_code(tmp_path / name, **{"attention_type": name} | fields) for name, fields in MODELS.items()}
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    torch.save({"ids": ids, "mask": mask}, tmp_path / "inputs.pt")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-c", CODE, *ours], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    positions, real = (mask.cumsum(1) - 1).clamp(min=0), mask.bool()
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for name, model in ours.items():
        expected = model.generate(ids, attention_mask=mask, **greedy)
        assert torch.equal(results[name]["greedy"], expected)
        assert torch.equal(results[name]["static"], expected)
        exact = copy.deepcopy(model).double()
        whole, padded = exact(ids, labels=ids), exact(ids, attention_mask=mask, position_ids=positions).logits
        # sums are rounded in other orders, so errors are of one size, not equal
        smallest = 1e-6 * whole.logits.abs().max()
        rounded, rounded_padded = model(ids).logits, model(ids, attention_mask=mask, position_ids=positions).logits
        allowed = 2 * max((rounded - whole.logits).abs().max(), smallest)
        assert (results[name]["logits"] - whole.logits).abs().max() <= allowed
        allowed = 2 * max((rounded_padded - padded)[real].abs().max(), smallest)
        assert (results[name]["padded"] - padded)[real].abs().max() <= allowed
        assert results[name]["loss"].item() == pytest.approx(whole.loss.item(), rel=1e-6)
    prompt = torch.tensor([list(b"the quick")])
    last = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert results["text"] == bytes(int(token) for token in last if token < 256).decode(errors="replace")
    assert json.loads((tmp_path / "diff" / "config.json").read_text())["auto_map"]

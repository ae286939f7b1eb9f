"""`difftransformer export`: a run or a saved model as a clean folder, whole or not at all."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from difftransformer_lab.cli.main import main
from difftransformer_lab.results import TaskResult, read_result, summary_rows
from tests.support import tiny_folders
from tests.support.tiny_models import tiny

IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="session")
def _trained(tmp_path_factory):
    return tmp_path_factory.mktemp("export") / "run"


@pytest.fixture
def run(_trained, toy_file, tmp_path):
    """A copy of a trained and evaluated run."""
    if not _trained.exists():
        assert main(["train", str(toy_file), "--out", str(_trained)]) == 0
        assert main(["eval", str(_trained)]) == 0
    shutil.copytree(_trained, tmp_path / "run")
    return tmp_path / "run"


def rows(folder):
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", (folder / "README.md").read_text(), re.MULTILINE))


def logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def test_a_run_becomes_a_clean_folder_with_its_recipe_and_figures(run, toy_file, tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["export", str(run), str(out), "--license", "apache-2.0"]) == 0
    printed = capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert f"bytes in {len(names)} files" in printed
    newest = run / "checkpoints" / "step-000008"
    before, after = load_file(newest / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (out / "tokenizer.json").read_bytes() == (newest / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(out).encode("abc") == AutoTokenizer.from_pretrained(newest).encode("abc")
    text, table = (out / "README.md").read_text(), rows(out)
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "apache-2.0"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "loss_nats" in line]
    assert table["tokens"] == f"{8 * 256:,}"
    assert table["training loss of the last step, nats/token"] == f"{steps[-1]['loss_nats']:.4f}"
    validation = [line for line in metrics if "validation_loss_nats" in line][-1]
    assert table["validation loss at step 8, nats/token"] == f"{validation['validation_loss_nats']:.4f}"
    for task in ("perplexity", "needle", "allocation"):
        result = read_result(run / "evals" / "step-000008" / f"{task}.json", TaskResult)
        figures = summary_rows(result)
        assert figures
        assert all(table[name] == value for name, value in figures)
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    expected = yaml.safe_load((run / "config.yaml").read_text())
    assert recipe["training"] == expected["training"]
    assert recipe["model"] == expected["model"]
    assert str(tmp_path.parent) not in text


def test_a_checkpoint_has_the_recipe_in_its_own_card_and_may_be_edited(run):
    first, last = run / "checkpoints" / "step-000006", run / "checkpoints" / "step-000008"
    assert rows(last)["steps"] == "8"
    assert rows(first)["steps"] == "6"
    (last / "README.md").write_text("# Mine\n")
    assert main(["eval", str(run), "--set", "evaluation.needle=null", "--set", "evaluation.allocation=null"]) == 0


def test_an_exported_folder_can_be_exported_again_in_bf16(run, tmp_path):
    assert main(["export", str(run / "checkpoints" / "step-000006"), str(tmp_path / "a")]) == 0
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "bf16"]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    for name, tensor in before.items():
        dtype = torch.float32 if "lambda" in name else torch.bfloat16
        assert after[name].dtype == dtype, name
        assert torch.equal(after[name], tensor.to(dtype)), name
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    assert rows(tmp_path / "b")["steps"] == "6"


def test_a_persons_card_travels_as_it_is(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "a")]) == 0
    (tmp_path / "a" / "README.md").write_text("# Mine\n")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert (tmp_path / "b" / "README.md").read_text() == "# Mine\n"
    assert "edited by hand" in capsys.readouterr().out


def test_to_diffllama(run, tmp_path):
    for dtype in ("auto", "bf16"):
        out = tmp_path / dtype
        assert main(["export", str(run), str(out), "--to", "diffllama", "--untie", "--dtype", dtype]) == 0
        names = {path.name for path in out.iterdir()}
        assert names >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
        assert not list(out.glob(".*"))
        assert "import difftransformer" not in (out / "README.md").read_text()
        assert rows(out)["steps"] == "8"
    assert torch.allclose(logits(run / "checkpoints" / "step-000008"), logits(tmp_path / "auto"), atol=1e-5)
    wide, narrow = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("auto", "bf16"))
    assert {tensor.dtype for tensor in narrow.values()} == {torch.bfloat16}
    assert all(torch.equal(narrow[name], tensor.bfloat16()) for name, tensor in wide.items())


@pytest.mark.parametrize("place", ["empty", "link", "."])
def test_an_empty_folder_is_filled(run, tmp_path, monkeypatch, place):
    """It stays what it was: a link, or where the shell stands."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "link").symlink_to(empty)
    monkeypatch.chdir(empty if place == "." else tmp_path)
    before = {path.name for path in tmp_path.iterdir()}, empty.stat().st_ino
    assert main(["export", str(run), place]) == 0
    assert ({path.name for path in tmp_path.iterdir()}, empty.stat().st_ino) == before
    assert {"config.json", "model.safetensors", "tokenizer.json"} < {path.name for path in Path(place).iterdir()}
    assert (tmp_path / "link").is_symlink()


def test_what_cannot_be_exported_is_refused_without_a_part_of_it(run, tmp_path, fails):
    model, out = run / "checkpoints" / "step-000008", tmp_path / "out"
    before = set(tmp_path.iterdir())
    assert "no such folder" in fails("export", tmp_path / "none", out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert "is a folder that is not empty" in fails("export", run, tmp_path / "full")
    assert "such as mit" in fails("export", run, out, "--license", "MIT license")
    assert "expected one of auto, fp32, bf16" in fails("export", run, out, "--dtype", "int3")
    assert f"export: {model / 'config.json'}: attention_type='diff': Llama" in fails(
        "export", run, out, "--to", "llama"
    )
    assert f"{model}: it has no average of the weights; train with" in fails("export", run, out, "--average")
    bare = shutil.copytree(model, tmp_path / "full" / "bare", ignore=shutil.ignore_patterns("state.json"))
    assert f"{bare}: it has no average of the weights; train with" in fails("export", bare, out, "--average")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors: damaged (found" in fails("export", run, out)
    (model / "state.json").unlink()
    assert "is cut short or damaged" in fails("export", model, out)
    assert set(tmp_path.iterdir()) == before | {tmp_path / "full"}


def test_weights_that_are_not_the_models_are_named(run, tmp_path, fails):
    assert main(["export", str(run), str(tmp_path / "a")]) == 0
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, path, {"format": "pt"})
    assert "missing weight model.layers.1.mlp.up_proj.weight" in fails("export", tmp_path / "a", tmp_path / "b")
    save_file(tensors | {"extra": torch.ones(1)}, path, {"format": "pt"})
    assert "unexpected weight extra" in fails("export", tmp_path / "a", tmp_path / "b")
    path.rename(tmp_path / "a" / "pytorch_model.bin")
    assert "is a pickle" in fails("export", tmp_path / "a", tmp_path / "b")
    document = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(document | {"model_type": "llama"}))
    assert "a: model_type='llama' is not of this package, and its folder can be shared" in fails(
        "export", tmp_path / "a", tmp_path / "b"
    )
    assert not (tmp_path / "b").exists()


def test_a_model_that_diffllama_cannot_express_leaves_nothing(tmp_path, fails):
    tiny(attention_type="diff_v2").save_pretrained(tmp_path / "v2")
    before = set(tmp_path.iterdir())
    assert "attention_type" in fails("export", tmp_path / "v2", tmp_path / "out", "--to", "diffllama")
    assert set(tmp_path.iterdir()) == before


def test_a_differential_model_of_another_family(tmp_path, fails):
    model = tiny_folders.differential_qwen(tmp_path / "qwen").eval()
    assert main(["export", str(tmp_path / "qwen"), str(tmp_path / "out"), "--license", "mit"]) == 0
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), model(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hello").input_ids == [*b"hello"]
    assert rows(tmp_path / "out")["family"] == "`qwen3`: all but attention is the original's"
    assert rows(tmp_path / "out")["parameters"] == f"{model.num_parameters():,}"
    for words in (["--with-code"], ["--to", "diffllama"]):
        line = fails("export", tmp_path / "qwen", tmp_path / "none", *words)
        assert f"made differential; it opens with this package alone, so leave out {' '.join(words)}" in line


def test_harness_says_what_to_install_where_lm_eval_is_missing(run, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "lm_eval" else find(name, *of))
    assert main(["eval", "harness", str(run), "--tasks", "piqa"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == "difftransformer eval harness: lm_eval is not installed; pip install 'difftransformer[eval]'"

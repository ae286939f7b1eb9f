"""Remote code: the exported files compute what this package computes, and this package never runs them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM
from transformers.dynamic_module_utils import check_imports, get_class_from_dynamic_module, get_relative_import_files

from difftransformer import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerForMaskedLM,
    DiffTransformerForSequenceClassification,
    __version__,
)
from difftransformer.attention import VARIANTS, SoftmaxAttention
from difftransformer.errors import ConfigError
from difftransformer.families import convert_folder
from difftransformer.hub import plain_backends, write_code
from difftransformer.hub.__main__ import main as run_program
from difftransformer.hub.code import ATTENTION_TYPES, ENTRY, code_files
from difftransformer.ops import BACKENDS, problem
from difftransformer_lab.cli.main import main
from tests.support import fresh
from tests.support.tiny_models import scramble, tiny, tiny_config, tokens

WIDER = {"num_attention_heads": 6, "head_dim": 8}
CASES = {
    **{name: {"attention_type": name} for name in ATTENTION_TYPES},
    "options": {
        "num_key_value_heads": 2, "lambda_form": "head", "head_norm": "plain", "lambda_init": 0.3, "shared_key": True,
        "qk_norm": True, "embedding_multiplier": 3.3,
    },
    "odd heads": {"value_head_dim": 12, "num_differential_heads": 3, "num_differential_key_value_heads": 1},
    "two noise heads": {"attention_type": "grouped_diff", "num_key_value_heads": 6, "num_noise_heads": 2, **WIDER},
    "window": {"sliding_window": 5, "tie_word_embeddings": False, "hidden_act": "gelu"},
}  # fmt: skip


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """The module that transformers loads for a folder with code."""
    folder = tmp_path_factory.mktemp("coded")
    tiny_config().save_pretrained(folder)
    write_code(folder)
    kind = get_class_from_dynamic_module(f"{ENTRY}.DiffTransformerForCausalLM", folder)
    return sys.modules[kind.__module__]


def twin(model, kind, implementation="sdpa"):
    """The same model by the exported code."""
    config = kind.config_class.from_dict(json.loads(model.config.to_json_string()))
    made = kind._from_config(config, attn_implementation=implementation).eval()
    made.load_state_dict(model.state_dict())
    return made


def same(a, b):
    """Equal to 1e-12 of the largest value."""
    return (a - b).abs().max() <= 1e-12 * a.abs().max()


def test_the_code_is_this_packages_modules_in_one_folder(tmp_path):
    files = code_files()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert {Path(file).name for file in get_relative_import_files(tmp_path / f"{ENTRY}.py")} | {
        f"{ENTRY}.py"
    } == files.keys()
    for name, text in files.items():
        assert f"From difftransformer {__version__} (MIT License)" in text
        assert "difftransformer" not in check_imports(tmp_path / name)
    assert f"difftransformer/ops/problem.py\n{Path(problem.__file__).read_text()[:400]}" in files["ops_problem.py"]
    assert set(plain_backends.backend_names()) == set(BACKENDS)


@torch.no_grad()
def test_fresh_weights_are_ours(remote):
    for fields in ({}, {"attention_type": "dex"}, {"initialization": "mimetic", "tie_word_embeddings": False}):
        torch.manual_seed(0)
        ours = DiffTransformerForCausalLM(tiny_config(**fields)).state_dict()
        torch.manual_seed(0)
        theirs = remote.DiffTransformerForCausalLM(remote.DiffTransformerConfig(**tiny_config(**fields).to_diff_dict()))
        assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "eager") for name in CASES), *((name, "sdpa") for name in ("softmax", "diff", "options", "window"))],
)
@torch.no_grad()
def test_it_computes_what_the_package_computes(name, implementation, remote):
    ours = tiny(implementation="eager", **CASES[name]).double()
    theirs = twin(ours, remote.DiffTransformerForCausalLM, implementation).double()
    theirs.load_state_dict(ours.state_dict())
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real, caches, outputs = mask.bool(), [], []
    for model in (ours, theirs):
        whole = model(ids, attention_mask=mask, position_ids=positions, output_attentions=implementation == "eager")
        start = model(ids[:, :9], attention_mask=mask[:, :9], position_ids=positions[:, :9], use_cache=True)
        step = model(
            ids[:, 9:], attention_mask=mask, position_ids=positions[:, 9:], past_key_values=start.past_key_values
        )
        outputs.append((whole, step.logits))
        caches.append([(layer.keys.shape, layer.values.shape) for layer in step.past_key_values.layers])
    (a, step_a), (b, step_b) = outputs
    assert same(a.logits[real], b.logits[real])
    assert same(step_a, step_b)
    assert same(a.logits[:, 9:][real[:, 9:]], step_b[real[:, 9:]])
    if "sliding_window" not in CASES[name]:
        assert caches[0] == caches[1]
    if implementation == "eager":
        for map_a, map_b in zip(a.attentions, b.attentions, strict=True):
            assert same(map_a[0], map_b[0])


def test_gradients_packed_documents_and_low_precision(remote):
    ours = tiny(implementation="eager", attention_type="grouped_diff").double().train()
    theirs = twin(ours, remote.DiffTransformerForCausalLM).double().train()
    theirs.load_state_dict(ours.state_dict())
    theirs.activation_checkpointing_enable()
    ids, positions = tokens(1, 12), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    for model in (ours, theirs):
        model(ids, position_ids=positions, labels=ids).loss.backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert same(a.grad, b.grad), name
    half = twin(tiny(), remote.DiffTransformerForCausalLM).to(torch.bfloat16)
    wide = {name for name, tensor in half.named_parameters() if tensor.dtype == torch.float32}
    assert wide == {name for name, _ in half.named_parameters() if "lambda" in name}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert half(ids).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["diff", "softmax"])
@torch.no_grad()
def test_encoders_and_classifiers(name, remote, tmp_path):
    config = tiny_config(attention_type=name, is_causal=False, num_labels=3)
    config._attn_implementation = "eager"
    ids, mask = tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    for ours, theirs in (
        (DiffTransformerForMaskedLM, remote.DiffTransformerForMaskedLM),
        (DiffTransformerForSequenceClassification, remote.DiffTransformerForSequenceClassification),
    ):
        a = scramble(ours(config)).eval().double()
        b = twin(a, theirs).double()
        b.load_state_dict(a.state_dict())
        first, second = (model(ids, attention_mask=mask).logits for model in (a, b))
        assert same(first[0], second[0])
        assert same(first[1, :7], second[1, :7])
        folder = tmp_path / ours.__name__
        a.float().save_pretrained(folder)
        assert main(["export", str(folder), f"{folder}-out", "--with-code"]) == 0
    opened = AutoModelForMaskedLM.from_pretrained(tmp_path / "DiffTransformerForMaskedLM-out")
    assert type(opened) is DiffTransformerForMaskedLM


@torch.no_grad()
def test_this_package_opens_the_folder_without_running_its_code(tmp_path, capsys):
    model = tiny(attention_type="diff_v2")
    model.save_pretrained(tmp_path / "saved")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "saved"), str(out), "--with-code"]) == 0
    names = {path.name for path in out.iterdir()}
    assert f"{out}: " in (said := capsys.readouterr().out)
    assert f"bytes in {len(names)} files" in said
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors", *code_files()}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "saved", out))
    assert after.pop("auto_map")["AutoModelForCausalLM"] == f"{ENTRY}.DiffTransformerForCausalLM"
    assert before == after
    assert 'from_pretrained("FOLDER", trust_remote_code=True)' in (out / "README.md").read_text()
    (out / f"{ENTRY}.py").write_text("raise SystemExit('this code was run')\n")
    for trust in (None, False, True):
        opened = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=trust)
        assert type(opened) is DiffTransformerForCausalLM
        assert torch.equal(opened(tokens(1, 8)).logits, model(tokens(1, 8)).logits)
    assert main(["export", str(out), str(tmp_path / "again")]) == 0
    opened.save_pretrained(tmp_path / "resaved")
    for folder in ("again", "resaved"):
        assert "auto_map" not in json.loads((tmp_path / folder / "config.json").read_text())
        assert not list((tmp_path / folder).glob("*.py"))


def test_what_has_no_code_is_refused(tmp_path, fails):
    tiny().save_pretrained(tmp_path / "saved")
    words = ["export", tmp_path / "saved", tmp_path / "out", "--with-code", "--to", "diffllama"]
    assert fails(*words) == (
        "difftransformer export: --with-code with --to diffllama: that layout opens in stock transformers; leave one of them "
        "out"
    )
    document = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps(document | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type='llama'; code is written for 'difftransformer' alone"):
        write_code(tmp_path / "saved")
    assert not (tmp_path / "out").exists()


def test_an_attention_type_of_elsewhere_has_no_code(tmp_path, monkeypatch, fails):
    class Mine(SoftmaxAttention):
        name = "mine"

    monkeypatch.setitem(VARIANTS, "mine", Mine)
    tiny(attention_type="mine").save_pretrained(tmp_path / "saved")
    line = fails("export", tmp_path / "saved", tmp_path / "out", "--with-code")
    assert "attention_type='mine': the code that is exported has softmax, diff" in line
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_a_softmax_twin_is_a_llama(tmp_path):
    model = tiny(attention_type="softmax", num_key_value_heads=2, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "llama"), "--to", "llama"]) == 0
    stock, ids = LlamaForCausalLM.from_pretrained(tmp_path / "llama"), tokens(2, 12)
    torch.testing.assert_close(stock(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert "It opens in stock transformers" in (tmp_path / "llama" / "README.md").read_text()
    convert_folder(tmp_path / "llama", tmp_path / "back", to="difftransformer")
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back")
    assert back.config == DiffTransformerConfig.from_pretrained(tmp_path / "saved")
    assert torch.equal(back(ids).logits, model(ids).logits)
    document = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps(document | {"mlp_bias": True}))
    with pytest.raises(ConfigError, match="mlp_bias=True: models of this package have False; use upcycle"):
        convert_folder(tmp_path / "llama", tmp_path / "no", to="difftransformer")
    with pytest.raises(ConfigError, match="a llama folder, which converts to difftransformer alone"):
        convert_folder(tmp_path / "llama", tmp_path / "no", to="diffllama")


@pytest.mark.parametrize("fields", [{"attention_type": "diff"}, {"sliding_window": 4}])
def test_what_llama_cannot_express_is_refused(fields, tmp_path):
    tiny(**{"attention_type": "softmax", **fields}).save_pretrained(tmp_path / "saved")
    (name, value), *_ = fields.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r}: Llama can express"):
        convert_folder(tmp_path / "saved", tmp_path / "no", to="llama")
    assert not (tmp_path / "no").exists()


def test_a_program_that_uses_transformers_knows_the_models(tmp_path, monkeypatch, capsys):
    tiny().save_pretrained(tmp_path / "saved")
    (tmp_path / "their_program.py").write_text(
        "import sys\nfrom transformers import AutoConfig\n"
        "assert __name__ == '__main__'\nprint(AutoConfig.from_pretrained(sys.argv[1]).attention_type)\n"
    )
    program = (
        "import runpy, sys\n"
        "sys.argv[0] = 'difftransformer.hub'\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "runpy.run_module('difftransformer.hub', run_name='__main__', alter_sys=True)\n"
    )
    assert fresh.run(program, "their_program", tmp_path / "saved") == "diff\n"
    monkeypatch.setattr(sys, "argv", ["difftransformer.hub", "no_such.program"])
    capsys.readouterr()
    assert run_program() == 2
    assert capsys.readouterr().err == (
        "python -m difftransformer.hub: 'no_such.program' is neither an installed command nor a module; install its package\n"
    )

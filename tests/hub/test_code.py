"""Remote code: the exported files compute what this package computes, and this package never runs them."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM

from difftransformer import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerForMaskedLM,
    DiffTransformerForSequenceClassification,
)
from difftransformer.attention import VARIANTS, SoftmaxAttention, config_options
from difftransformer.errors import ConfigError
from difftransformer.families import convert_folder
from difftransformer.hub import write_code
from difftransformer.hub.code import ATTENTION_TYPES, MODELING
from difftransformer.hub.remote_code import modeling_difftransformer as remote
from difftransformer_lab.cli.main import main
from tests.support import fresh
from tests.support.tiny_models import scramble, tiny, tiny_config, tokens

WIDER = {"num_attention_heads": 6, "head_dim": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    **{name: {"attention_type": name} for name in ATTENTION_TYPES},
    "diff, grouped keys": {"num_key_value_heads": 2},
    "diff_v2, grouped keys": {"attention_type": "diff_v2", "num_key_value_heads": 2},
    "grouped_diff_v2, no gate": {"attention_type": "grouped_diff_v2", "num_key_value_heads": 2, "output_gate": False},
    "dex, chosen heads": {"attention_type": "dex", "num_key_value_heads": 1, "dex_heads": [[0, 3], [1, 2]]},
    "lambda by head": {"lambda_form": "head"},
    "lambda by token": {"lambda_form": "token"},
    "constant lambda": {"lambda_form": "constant", "lambda_init": 0.4},
    "constant lambda, own factor": {"lambda_form": "constant", "lambda_value": -0.8, "head_scale": 0.7},
    "learned lambda without exponentials": {"lambda_form": "scalar", "lambda_value": 0.5},
    "factor without a norm": {"head_norm": "none", "head_scale": 0.5},
    "twin with a norm": {"attention_type": "softmax", "softmax_head_norm": "gain", "num_key_value_heads": 2},
    "twin with a plain norm": {"attention_type": "softmax", "softmax_head_norm": "plain"},
    "plain norm": {"head_norm": "plain", "lambda_init": 0.3},
    "no norm, shared key": {"head_norm": "none", "shared_key": True},
    "diff_v2 like V1": {
        "attention_type": "diff_v2", "shared_key": False, "head_norm": "gain", "lambda_form": "layer", "head_norm_eps": 1e-3,
    },
    "odd heads": {"value_head_dim": 12, "num_differential_heads": 3, "num_differential_key_value_heads": 1},
    "one key, four signal heads": {
        "attention_type": "grouped_diff", "num_attention_heads": 5, "head_dim": 8, "num_key_value_heads": 2,
    },
    "two noise heads": {"attention_type": "grouped_diff", "num_key_value_heads": 4, "num_noise_heads": 2, **WIDER},
    "more keys than noise heads": {
        "attention_type": "grouped_diff", "num_key_value_heads": 6, "num_noise_heads": 2, "lambda_form": "token", **WIDER,
    },
    "gated, grouped keys": {"attention_type": "grouped_diff_v2", "num_key_value_heads": 2, "num_noise_heads": 2, **WIDER},
    "no gate": {"attention_type": "grouped_diff_v2", "output_gate": False},
    "upcycled": {
        "attention_type": "grouped_diff", "num_differential_heads": 4, "num_differential_key_value_heads": 4,
        "num_noise_heads": 1, "value_head_dim": 8, "lambda_form": "head", "head_norm": "none",
    },
    "QK norm": {"qk_norm": True, "num_key_value_heads": 2, "rms_norm_eps": 1e-2},
    "twin with QK norm": {"attention_type": "softmax", "qk_norm": True, "num_key_value_heads": 2},
    "two noise heads with QK norm": {
        "attention_type": "grouped_diff", "num_key_value_heads": 6, "num_noise_heads": 2, "qk_norm": True, **WIDER,
    },
    "window": {"sliding_window": 5},
    "llama3 rotation": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
    "multiplied": {"embedding_multiplier": 3.3},
    "multiplied by default": {"initialization": "fan_in", "tie_word_embeddings": False},
    "untied": {"tie_word_embeddings": False, "hidden_act": "gelu", "attention_type": "diff_v2"},
}  # fmt: skip


def twin(model, kind, implementation="sdpa"):
    """The same model by the exported code."""
    config = remote.DiffTransformerConfig.from_dict(json.loads(model.config.to_json_string()))
    made = kind._from_config(config, attn_implementation=implementation).eval()
    made.load_state_dict(model.state_dict())
    return made


def same(a, b):
    """Equal to 1e-12 of the largest value."""
    return (a - b).abs().max() <= 1e-12 * a.abs().max()


def test_every_attention_type_option_and_default_is_there():
    assert set(ATTENTION_TYPES) == {
        name for name, kind in VARIANTS.items() if kind.__module__.startswith("difftransformer.")
    }
    ours = {field.name for field in dataclasses.fields(DiffTransformerConfig)} | config_options().keys()
    assert ours == {field.name for field in dataclasses.fields(remote.DiffTransformerConfig)}
    a, b = DiffTransformerConfig(), remote.DiffTransformerConfig()
    assert {name: getattr(a, name) for name in ours} == {name: getattr(b, name) for name in ours}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_it_computes_what_the_package_computes(name, implementation):
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


def test_gradients_packed_documents_and_low_precision():
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


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_masks_of_four_dimensions(implementation):
    ours = tiny(implementation="eager", num_key_value_heads=2).double()
    theirs = twin(ours, remote.DiffTransformerForCausalLM, implementation).double()
    theirs.load_state_dict(ours.state_dict())
    ids, allowed = tokens(2, 10), torch.ones(10, 10, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    allowed[1, :, 5:, 2] = False
    expected = ours(ids, attention_mask=allowed).logits
    additive = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    for mask in (allowed, additive):
        assert same(expected, theirs(ids, attention_mask=mask).logits)


@torch.no_grad()
def test_fresh_weights_are_drawn_as_ours():
    torch.manual_seed(0)
    model = remote.DiffTransformerForCausalLM(remote.DiffTransformerConfig(num_hidden_layers=2))
    vectors = torch.cat([tensor.flatten() for name, tensor in model.named_parameters() if "lambda" in name])
    assert 0.08 < vectors.std() < 0.12
    assert all(bool((tensor == 1).all()) for name, tensor in model.named_parameters() if "norm" in name)
    dex = remote.DiffTransformerModel(remote.DiffTransformerConfig(attention_type="dex", num_hidden_layers=1))
    assert not dex.layers[0].self_attn.dex_lambda.any()
    assert dex.layers[0].self_attn.dex_proj.std() == pytest.approx(64**-0.5, rel=0.05)


@torch.no_grad()
def test_given_embeddings_are_multiplied_too():
    ours = tiny(embedding_multiplier=3.3).double()
    theirs = twin(ours, remote.DiffTransformerForCausalLM).double()
    theirs.load_state_dict(ours.state_dict())
    given = ours.get_input_embeddings()(tokens(2, 8))
    outputs = theirs(inputs_embeds=given, output_hidden_states=True)
    assert torch.equal(outputs.hidden_states[0], 3.3 * given)
    assert torch.equal(outputs.logits, theirs(tokens(2, 8)).logits)
    assert same(ours(inputs_embeds=given).logits, outputs.logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("initialization", ["normal", "fan_in"])
@torch.no_grad()
def test_fresh_matrices_have_the_distributions_of_the_configuration(initialization, tied):
    config = remote.DiffTransformerConfig(
        vocab_size=500,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        initialization=initialization,
        depth_scaled_residual=True,
        tie_word_embeddings=tied,
        pad_token_id=7,
    )
    torch.manual_seed(0)
    model = remote.DiffTransformerForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        is_end = "embed" in name or name == "lm_head.weight"
        std = (96 if is_end else 3 * parameter.shape[1]) ** -0.5 if initialization == "fan_in" else 0.02
        std /= 2 if "o_proj" in name or "down_proj" in name else 1  # sqrt(2 * 2 layers)
        assert parameter.std().item() == pytest.approx(std, rel=0.05), name
        if initialization == "fan_in" and not is_end:
            assert 1.7 < parameter.abs().max() / std <= 3**0.5, name  # uniform
    assert not model.model.embed_tokens.weight[7].any()
    head = remote.DiffTransformerForSequenceClassification(config).score.weight
    bound = 96**-0.5 if initialization == "fan_in" else 0.1
    assert 0.5 * bound < head.abs().max() <= bound


@torch.no_grad()
def test_a_mimetic_start_is_refused_and_its_model_opens(tmp_path):
    model = tiny(initialization="mimetic", attention_type="softmax")
    model.save_pretrained(tmp_path)
    config = remote.DiffTransformerConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^mimetic_attention=True: .* use the package difftransformer$"):
        remote.DiffTransformerForCausalLM(config)
    opened = remote.DiffTransformerForSequenceClassification.from_pretrained(tmp_path)  # only its head is drawn
    assert torch.equal(opened.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight)
    assert 0 < opened.score.weight.std() < 0.04


def test_files_that_do_not_state_a_start_have_no_multiplier():
    document = {"hidden_size": 64, "num_attention_heads": 4}
    for kind in (DiffTransformerConfig, remote.DiffTransformerConfig):
        early = kind.from_dict(dict(document))
        assert (early.initialization, early.embedding_multiplier) == ("normal", 1.0)
        mimetic = kind.from_dict(document | {"initialization": "mimetic"})
        assert (mimetic.mimetic_attention, mimetic.embedding_multiplier) == (True, 1.0)
        assert kind.from_dict(document | {"initialization": "fan_in"}).embedding_multiplier == 8.0


@pytest.mark.parametrize("name", ["diff", "grouped_diff", "softmax"])
@torch.no_grad()
def test_encoders_and_classifiers(name, tmp_path):
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
        a.float().save_pretrained(tmp_path / ours.__name__)
        assert (
            main(["export", str(tmp_path / ours.__name__), str(tmp_path / f"{ours.__name__}-out"), "--with-code"]) == 0
        )
    opened = AutoModelForMaskedLM.from_pretrained(tmp_path / "DiffTransformerForMaskedLM-out")
    assert type(opened) is DiffTransformerForMaskedLM


@torch.no_grad()
def test_this_package_opens_the_folder_without_running_its_code(tmp_path):
    model = tiny(attention_type="diff_v2")
    model.save_pretrained(tmp_path / "saved")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "saved"), str(out), "--with-code"]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors", f"{MODELING}.py"}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "saved", out))
    assert after.pop("auto_map")["AutoModelForCausalLM"] == f"{MODELING}.DiffTransformerForCausalLM"
    assert before == after
    assert 'from_pretrained("FOLDER", trust_remote_code=True)' in (out / "README.md").read_text()
    (out / f"{MODELING}.py").write_text("raise SystemExit('this code was run')\n")
    for trust in (None, False, True):
        opened = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=trust)
        assert type(opened) is DiffTransformerForCausalLM
        assert torch.equal(opened(tokens(1, 8)).logits, model(tokens(1, 8)).logits)
    assert main(["export", str(out), str(tmp_path / "again")]) == 0
    opened.save_pretrained(tmp_path / "resaved")
    for folder in ("again", "resaved"):
        assert "auto_map" not in json.loads((tmp_path / folder / "config.json").read_text())
        assert not list((tmp_path / folder).glob("*.py"))


def test_what_has_no_code_is_refused(tmp_path, capsys):
    tiny().save_pretrained(tmp_path / "saved")
    words = ["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--with-code"]
    capsys.readouterr()
    assert main([*words, "--to", "diffllama"]) == 2
    assert capsys.readouterr().err == (
        "difftransformer export: --with-code with --to diffllama: that layout opens in stock transformers; leave one of them "
        "out\n"
    )
    document = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps(document | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type='llama'; code is written for 'difftransformer' alone"):
        write_code(tmp_path / "saved")
    assert not (tmp_path / "out").exists()


def test_an_attention_type_of_elsewhere_has_no_code(tmp_path, monkeypatch, capsys):
    class Mine(SoftmaxAttention):
        name = "mine"

    monkeypatch.setitem(VARIANTS, "mine", Mine)
    tiny(attention_type="mine").save_pretrained(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--with-code"]) == 2
    assert "attention_type='mine': the code that is exported has softmax, diff" in capsys.readouterr().err
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


def test_a_program_that_uses_transformers_knows_the_models(tmp_path):
    tiny().save_pretrained(tmp_path / "saved")
    (tmp_path / "their_program.py").write_text(
        "import sys\nfrom transformers import AutoConfig\n"
        "assert __name__ == '__main__'\nprint(AutoConfig.from_pretrained(sys.argv[1]).attention_type)\n"
    )
    code = (
        "import runpy, sys\n"
        "sys.argv[0] = 'difftransformer.hub'\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "runpy.run_module('difftransformer.hub', run_name='__main__', alter_sys=True)\n"
    )
    done = fresh.run(code, "their_program", tmp_path / "saved")
    assert (done.returncode, done.stdout) == (0, "diff\n"), done.stderr
    done = fresh.run(code, "no_such.program")
    assert done.returncode == 2
    assert done.stderr == (
        "python -m difftransformer.hub: 'no_such.program' is neither an installed command nor a module; install its package\n"
    )

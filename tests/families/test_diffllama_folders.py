"""Folders to stock DiffLlama and back: transformers' own model is the judge."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DiffLlamaForCausalLM

from difftransformer import DiffTransformerForCausalLM
from difftransformer.families import convert_folder
from difftransformer.families.diffllama import from_diffllama, to_diffllama
from tests.families.test_convert_refusals import edit_weights
from tests.support.oracle import relative_error
from tests.support.public_modules import stock
from tests.support.tiny_models import tiny, tiny_config, tokens

SHAPES = {
    "MHA": {},
    "GQA 8/2": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "one pair of keys": {"num_key_value_heads": 2},
    "free head_dim": {"head_dim": 6},
    "untied": {"tie_word_embeddings": False},
    "no gain": {"head_norm": "plain"},
    "own heads": {"num_differential_heads": 3, "num_differential_key_value_heads": 1},
    "half head_dim": {"head_dim": 4, "num_differential_heads": 2, "num_differential_key_value_heads": 2},
    "eps": {"rms_norm_eps": 1e-3, "head_norm_eps": 1e-3},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "scaled rotation": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "gelu": {"hidden_act": "gelu"},
}


def weights_of(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], tensor) for name, tensor in second.items())


@pytest.fixture
def exported(tmp_path):
    """Save a model of ours and export it."""

    def export(model, **options):
        model.save_pretrained(tmp_path / "ours")
        convert_folder(tmp_path / "ours", tmp_path / "diffllama", to="diffllama", **options)
        return tmp_path / "diffllama"

    return export


class TestExport:
    @torch.no_grad()
    @pytest.mark.parametrize("case", SHAPES)
    def test_stock_transformers_gives_the_same_logits(self, case, exported):
        model = tiny(**SHAPES[case])
        model.model.embed_tokens.weight.mul_(0.1)  # tied logits of order one
        loaded, report = AutoModelForCausalLM.from_pretrained(exported(model), output_loading_info=True)
        assert type(loaded) is DiffLlamaForCausalLM
        assert not any(report.values()), report
        ids = tokens(2, 20)
        for implementation in ("eager", "sdpa"):
            loaded.set_attn_implementation(implementation)
            assert (loaded(ids).logits - model(ids).logits).abs().max() < 1e-5

    def test_generation_is_the_same(self, exported):
        model = tiny(num_key_value_heads=2)
        loaded = AutoModelForCausalLM.from_pretrained(exported(model))
        ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
        mask[0, :4] = 0
        for options in ({}, {"num_beams": 3}):
            options |= {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
            assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))

    def test_both_spellings_of_theta(self, exported):
        folder = exported(tiny(rope_parameters={"rope_type": "default", "rope_theta": 77.0}))
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_theta"] == 77.0
        assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 77.0}
        assert "rope_scaling" not in config

    def test_earlier_releases_see_a_scaled_rotation(self, exported):
        folder = exported(tiny(**SHAPES["scaled rotation"]))
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
        assert DiffLlamaConfig.from_pretrained(folder).rope_parameters == SHAPES["scaled rotation"]["rope_parameters"]

    def test_what_differs(self, exported):
        """Rows of q, k, v move by written-out indices, gains are in o_proj, everything else is the same bytes."""
        model = tiny(hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
        theirs = weights_of(exported(model))
        d = 8
        for name, tensor in model.state_dict().items():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                heads = tensor.shape[0] // (2 * d)
                for head in range(heads):
                    for which in range(2):
                        ours, there = (2 * head + which) * d, (head + which * heads) * d
                        assert torch.equal(theirs[name][there : there + d], tensor[ours : ours + d])
            elif name.endswith("o_proj.weight"):
                gain = model.state_dict()[name.replace("o_proj", "head_norm")].double()
                folded = tensor.double() * gain.repeat(4)
                assert relative_error(theirs[name], folded) < 1e-6
                assert relative_error(theirs[name], tensor) > 0.1
            elif "head_norm" in name or name == "lm_head.weight":
                assert name not in theirs
            else:
                assert torch.equal(theirs[name], tensor)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, dtype, exported):
        folder = exported(tiny().to(dtype))
        config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        for name, tensor in weights.items():
            narrow = dtype.itemsize < 4 and "lambda" in name
            assert tensor.dtype == (torch.float32 if narrow else dtype), name
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype

    def test_what_has_no_place_is_said(self, tmp_path):
        tiny(attn_backend="chunked", initialization="mimetic").save_pretrained(tmp_path / "ours")
        done = convert_folder(tmp_path / "ours", tmp_path / "diffllama", to="diffllama")
        assert [note.partition("=")[0] for note in done.notes] == ["attn_backend", "mimetic_attention"]


class TestRoundTrips:
    @torch.no_grad()
    @pytest.mark.parametrize("case", SHAPES)
    def test_ours(self, case, exported, tmp_path):
        model = tiny(seed=4, **SHAPES[case])
        folder = exported(model)
        convert_folder(folder, tmp_path / "back", to="difftransformer")
        before, after = weights_of(tmp_path / "ours"), weights_of(tmp_path / "back")
        folded = model.config.head_norm != "plain"
        for name, tensor in before.items():
            if folded and name.endswith("o_proj.weight"):
                gain = before[name.replace("o_proj", "head_norm")].double()
                heads = tensor.shape[1] // len(gain)
                assert relative_error(after[name], tensor.double() * gain.repeat(heads)) < 1e-6
            elif "head_norm" not in name:
                assert torch.equal(after[name], tensor), name
        assert not any("head_norm" in name for name in after)
        loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back")
        ids = tokens(2, 20)
        assert relative_error(loaded.double()(ids).logits, model.double()(ids).logits) < 1e-6
        # A second time nothing is left to fold.
        convert_folder(tmp_path / "back", tmp_path / "again", to="diffllama")
        assert same(weights_of(folder), weights_of(tmp_path / "again"))
        assert (folder / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()

    def test_without_a_gain_the_configuration_comes_back(self, exported, tmp_path):
        model = tiny(head_norm="plain", num_key_value_heads=2, rms_norm_eps=1e-6, head_norm_eps=1e-6, bos_token_id=3)
        convert_folder(exported(model), tmp_path / "back", to="difftransformer")
        loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path / "back")
        assert same(loaded.state_dict(), model.state_dict())
        for name in ("head_norm", "head_norm_eps", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id"):
            assert getattr(loaded.config, name) == getattr(model.config, name), name
        assert loaded.config.head_layout() == model.config.head_layout()

    @torch.no_grad()
    @pytest.mark.parametrize(
        "fields",
        [{}, {"num_attention_heads": 8, "num_key_value_heads": 2}, {"head_dim": 4}, {"tie_word_embeddings": True}],
        ids=str,
    )
    def test_theirs_to_the_bit(self, fields, tmp_path):
        model = stock(**fields)
        model.save_pretrained(tmp_path / "diffllama")
        convert_folder(tmp_path / "diffllama", tmp_path / "ours", to="difftransformer")
        convert_folder(tmp_path / "ours", tmp_path / "back", to="diffllama")
        assert same(weights_of(tmp_path / "back"), weights_of(tmp_path / "diffllama"))
        ours, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), tokens(2, 20)
        assert type(ours) is DiffTransformerForCausalLM
        assert ours.config.head_norm == "plain"
        assert (ours(ids).logits - model(ids).logits).abs().max() < 1e-5
        first, second = (DiffLlamaConfig.from_pretrained(tmp_path / name).to_dict() for name in ("diffllama", "back"))
        assert first | {"_name_or_path": ""} == second | {"_name_or_path": ""}

    def test_conversions_work_in_memory(self):
        model = tiny(seed=5)
        theirs = to_diffllama(model.config).apply(model.state_dict())
        config = DiffLlamaConfig(**{k: v for k, v in to_diffllama(model.config).config.items() if k != "model_type"})
        loaded = DiffLlamaForCausalLM(config)
        loaded.load_state_dict(theirs, strict=False)
        ours = from_diffllama(config).apply(loaded.state_dict())
        assert all(torch.equal(ours[name], model.state_dict()[name]) for name in ours if "o_proj" not in name)


class TestFolders:
    def test_earlier_spelling_of_their_configuration(self, tmp_path):
        model = stock(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=True)
        model.save_pretrained(tmp_path / "diffllama")
        path = tmp_path / "diffllama" / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"], config["head_dim"], config["dtype"]
        path.write_text(json.dumps(config | {"rope_theta": 500.0, "rope_scaling": None, "torch_dtype": "float32"}))
        convert_folder(tmp_path / "diffllama", tmp_path / "ours", to="difftransformer")
        ours, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), tokens(1, 12)
        assert ours.config.rope_parameters["rope_theta"] == 500.0
        assert (ours(ids).logits - model(ids).logits).abs().max() < 1e-5

    def test_sharded_both_ways(self, tmp_path):
        model = tiny()
        model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
        assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
        done = convert_folder(tmp_path / "ours", tmp_path / "many", to="diffllama", shard_bytes=20_000)
        files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
        assert len(files) > 2
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        assert all(path.stat().st_size < 24_000 for path in (tmp_path / "many").glob("*.safetensors"))
        index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == done.bytes
        assert len(index["weight_map"]) == done.tensors
        convert_folder(tmp_path / "ours", tmp_path / "one", to="diffllama")
        assert same(weights_of(tmp_path / "one"), weights_of(tmp_path / "many"))
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "many")
        convert_folder(tmp_path / "many", tmp_path / "back", to="difftransformer")
        name = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(weights_of(tmp_path / "back")[name], model.state_dict()[name])

    def test_tokenizers_travel_as_they_are(self, tmp_path):
        tiny().save_pretrained(tmp_path / "ours")
        carried = {
            "tokenizer.json": b'{"a": 1}',
            "tokenizer_config.json": b"{}  ",
            "special_tokens_map.json": b"{}",
            "tokenizer.model": b"\x00\x01",
            "vocab.json": b"{ }",
            "merges.txt": b"a b\n",
            "chat_template.jinja": b"{{ messages }}",
            "additional_chat_templates/tool.jinja": b"{{ tools }}",
            "LICENSE": b"MIT",
        }
        for name, content in carried.items():
            path = tmp_path / "ours" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        for name in ("README.md", "optimizer.safetensors", "state.json"):
            (tmp_path / "ours" / name).write_bytes(b"x")
        done = convert_folder(tmp_path / "ours", tmp_path / "diffllama", to="diffllama")
        for name, content in carried.items():
            assert (tmp_path / "diffllama" / name).read_bytes() == content
        assert set(done.carried) == {name.partition("/")[0] for name in carried} | {"generation_config.json"}
        assert done.left_behind == ("README.md", "optimizer.safetensors", "state.json")
        there = {path.name for path in (tmp_path / "diffllama").iterdir()}
        assert there == {"config.json", "model.safetensors", *done.carried}

    def test_a_tied_head_may_be_written_out(self, tmp_path):
        tiny().save_pretrained(tmp_path / "ours")
        edit_weights(tmp_path / "ours", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
        done = convert_folder(tmp_path / "ours", tmp_path / "diffllama", to="diffllama")
        assert "lm_head.weight" not in weights_of(done.folder)

    def test_an_empty_folder_is_filled(self, tmp_path):
        tiny().save_pretrained(tmp_path / "ours")
        (tmp_path / "diffllama").mkdir()
        convert_folder(tmp_path / "ours", tmp_path / "diffllama", to="diffllama")
        assert (tmp_path / "diffllama" / "model.safetensors").is_file()
        convert_folder(tmp_path / "ours", tmp_path / "new" / "deep", to="diffllama")
        assert (tmp_path / "new" / "deep" / "model.safetensors").is_file()


def test_the_conversion_needs_what_a_saved_model_has():
    config = tiny_config(tie_word_embeddings=False)
    state = DiffTransformerForCausalLM(config).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == to_diffllama(config).needs

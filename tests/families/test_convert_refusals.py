"""What cannot be converted: the message names field or tensor, value and expectation, and nothing is left on disk."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from difftransformer import DiffTransformerForMaskedLM
from difftransformer.errors import CheckpointError, ConfigError, DiffTransformerError, ShapeError
from difftransformer.families import checkpoint_io, convert_folder
from tests.support.public_modules import stock
from tests.support.tiny_models import tiny, tiny_config


def refusal(tmp_path, error, source="source", to="diffllama", convert=convert_folder, **options):
    """The message, after checking that the target was not made and nothing else is there."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(error) as caught:
        convert(tmp_path / source, tmp_path / "target", to=to, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    message = str(caught.value)
    assert isinstance(caught.value, DiffTransformerError)
    assert "\n" not in message
    return message


@pytest.fixture
def source(tmp_path):
    """Save a model in `source`."""

    def save(model):
        model.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return save


def edit_config(path, **fields):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def edit_weights(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


class TestModelsThatDiffLlamaLacks:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"attention_type": "softmax"}, ("attention_type='softmax'", "'diff'")),
            ({"attention_type": "diff_v2"}, ("attention_type='diff_v2'", "'diff'")),
            *(
                ({"lambda_form": form}, (f"lambda_form={form!r}", "'layer'"))
                for form in ("head", "token", "constant", "scalar")
            ),
            ({"lambda_value": 0.0}, ("lambda_value=0.0", "None")),
            ({"head_scale": 1.0}, ("head_scale=1.0", "None")),
            ({"lambda_init": 0.8}, ("lambda_init=0.8", "None")),
            ({"head_norm": "none"}, ("head_norm='none'", "'gain' or 'plain'")),
            ({"shared_key": True}, ("shared_key=True", "False")),
            ({"value_head_dim": 8}, ("value_head_dim=8", "16")),
            ({"head_norm_eps": 1e-6}, ("head_norm_eps=1e-06", "1e-05")),
            ({"sliding_window": 8}, ("sliding_window=8", "None")),
        ],
        ids=str,
    )
    def test_export(self, fields, words, source, tmp_path):
        source(tiny(**fields))
        message = refusal(tmp_path, ConfigError)
        assert all(word in message for word in ("config.json", *words)), message

    def test_an_encoder(self, source, tmp_path):
        source(DiffTransformerForMaskedLM(tiny_config(is_causal=False)))
        assert "architectures=['DiffTransformerForMaskedLM']" in refusal(tmp_path, ConfigError)
        path = tmp_path / "source" / "config.json"
        path.write_text(path.read_text().replace("ForMaskedLM", "ForCausalLM"))
        assert "is_causal=False: DiffLlama is a decoder" in refusal(tmp_path, ConfigError)


@pytest.mark.parametrize(("field", "value", "possible"), [("norm", "plain", "none"), ("scale", 2.0, 1.0)])
def test_a_twin_that_llama_lacks(field, value, possible, source, tmp_path):
    source(tiny(attention_type="softmax", **{f"softmax_head_{field}": value}))
    message = refusal(tmp_path, ConfigError, to="llama")
    assert f"softmax_head_{field}={value!r}: Llama can express {possible!r} only" in message


@pytest.mark.parametrize("kind", ["softmax", "dex"])
def test_heads_that_transformers_refuses_in_a_llama(kind, source, tmp_path):
    source(tiny(attention_type=kind, num_attention_heads=5, head_dim=8))
    message = refusal(tmp_path, ConfigError, to="llama")
    assert "num_attention_heads=5: Llama can express divisors of hidden_size=32 only; export --with-code" in message


class TestModelsThatOursLack:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"attention_bias": True}, ("attention_bias=True", "attention_bias=False")),
            ({"attention_dropout": 0.1}, ("attention_dropout=0.1", "attention_dropout=0.0")),
            ({"num_key_value_heads": 1}, ("num_key_value_heads=1", "even")),
            ({"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 8}, ("num_attention_heads=3", "even")),
            ({"num_attention_heads": 8, "num_key_value_heads": 6, "head_dim": 8}, ("num_heads=4", "3")),
            ({"head_dim": 7}, ("head_dim`=7", "even")),
            ({"hidden_size": "wide"}, ("hidden_size", "wide")),
            ({"num_attention_heads": 0, "head_dim": None}, ("zero",)),
            ({"hidden_act": "sine"}, ("hidden_act='sine'",)),
            ({"architectures": ["DiffLlamaForSequenceClassification"]}, ("architectures", "DiffLlamaForCausalLM")),
            ({"quantization_config": {"quant_method": "x"}}, ("quantization_config",)),
        ],
        ids=str,
    )
    def test_import(self, fields, words, source, tmp_path):
        edit_config(source(stock()), **fields)
        message = refusal(tmp_path, ConfigError, to="difftransformer")
        assert all(word in message for word in ("config.json", *words)), message


class TestWeights:
    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [  # a change is a tensor that is taken out, or tensors that are put in
            ("model.layers.1.self_attn.head_norm.weight", CheckpointError, "1.self_attn.head_norm.weight is missing"),
            ({"x": torch.ones(1)}, CheckpointError, "x is not part"),
            ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, CheckpointError, "q_proj.bias is not part"),
            (
                {"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 32)},
                ShapeError,
                "k_proj.weight has shape (16, 32), expected (32, 32)",
            ),
            ({"lm_head.weight": torch.ones(61, 32)}, CheckpointError, "lm_head.weight differs from model.embed_tokens"),
            (
                {"model.norm.weight": torch.ones(32, dtype=torch.int8)},
                CheckpointError,
                "model.norm.weight has dtype I8",
            ),
        ],
    )
    def test_ours(self, change, error, words, source, tmp_path):
        edit_weights(source(tiny()), lambda w: w.pop(change) if isinstance(change, str) else w.update(change))
        assert words in refusal(tmp_path, error)

    def test_theirs(self, source, tmp_path):
        edit_weights(source(stock()), lambda w: w.pop("lm_head.weight"))
        assert "lm_head.weight is missing" in refusal(tmp_path, CheckpointError, to="difftransformer")

    @pytest.mark.parametrize(
        ("fields", "error", "words"),
        [
            ({"num_key_value_heads": 2}, ShapeError, "k_proj.weight has shape (32, 32), expected (16, 32)"),
            ({"vocab_size": 62}, ShapeError, "model.embed_tokens.weight has shape (61, 32), expected (62, 32)"),
            ({"intermediate_size": 40}, ShapeError, "gate_proj.weight has shape (48, 32), expected (40, 32)"),
            ({"num_hidden_layers": 3}, CheckpointError, "model.layers.2."),
            ({"num_hidden_layers": 1}, CheckpointError, "not part of this layout"),
        ],
    )
    def test_a_configuration_that_contradicts_them(self, fields, error, words, source, tmp_path):
        edit_config(source(tiny()), **fields)
        assert words in refusal(tmp_path, error)

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
    def test_half_downloaded(self, share, source, tmp_path):
        path = source(tiny()) / "model.safetensors"
        os.truncate(path, int(share * path.stat().st_size))
        message = refusal(tmp_path, CheckpointError)
        assert "model.safetensors is cut short or damaged" in message
        assert "copy it again" in message

    def test_half_downloaded_shards(self, tmp_path):
        tiny().save_pretrained(tmp_path / "source", max_shard_size="20KB")
        files = sorted((tmp_path / "source").glob("*.safetensors"))
        whole = files[1].read_bytes()
        os.truncate(files[1], len(whole) - 1)
        assert f"{files[1].name} is cut short" in refusal(tmp_path, CheckpointError)
        files[1].unlink()
        assert f"{files[1].name} is missing" in refusal(tmp_path, CheckpointError)
        files[1].write_bytes(files[0].read_bytes())
        assert "is in two files" in refusal(tmp_path, CheckpointError)
        files[1].write_bytes(whole)
        weights = load_file(files[1])
        name = next(iter(weights))
        del weights[name]
        save_file(weights, files[1])
        message = refusal(tmp_path, CheckpointError)
        assert f"{name} is listed but in none" in message

    @pytest.mark.parametrize(
        "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 3}}']
    )
    def test_a_broken_index(self, text, source, tmp_path):
        path = source(tiny())
        (path / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json" in refusal(tmp_path, CheckpointError)


class TestFolders:
    def test_sources(self, source, tmp_path):
        assert "is not a folder" in refusal(tmp_path, CheckpointError, source="nothing")
        (tmp_path / "empty").mkdir()
        assert "has no config.json" in refusal(tmp_path, CheckpointError, source="empty")
        path = source(tiny())
        (path / "config.json").write_text('{"model_type":')
        assert "config.json cannot be read as JSON" in refusal(tmp_path, CheckpointError)
        (path / "config.json").write_text("[1]")
        assert "expected a JSON object" in refusal(tmp_path, CheckpointError)

    @pytest.mark.parametrize("model_type", ["mistral", None, "", 3])
    def test_other_architectures(self, model_type, source, tmp_path):
        edit_config(source(tiny()), model_type=model_type)
        message = refusal(tmp_path, ConfigError)
        assert f"model_type={model_type!r}" in message
        assert "'difftransformer', 'diffllama'" in message

    @pytest.mark.parametrize("model_type", ["phi4flash", "Motif"])
    def test_attention_alone(self, model_type, source, tmp_path):
        edit_config(source(tiny()), model_type=model_type)
        message = refusal(tmp_path, ConfigError, to="difftransformer")
        assert "attention weights" in message
        assert f"load_{model_type.lower()}_attention" in message

    def test_layouts(self, source, tmp_path):
        source(tiny())
        assert "--to 'onnx' is not a layout" in refusal(tmp_path, ConfigError, to="onnx")
        assert "--from 'onnx' is not a layout" in refusal(tmp_path, ConfigError, source_layout="onnx")
        assert "a difftransformer folder already" in refusal(tmp_path, ConfigError, to="difftransformer")
        message = refusal(tmp_path, ConfigError, source_layout="diffllama", to="difftransformer")
        assert "model_type='difftransformer', expected 'diffllama'" in message
        assert "microsoft_attention_state" in refusal(tmp_path, ConfigError, to="microsoft")

    def test_targets_in_use(self, source, tmp_path):
        path = source(tiny())
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with pytest.raises(ConfigError, match="not empty"):
            convert_folder(path, path, to="diffllama")
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        (tmp_path / "file").write_text("kept")
        with pytest.raises(ConfigError, match="is a file"):
            convert_folder(path, tmp_path / "file", to="diffllama")
        assert (tmp_path / "file").read_text() == "kept"

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_nothing_is_left_of_a_broken_off_conversion(self, error, source, tmp_path, monkeypatch):
        source(tiny())

        def fail(*_, **__):
            raise error

        monkeypatch.setattr(checkpoint_io, "save_file", fail)
        with pytest.raises(type(error)):
            convert_folder(tmp_path / "source", tmp_path / "target", to="diffllama")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

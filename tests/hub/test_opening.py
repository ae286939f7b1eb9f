"""A saved model opened to be asked: whose kernels its attention uses, and that its answers are the same either way."""

import json

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data import byte_tokenizer
from difftransformer.errors import BackendUnavailable, CheckpointError
from difftransformer.hub import folder_sha256, open_model, open_tokenizer
from difftransformer.hub.opening import source_folder
from difftransformer.ops import use_backend
from difftransformer_lab.evals.evaluate import TaskSpec, evaluate_task
from difftransformer_lab.evals.opening import open_language_model
from difftransformer_lab.evals.requests import Loss
from tests.support.answering import answers_to

SIZES = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
STOCK = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**STOCK)),
    "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**STOCK)),
    "ours": lambda: DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4)),
}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", ["sdpa"] * 2),
        ("diffllama", ["difftransformer", "sdpa"]),
        ("ours", ["difftransformer"] * 2),
        ("bloom", ["eager"] * 2),  # its attention adds a bias: nothing is said, it is asked as it is
    ],
)
def test_kernels(kind, expected, tmp_path):
    torch.manual_seed(0)
    KINDS[kind]().save_pretrained(tmp_path / "m")
    byte_tokenizer().save(tmp_path / "m")
    kernels, losses, request = [], [], Loss(tuple(range(40)))
    for accelerated in (True, False):
        with open_language_model(str(tmp_path / "m"), accelerated=accelerated) as opened, torch.no_grad():
            kernels.append(opened.identity.kernels)
            losses.append(answers_to(opened.language_model, [request])[0])
            layers = [type(m) for m in opened.language_model.model.modules() if isinstance(m, DiffLlamaAttention)]
            assert (DiffLlamaAttention in layers) == (kind == "diffllama" and not accelerated)
    assert kernels == expected
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_answers_of_other_kernels_are_not_mixed(tmp_path):
    KINDS["diffllama"]().save_pretrained(tmp_path / "m")
    byte_tokenizer().save(tmp_path / "m")
    (tmp_path / "text.txt").write_text("Kernels round each in its own way. " * 9)
    spec = TaskSpec(task="perplexity", options={"text": str(tmp_path / "text.txt"), "windows": 2, "window": 32})
    with open_language_model(str(tmp_path / "m")) as opened:
        result = evaluate_task(spec, opened, tmp_path / "out")
    assert result.model.kernels == "difftransformer"
    with (
        open_language_model(str(tmp_path / "m"), accelerated=False) as opened,
        pytest.raises(CheckpointError, match="holds answers of another model"),
    ):
        evaluate_task(spec, opened, tmp_path / "out")


def _saved(folder):
    KINDS["ours"]().save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


def test_fingerprint_is_of_what_the_model_answers_by(tmp_path):
    folder = _saved(tmp_path / "m")
    before = folder_sha256(folder)
    for name in ("optimizer.safetensors", "optimizer-00001-of-00002.safetensors", "trained.safetensors", "state.json"):
        (folder / name).write_bytes(b"of training")
    assert folder_sha256(folder) == before
    seen = {before}
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        seen.add(folder_sha256(folder))
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_file_of_a_tokenizer_is_named(name, tmp_path):
    folder = _saved(tmp_path / "m")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{folder / name}: its tokenizer cannot be opened"):
        open_tokenizer(folder)


@pytest.mark.parametrize(("given", "met"), [({"quant_method": "no_such"}, "'no_such'"), ({"bits": 4}, "None")])
def test_an_unknown_quantization_is_refused(given, met, tmp_path):
    folder = tmp_path / "m"
    KINDS["llama"]().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    with pytest.raises(
        CheckpointError, match=f"quant_method of its quantization_config is {met}; transformers knows aqlm"
    ):
        open_model(folder)


def test_files_that_are_fetched_from_the_hub(tmp_path, monkeypatch):
    """Named chat templates and adapters are; weights of other programs are not."""
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    wanted += ["chat_template.jinja", "additional_chat_templates/rag.jinja", "generation_config.json"]
    wanted += ["adapter_config.json", "adapter_model.safetensors"]
    others = [
        "consolidated.safetensors",
        "onnx/model.safetensors",
        "pytorch_model.bin",
        "modeling_x.py",
        "tokenization_x.py",
    ]

    def download(name, **patterns):
        assert name == "owner/name"
        assert list(filter_repo_objects(wanted + others, **patterns)) == wanted
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with source_folder("owner/name") as folder:
        assert folder == tmp_path


def test_the_backend_of_a_diffllama(tmp_path):
    """It is the layers', as that of a model of this package is."""
    KINDS["diffllama"]().save_pretrained(tmp_path / "m")
    ids = torch.arange(40)[None]
    with use_backend("reference"):
        expected = open_model(tmp_path / "m")(ids).logits
    with use_backend("chunked"):  # which one that is named in the call does not heed
        assert torch.equal(open_model(tmp_path / "m", backend="reference")(ids).logits, expected)
    with pytest.raises(BackendUnavailable, match="no backend is named 'fast'"):
        open_model(tmp_path / "m", backend="fast")(ids)

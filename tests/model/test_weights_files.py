"""Weights are safetensors inside the model's folder; whatever opens a model refuses the rest in one line."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerForCausalLM
from difftransformer.data import byte_tokenizer
from difftransformer.errors import CheckpointError
from difftransformer.families.checkpoint_io import WeightsReader
from difftransformer.model.weights import weights_files
from tests.support import tiny_folders


class Touch:
    """A pickle of this leaves a file behind when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def pickled(folder):
    """Put a pickle that runs code in the place of the weights."""
    (folder / "model.safetensors").unlink()
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump(Touch(folder / "ran"), file)


def state_dict(folder):
    """Put the weights themselves, as torch saves them, in their place: transformers would read them."""
    torch.save(tiny_folders.model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def index(name):
    def change(folder):
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        torch.save(tiny_folders.model().state_dict(), folder / "pytorch_model.bin")
        content = {"weight_map": dict.fromkeys(tiny_folders.model().state_dict(), name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def link(folder):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors").symlink_to("../outside.safetensors")


def explicit(name):
    def change(folder):
        torch.save(tiny_folders.model().state_dict(), folder / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))

    return change


def adapter(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({}, folder / "adapter_model.bin")


CHANGES = {
    "a pickle that runs code": (pickled, "pytorch_model.bin is a pickle"),
    "pickled weights": (state_dict, "pytorch_model.bin is a pickle"),
    "an index of pickles": (index("pytorch_model.bin"), "'pytorch_model.bin' is not a safetensors file of this folder"),
    "an index that leads out": (index("../outside.safetensors"), "'../outside.safetensors' is not a safetensors file"),
    "an index of an absolute path": (index("/outside.safetensors"), "'/outside.safetensors' is not a safetensors file"),
    "an index of a folder": (index("."), "'.' is not a safetensors file"),
    "an index of numbers": (index(3), "3 is not a safetensors file"),
    "a link that leads out": (link, "is a link out of the folder"),
    "weights that the configuration names": (explicit("adapter_model.bin"), "transformers_weights='adapter_model.bin'"),
    "an adapter": (adapter, "there is no adapter_model.safetensors here"),
}


@pytest.fixture(params=CHANGES)
def changed(request, tmp_path):
    """A model of this package after a change, and the message that it has to give."""
    tiny_folders.saved(tmp_path / "model")
    change, message = CHANGES[request.param]
    change(tmp_path / "model")
    return tmp_path / "model", message


def test_every_road(changed, tmp_path, toy_file, fails):
    folder, message = changed
    for opens in (weights_files, DiffTransformerForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError) as caught:
            opens(folder)
        assert message in str(caught.value)
    roads = [
        ["generate", folder, "a"],
        ["eval", "perplexity", folder, "--text", toy_file, "--out", tmp_path / "out"],
        ["export", folder, tmp_path / "out"],
        ["convert", folder, tmp_path / "out", "--to", "diffllama"],
        ["train", toy_file, "--out", tmp_path / "run", "--set", "model={}", "--set", f"start_from={folder}"],
    ]
    for words in roads:
        assert message in fails(*words)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["a pickle that runs code", "an index of pickles", "a link that leads out"])
def test_models_of_other_kinds(name, tmp_path, fails):
    change, message = CHANGES[name]
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save(tmp_path / "llama")
    change(tmp_path / "llama")
    for words in (["generate", "a"], ["upcycle", str(tmp_path / "out"), "--to", "diff"]):
        assert message in fails(words[0], tmp_path / "llama", *words[1:])
    assert not (tmp_path / "llama" / "ran").exists()


@pytest.mark.parametrize("name", CHANGES)
def test_differential_models_of_other_families(name, tmp_path):
    change, message = CHANGES[name]
    made = tiny_folders.differential_qwen(tmp_path / "model")
    change(tmp_path / "model")
    for opens in (type(made), AutoModelForCausalLM):
        with pytest.raises(CheckpointError) as caught:
            opens.from_pretrained(tmp_path / "model")
        assert message in str(caught.value)


def test_an_adapter_beside_the_weights_is_not_left_out(tmp_path, fails):
    tiny_folders.saved(tmp_path / "ours")
    tiny_folders.stock(tmp_path / "theirs")
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save(tmp_path / "llama")
    for name, words, done in (
        ("ours", ["export"], "exported"),
        ("theirs", ["convert", "--to", "difftransformer"], "converted"),
        ("llama", ["upcycle", "--to", "diff"], "converted"),
    ):
        (tmp_path / name / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        save_file({"x": torch.ones(1)}, tmp_path / name / "adapter_model.safetensors")
        said = fails(words[0], tmp_path / name, tmp_path / "out", *words[1:])
        assert f"adapter_model.safetensors: adapters are not {done}; merge them into the model" in said
        assert not (tmp_path / "out").exists()


def test_links_of_the_hub_s_cache(tmp_path):
    """Files of a snapshot are links to blobs beside it."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    made = tiny_folders.saved(snapshot)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    opened = DiffTransformerForCausalLM.from_pretrained(snapshot)
    assert all(torch.equal(a, b) for a, b in zip(opened.state_dict().values(), made.state_dict().values(), strict=True))


@pytest.mark.parametrize("size", ["1GB", "10KB"], ids=["one file", "several"])
def test_variants(size, tmp_path):
    """Files of a variant, as transformers names them, beside others; an index is checked as any other."""
    made = tiny_folders.saved(tmp_path / "model")
    for one in made.parameters():
        one.data.mul_(2)
    made.save_pretrained(tmp_path / "model", variant="fp16", max_shard_size=size)
    assert len(list((tmp_path / "model").glob("model.fp16*.safetensors"))) > (size == "10KB")
    for opens in (DiffTransformerForCausalLM, AutoModelForCausalLM):
        opened = opens.from_pretrained(tmp_path / "model", variant="fp16").state_dict()
        assert all(torch.equal(opened[name], tensor) for name, tensor in made.state_dict().items())
    (tmp_path / "model" / "model.safetensors").unlink()
    assert DiffTransformerForCausalLM.from_pretrained(tmp_path / "model", variant="fp16")
    with pytest.raises(CheckpointError, match=r"neither model\.bf16\.safetensors nor .*\.index\.bf16\.json"):
        DiffTransformerForCausalLM.from_pretrained(tmp_path / "model", variant="bf16")
    outside = {"weight_map": dict.fromkeys(made.state_dict(), "../outside.safetensors")}
    (tmp_path / "model" / "model.safetensors.index.bf16.json").write_text(json.dumps(outside))
    with pytest.raises(CheckpointError, match=r"'\.\./outside\.safetensors' is not a safetensors file"):
        DiffTransformerForCausalLM.from_pretrained(tmp_path / "model", variant="bf16")


def test_nothing_from_outside_is_exported(tmp_path, fails):
    """A link in the place of a licence would publish a private file."""
    tiny_folders.saved(tmp_path / "model")
    (tmp_path / "private").write_text("secret")
    (tmp_path / "model" / "LICENSE").symlink_to(tmp_path / "private")
    for words in (["export", "model", "new"], ["convert", "model", "new", "--to", "diffllama"]):
        folders = (tmp_path / word for word in words[1:3])
        assert "LICENSE is a link out of the folder" in fails(words[0], *folders, *words[3:])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**7}, "give a whole number of at least 1 and at most 10,000"),
        ({"num_hidden_layers": 9_999}, "config.json describes 9999 layers"),
        ({"hidden_size": 10**30, "head_dim": 8}, "hidden_size=1000000000000000000000000000000"),
        ({"hidden_size": 2**30, "head_dim": 8}, "parameters, and the weights hold"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_configurations_that_no_weights_have(fields, message, tmp_path, fails):
    tiny_folders.saved(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert message in fails("generate", tmp_path / "model", "a")


TEMPLATES = ["{% for", "{{ 1 / 0 }}", "{{ messages[5].x.y }}", "{{ ''.__class__.__mro__ }}"]
TEMPLATES += ["{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        *(("generation_config.json", text, "generation_config.json") for text in ("[]", "3", "null", "{")),
        *(("chat_template.jinja", text, "chat template") for text in TEMPLATES),
    ],
)
def test_settings_that_are_no_object_and_broken_chat_templates(name, text, words, tmp_path, fails):
    tiny_folders.saved(tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    assert words in fails("generate", tmp_path / "model", "a", *["--chat"] * (words == "chat template"))


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_pieces_of_several_processes(tmp_path):
    """transformers opens what `save_pretrained(distributed_checkpoint=True)` writes; what reads whole tensors refuses it."""
    model = tiny_folders.model()
    model.config.save_pretrained(tmp_path / "pieces")
    writer = HuggingFaceStorageWriter(str(tmp_path / "pieces"), save_distributed=True)
    dcp.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, storage_writer=writer, no_dist=True)
    found = DiffTransformerForCausalLM.from_pretrained(tmp_path / "pieces").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match="consolidate_distributed_checkpoint"):
        WeightsReader(tmp_path / "pieces")

"""Tiny models with a tokenizer and text, in folders."""

import json

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer.families import convert_folder, upcycle_folder
from difftransformer.hub import export_folder

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SENTENCES = [f"the quick brown fox number {i % 4} jumps over the lazy dog" for i in range(16)]


def config(attention_type="diff", **fields):
    base = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    base |= {"max_position_embeddings": 128, "pad_token_id": 257, "bos_token_id": 256, "eos_token_id": 256}
    base |= {"initialization": "normal"}  # without an embedding multiplier, every layout takes the weights as they are
    return DiffTransformerConfig(attention_type=attention_type, **base | fields)


def model(attention_type="diff", **fields):
    """A model as it starts."""
    torch.manual_seed(1)
    return DiffTransformerForCausalLM(config(attention_type, **fields))


def saved(folder, attention_type="diff", **fields):
    """A model's folder with the byte tokenizer and a chat template, and the model."""
    made = model(attention_type, **fields).eval()
    made.save_pretrained(folder)
    byte_tokenizer().save(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    return made


def with_code(folder, attention_type="diff", **fields):
    """The same with remote code; no gain is 1, and no lambda is near its start."""
    made = saved(folder.with_name(f"{folder.name}-plain"), attention_type, initializer_range=0.1, **fields)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or "lambda" in name:
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.35 * noise)
    made.save_pretrained(folder.with_name(f"{folder.name}-plain"))
    export_folder(folder.with_name(f"{folder.name}-plain"), folder, with_code=True)
    return made


def stock(folder):
    """The same as a `diffllama` folder."""
    ours = folder.with_name("ours")
    made = saved(ours)
    convert_folder(ours, folder, to="diffllama")
    return made


def differential_qwen(folder, to="diff"):
    """A Qwen3 made differential, in a folder with the same tokenizer."""
    plain = folder.with_name("plain")
    ours = saved(plain).config
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    sizes = {name: getattr(ours, name) for name in (*shared, *special)}
    config = Qwen3Config(num_key_value_heads=2, head_dim=8, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    upcycle_folder(plain, folder, to=to)
    return AutoModelForCausalLM.from_pretrained(folder)


def tokens(*shape, seed=3):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(network, ids):
    network.eval()
    return network(ids).logits

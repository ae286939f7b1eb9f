"""Tiny models whose maps are sharp, and the pages that show them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer.data import byte_tokenizer
from difftransformer_lab.explorer import maps
from tests.support.tiny_models import scramble, tiny

FIELDS = {"vocab_size": 258, "num_hidden_layers": 3}
GROUPED = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40}
TEXT = "one two\nthree </script> \u00e9 http://x two"


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return scramble(LlamaForCausalLM(LlamaConfig(**FIELDS, **sizes, max_position_embeddings=128))).eval()


MAKE = {
    "diff": lambda: tiny(attention_type="diff", **FIELDS),
    "diff_v2": lambda: tiny(attention_type="diff_v2", **FIELDS),
    "grouped_diff": lambda: tiny(attention_type="grouped_diff", **FIELDS, **GROUPED),
    "softmax": lambda: tiny(attention_type="softmax", **FIELDS),
    "llama": llama,
}


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Pages of V1, V2, a Llama, and V1 beside its twin, in files."""
    folder, tokenizer = tmp_path_factory.mktemp("maps"), byte_tokenizer()
    made = {kind: maps(MAKE[kind](), tokenizer, TEXT) for kind in ("diff", "diff_v2", "llama")}
    made["beside"] = maps(MAKE["diff"](), tokenizer, TEXT, MAKE["softmax"]())
    return {kind: page.save(folder / f"{kind}.html") for kind, page in made.items()}

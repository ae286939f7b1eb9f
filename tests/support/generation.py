"""Models to generate with, their caches, and the ways of greedy generation."""

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedCache

from tests.support.oracle import relative_error
from tests.support.tiny_models import tiny as tied

WAYS = {"uncached": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}}


def tiny(**fields):
    """An untied model: drawn weights with a tied output repeat the last token for ever."""
    return tied(tie_word_embeddings=False, **fields)


def cache_of(kind, model, length):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=length)


def greedy(model, ids, new=8, **kwargs):
    out = model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)
    return out[:, ids.shape[1] :]


@torch.no_grad()
def check_quantized_cache(model, ids, monkeypatch):
    """In 8 bits the logits move a little. Where the cache rounds to fp32 instead, tokens are those of a plain cache."""
    cache = QuantizedCache("fp8", model.config)
    model(ids[:, :9], past_key_values=cache)
    found, expected = model(ids[:, 9:], past_key_values=cache).logits, model(ids).logits[:, 9:]
    assert cache.get_seq_length() == ids.shape[1]
    assert 1e-4 < relative_error(found, expected) < 0.2
    monkeypatch.setattr(Fp8QuantizedLayer, "fp8_dtype", torch.float32)
    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    special = {"eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(greedy(model, ids, **special, **quantized), greedy(model, ids, **special))

"""Models to generate with, their caches, and the ways of greedy generation."""

from transformers import DynamicCache, StaticCache

from tests.support.tiny_models import tiny as tied

WAYS = {
    "uncached": {"use_cache": False},
    "dynamic": {},
    "static": {"cache_implementation": "static"},
}


def tiny(**fields):
    """An untied model: drawn weights with a tied output repeat the last token for ever."""
    return tied(tie_word_embeddings=False, **fields)


def cache_of(kind, model, length):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=length)


def greedy(model, ids, new=8, **kwargs):
    out = model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)
    return out[:, ids.shape[1] :]

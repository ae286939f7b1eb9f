"""What separates documents: the tokenizer's end of text, which no loss counts and every result names."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data import byte_tokenizer
from difftransformer.errors import CheckpointError
from difftransformer.train import build_model
from difftransformer.train.config import TrainingConfig
from difftransformer.train.parallel import Mesh
from difftransformer.train.trainer import validate
from difftransformer_lab.analysis.page import suite_page
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.opening import open_language_model
from difftransformer_lab.evals.prompts.chat import chat_frame
from difftransformer_lab.evals.tasks.recall import Options, RecallTask
from difftransformer_lab.results import TaskResult, read_result
from tests.support.fakes import TensorModel
from tests.support.task_results import task_result

BEGIN, END = 258, 259  # of `<s>` and `</s>`, after the bytes and the byte tokenizer's own two


@pytest.fixture
def saved(tmp_path):
    """Save a model whose tokenizer names these tokens, as published models do."""

    def save(begins=False, **named):
        torch.manual_seed(2)
        sizes = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        DiffTransformerForCausalLM(DiffTransformerConfig(**sizes)).save_pretrained(tmp_path / "model")
        tokenizer = byte_tokenizer()
        tokenizer.backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
        if begins:
            tokenizer.backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
        tokenizer.save(tmp_path / "model")
        path = tmp_path / "model" / "tokenizer_config.json"
        settings = {key: value for key, value in json.loads(path.read_text()).items() if not key.endswith("_token")}
        path.write_text(json.dumps(settings | named))
        return str(tmp_path / "model")

    return save


def write_documents(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize(("named", "separator", "first"), [
    ({"bos_token": "<s>", "eos_token": "</s>"}, END, BEGIN), ({"eos_token": "</s>"}, END, END),
    ({"bos_token": "<s>"}, BEGIN, BEGIN),  # it has no end of text
    ({"bos_token": "<s>", "eos_token": "<s>"}, BEGIN, BEGIN),
    ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|pad|>"}, END, BEGIN),
])  # fmt: skip
def test_the_end_of_text_separates_and_the_begin_of_text_begins(named, separator, first, saved):
    template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    with open_language_model(saved(**named, chat_template=template)) as opened:
        tokenizer = opened.language_model.tokenizer
    assert (tokenizer.end_of_text, tokenizer.begin_of_text) == (separator, first)
    before, after = chat_frame(tokenizer)
    assert before == [first if "bos_token" in named else separator]
    assert after == [separator]


@pytest.mark.parametrize("begins", [True, False])
def test_windows_begin_as_the_tokenizer_begins_a_text(begins, saved, tmp_path):
    model = saved(begins, bos_token="<s>", eos_token="</s>")
    with open_language_model(model) as opened:
        assert opened.language_model.tokenizer.begins_texts == begins
    text = write_documents(tmp_path / "text.jsonl", "One text of one document.")
    words = ["--text", text, "--window", "8", "--windows", "2", "--out", str(tmp_path / "out")]
    assert main(["eval", "perplexity", model, *words]) == 0
    result = read_result(tmp_path / "out" / "perplexity.json", TaskResult)
    assert any(
        choice.startswith("Each window begins with '<s>'") == begins for choice in result.choices if "<s>" in choice
    )
    network, ids = DiffTransformerForCausalLM.from_pretrained(model), list(b"One text of one document.")
    rows = torch.tensor([[BEGIN if begins else ids[start], *ids[start + 1 : start + 9]] for start in (0, 8)])
    with torch.no_grad():
        losses = F.cross_entropy(network(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    assert next(row.value for row in result.measurements if row.name == "nll") == pytest.approx(losses.item(), rel=1e-5)


def test_a_tokenizer_without_either_is_refused(saved):
    with pytest.raises(CheckpointError, match="no token that begins or ends a text"), open_language_model(saved()):
        pass


def test_perplexity_scores_no_separator_and_names_it(saved, tmp_path):
    model = saved(bos_token="<s>", eos_token="</s>")
    texts = [
        "The first one.", "2", "A third document, <s> and </s> in words.", "And a fourth, which is longer than that.",
    ]  # fmt: skip
    source = write_documents(tmp_path / "text.jsonl", *texts)
    words = ["--text", source, "--window", "20", "--windows", "4", "--position-buckets", "20"]
    assert main(["eval", "perplexity", model, *words, "--out", str(tmp_path / "out")]) == 0
    result = read_result(tmp_path / "out" / "perplexity.json", TaskResult)
    (choice,) = [choice for choice in result.choices if "separated by" in choice]
    assert "'</s>', which is never scored" in choice
    stream = [token for text in texts for token in [*text.encode(), END]][:81]
    assert (len(stream), stream.count(END)) == (81, 3)
    network = DiffTransformerForCausalLM.from_pretrained(model)
    nats, at, bytes_ = [], [], 0
    with torch.no_grad():
        for start in range(0, 80, 20):
            row = torch.tensor([stream[start : start + 21]])
            losses = F.cross_entropy(network(row[:, :-1]).logits[0], row[0, 1:], reduction="none").tolist()
            for position, (target, loss) in enumerate(zip(row[0, 1:].tolist(), losses, strict=True)):
                if target != END:
                    nats.append(loss)
                    at.append(position)
                    bytes_ += 1
    assert len(nats) < 80
    found = {row.name: row.value for row in result.measurements if not row.at}
    assert found["nll"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert found["bits per byte"] == pytest.approx(sum(nats) / np.log(2) / bytes_, rel=1e-5)
    nats, at = np.array(nats), np.array(at)
    for row in result.measurements:
        if row.name == "nll by position":
            assert row.value == pytest.approx(nats[at == row.at["start"]].mean(), rel=1e-5)
        if row.name == "cumulative nll":
            assert row.value == pytest.approx(nats[at < row.at["position"]].mean(), rel=1e-5)


def test_no_recalled_pair_goes_beyond_a_document(tmp_path):
    class Fake(TensorModel):
        tokenizer = byte_tokenizer()

        def nll(self, input_ids, targets):
            return torch.where(targets == 256, 1000.0, targets.double())

    source = write_documents(tmp_path / "text.jsonl", "xab", "xab", "xabx")
    model = Fake()
    task = RecallTask(Options(text=source, window=11, windows=1), model)
    # x a b | x a b | x a b x: the pairs xa and ab are repeated, and (b, end) and (end, x) are none.
    text = [*b"ab", None, *b"xab", None, *b"xabx"]
    assert list(task.requests[0].ids[1:]) == [256 if token is None else token for token in text]
    assert task.hits[0].tolist() == [False] * 4 + [True, True, False, False, True, True, False]
    scores = task.score([answer for _, answer in model.answer(task.requests)])
    found = {row.name: row.value for row in scores.measurements}
    assert found["nll"] == pytest.approx(np.mean([token for token in text if token is not None]))
    assert found["share of AR-hits"] == pytest.approx(4 / sum(token is not None for token in text))


def test_validation_while_training_scores_no_separator(toy_shards):
    """It is the mean over the other targets of the fixed windows."""
    sizes = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = build_model(DiffTransformerConfig(**sizes), 0)
    end = toy_shards.tokenizer.end_of_text
    every = {"steps": 1, "validate_every": 1, "checkpoint_every": 1}
    config = TrainingConfig(batch_tokens=256, context_stages=[(0, 64)], validation_windows=20, **every)
    stream = np.asarray(toy_shards.tokens("validation")[:]).astype(np.int64)
    fitting = (len(stream) - 1) // 64
    nats = []
    with torch.no_grad():
        for index in range(20):
            start = index * fitting // 20 * 64
            row = torch.from_numpy(stream[start : start + 65])[None]
            losses = F.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="none")
            nats += losses[row[0, 1:] != end].tolist()
    assert len(nats) < 20 * 64
    assert validate(model, toy_shards, config, Mesh()) == pytest.approx(np.mean(nats), rel=1e-6)


def test_the_page_names_the_separator_of_each_model():
    results = [
        dataclasses.replace(task_result("perplexity", name, []), choices=["Alike.", f"Separated by {token}."])
        for name, token in (("one", "</s>"), ("two", "<eos>"))
    ]
    (_, section, *_) = suite_page("s", {"perplexity": results}, []).sections
    (_, words) = section.texts[0]
    assert words.startswith("Alike.\none: Separated by </s>.\ntwo: Separated by <eos>.\n")

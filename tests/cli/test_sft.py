"""Supervised fine-tuning as a command: the shipped recipe teaches a model its answers, and `generate --chat` asks for them."""

import json
import random

import pytest
import torch

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data import byte_tokenizer
from difftransformer.train import read_metrics
from difftransformer_lab.cli.main import main


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = DiffTransformerConfig(**sizes, max_position_embeddings=256, eos_token_id=tokenizer.end_of_text)
    DiffTransformerForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def command(path, out, steps, **fields):
    words = ["train", "sft", "--out", str(out)]
    changes = {
        "data.source": path, "data.folder": path.parent / "shards", "training.steps": steps,
        "training.batch_tokens": 1024, "training.context_stages": "[[0, 256]]", "training.validation_windows": 4,
        "training.optimizer.learning_rate": "0.01", **{key.replace("__", "."): value for key, value in fields.items()},
    }  # fmt: skip
    return [*words, *(word for key, value in changes.items() for word in ("--set", f"{key}={value}"))]


def chats(path, rows):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path


def test_a_model_learns_its_answers(model, tmp_path, capsys):
    """What users say is noise, of ln(26) = 3.3 nats a letter, so a low loss is that of the answers alone."""
    draw, rows = random.Random(0), []
    for _ in range(120):
        noise = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=30))
        rows.append([{"role": "user", "content": noise}, {"role": "assistant", "content": "I see."}])
    path = chats(tmp_path / "chats.jsonl", rows)
    given = {"start_from": model, "data__tokenizer": model, "data__validation_share": 0.2}
    assert main([*command(path, tmp_path / "run", 60, **given), "--dry-run"]) == 0
    assert main(command(path, tmp_path / "run", 60, **given)) == 0
    steps, validations = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert steps[0].loss_nats > 4
    assert validations[-1].validation_loss_nats < 0.3
    capsys.readouterr()
    asked = ["--chat", "--max-new-tokens", "20"]
    assert main(["generate", str(tmp_path / "run"), noise, *asked]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "I see."


@pytest.mark.parametrize(("messages", "words"), [
    ([{"role": "user", "content": "Hello?"}], "chats.jsonl: line 1: messages without an answer"),
    ([{"role": "poet", "content": "Hello?"}], "line 1: message 1 has the role 'poet'; allowed are"),
])  # fmt: skip
def test_messages_without_an_answer_are_one_line(messages, words, model, tmp_path, capsys):
    path = chats(tmp_path / "chats.jsonl", [messages])
    assert main(command(path, tmp_path / "run", 1, start_from=model, data__tokenizer=model)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tokenising" not in line]
    assert words in line

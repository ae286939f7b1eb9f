"""A folder exported with code in programs that cannot import this package, and a plain folder in those that do."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ecosystem.test_harness import CHOICE, QUESTIONS, TASKS, log_likelihood
from tests.support.serve import check_answers, serving
from tests.support.tiny_folders import SENTENCES, differential_qwen, logits, saved, tokens, with_code

TRAINING = """
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

settings = {
    "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False,
    "disable_tqdm": True, "per_device_train_batch_size": 4,
}
def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

ids = torch.load("ids.pt", weights_only=True)
model = AutoModelForCausalLM.from_pretrained("m", trust_remote_code=True)
rows = [{"input_ids": row, "labels": row} for row in ids]
smooth = TrainingArguments("run", label_smoothing_factor=0.2, **settings)
trainer = Trainer(model=model, args=smooth, train_dataset=rows)
model.eval()
with torch.no_grad():
    log = model(ids).logits[:, :-1].log_softmax(-1)
    wanted = -0.8 * log.gather(-1, ids[:, 1:, None]).mean() - 0.2 * log.mean()
    found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
torch.testing.assert_close(found, wanted)
trainer.train()
assert losses(trainer)[-1] < losses(trainer)[0] - 0.05, losses(trainer)
trainer.save_model("trained")
with torch.no_grad():
    after = trainer.model.eval()(ids).logits
    again = AutoModelForCausalLM.from_pretrained("trained", trust_remote_code=True)
    assert torch.equal(again(ids).logits, after)
torch.save(after, "trained.pt")

tuner = SFTTrainer(
    model="m",
    args=SFTConfig("tuned", max_length=64, packing=True, trust_remote_code=True, **settings),
    train_dataset=Dataset.from_json("data/train.jsonl"),
)
tuner.train()
assert losses(tuner)[-1] < losses(tuner)[0] - 0.05, losses(tuner)
tuner.save_model("tuned")
assert Path("tuned/modeling_difftransformer.py").is_file()

from lm_eval.__main__ import cli_evaluate

sys.argv = [
    "lm_eval", "--model", "hf", "--model_args", "pretrained=m,trust_remote_code=True", "--tasks", "sums",
    "--include_path", "tasks", "--device", "cpu", "--log_samples", "--output_path", "scores",
]
cli_evaluate()
"""


@pytest.fixture
def texts(tmp_path):
    """A folder of texts, and a task of lm-eval."""
    for name in ("data", "tasks"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    file = tmp_path / "tasks" / "sums.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = TASKS.format(name="sums", file=file, kind="multiple_choice") + CHOICE
    (tmp_path / "tasks" / "sums.yaml").write_text(task)


def words_of_sft(folder, out):
    options = {
        "model_name_or_path": folder, "dataset_name": "data", "max_steps": 2, "max_length": 64, "output_dir": out,
        "use_cpu": "true", "bf16": "false", "report_to": "none",
    }  # fmt: skip
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


def test_trainer_trl_by_path_and_lm_eval(outside, needs, texts, tmp_path):
    for name in ("accelerate", "trl", "lm_eval"):
        needs(name)
    ours = with_code(tmp_path / "m")
    ids = tokens(4, 24)
    torch.save(ids, tmp_path / "ids.pt")
    outside(TRAINING)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(
        logits(trained, ids), torch.load(tmp_path / "trained.pt", weights_only=True), atol=1e-5, rtol=1e-5
    )
    (samples,) = (tmp_path / "scores").rglob("samples_sums_*.jsonl")
    answers = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    for question, answer in zip(QUESTIONS, answers, strict=True):
        wanted = [log_likelihood(ours, question["question"], " " + choice) for choice in question["choices"]]
        assert [float(nats) for nats, _ in answer["filtered_resps"]] == pytest.approx(wanted, abs=1e-4)
        assert answer["acc"] == (wanted.index(max(wanted)) == question["answer"])


def test_the_command_of_trl(outside, needs, texts, tmp_path):
    needs("trl")
    with_code(tmp_path / "m", "grouped_diff")
    words = ["trl", "sft", *words_of_sft("m", "tuned"), "--trust_remote_code", "true"]
    outside(f"import sys\nfrom trl.cli import main\nsys.argv = {words}\nsys.exit(main())\n")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", trust_remote_code=False)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert not torch.equal(tuned.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert (tmp_path / "tuned" / "modeling_difftransformer.py").is_file()


@pytest.mark.parametrize("where", ["with code", "by difftransformer.hub", "a differential Qwen3"])
def test_transformers_serve(where, outside, needs, tmp_path):
    for name in ("fastapi", "uvicorn", "openai"):
        needs(name)
    if where == "with code":
        ours = with_code(tmp_path / "m", "diff_v2")
        server = serving(tmp_path / "m", outside.environment, "--trust-remote-code")
    else:
        ours = differential_qwen(tmp_path / "m") if "Qwen3" in where else saved(tmp_path / "m", "dex")
        server = serving(tmp_path / "m", os.environ, command=("-m", "difftransformer.hub", "transformers"))
    with server as ask:
        check_answers(ask, ours, tmp_path / "m")

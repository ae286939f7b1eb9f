"""Trainer's label smoothing, TRL's reward models and transformers' pipelines with our heads; Llama is the yardstick."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, pipeline

import difftransformer
from tests.ecosystem.test_training_tools import ARGUMENTS, PROJECTIONS, losses
from tests.support.tiny_folders import SENTENCES, config, differential_qwen, model, saved, tokens

SMOOTHING = 0.2


def smoothed(network, ids, labels):
    """(1 - e) of the next token's negative log-probability and e of the mean over the vocabulary; the mean over targets."""
    with torch.no_grad():
        log_p = network(ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    real = targets != -100
    chosen = -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return ((1 - SMOOTHING) * chosen[real] + SMOOTHING * -log_p.mean(-1)[real]).mean()


def llama():
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "diff", "softmax", "diff with LoRA"])
def test_label_smoothing_is_shifted(kind, needs, tmp_path):
    needs("accelerate")
    if kind == "qwen3":
        network = differential_qwen(tmp_path / "m")
    else:
        network = llama() if kind == "llama" else model(kind.partition(" ")[0], initializer_range=0.3)
    if kind.endswith("LoRA"):
        peft = needs("peft")
        network = peft.get_peft_model(network, peft.LoraConfig(target_modules=PROJECTIONS, task_type="CAUSAL_LM"))
    network.eval()
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=SMOOTHING, **ARGUMENTS)
    loss = Trainer(model=network, args=arguments).compute_loss(network, {"input_ids": ids, "labels": labels.clone()})
    torch.testing.assert_close(loss, smoothed(network, ids, labels))


def folder_of(head, folder, **fields):
    """A folder with a tokenizer and a model with this head."""
    saved(folder)
    made = getattr(difftransformer, f"DiffTransformerFor{head}")(config(initializer_range=0.3, **fields)).eval()
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("is_causal", [True, False])
def test_text_classification(is_causal, tmp_path):
    made = folder_of("SequenceClassification", tmp_path, num_labels=3, is_causal=is_causal)
    classify = pipeline("text-classification", tmp_path, device="cpu")
    texts = ["a fox", "the quick brown fox jumps over it"]
    found = classify(texts, top_k=None, batch_size=2)  # padded
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text, scores in zip(texts, found, strict=True):
        with torch.no_grad():
            expected = made(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        assert {s["label"]: s["score"] for s in scores} == pytest.approx(
            {f"LABEL_{i}": p.item() for i, p in enumerate(expected)}, abs=1e-5
        )


def test_token_classification_and_question_answering(tmp_path):
    folder_of("TokenClassification", tmp_path / "tokens", is_causal=False)
    found = pipeline("token-classification", tmp_path / "tokens", device="cpu")("a fox")
    assert [entry["word"] for entry in found] == list("aĠfox")
    folder_of("QuestionAnswering", tmp_path / "answers", is_causal=False)
    answering = difftransformer.DiffTransformerForQuestionAnswering.from_pretrained(tmp_path / "answers")
    with torch.no_grad():
        assert answering(tokens(1, 9)).start_logits.shape == (1, 9)


def test_reward_model(needs, tmp_path):
    trl, datasets = needs("trl"), needs("datasets")
    folder_of("SequenceClassification", tmp_path / "base", num_labels=1)
    rows = [{"chosen": text, "rejected": text[::-1]} for text in SENTENCES]
    arguments = trl.RewardConfig(
        str(tmp_path / "run"), max_steps=8, max_length=64, save_strategy="no", bf16=False, **ARGUMENTS
    )
    trainer = trl.RewardTrainer(
        model=difftransformer.DiffTransformerForSequenceClassification.from_pretrained(tmp_path / "base"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "base"),
    )
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.1

"""PEFT, TRL and Trainer train our models and a `diffllama` folder: losses fall, what is saved opens to the same logits."""

import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Trainer, TrainingArguments

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.attention import VARIANTS
from difftransformer.data import byte_tokenizer
from difftransformer.errors import CheckpointError
from difftransformer_lab.cli.main import main
from tests.support.tiny_folders import SENTENCES, differential_qwen, logits, model, saved, tokens
from tests.support.tiny_models import scramble, tiny

TRAINED_TYPES = ("diff", "diff_v2")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ARGUMENTS = {
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 8,
    "report_to": [],
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def own_steps(network, ids, steps=6, rate=2e-2):
    """Plain AdamW on what may learn; the first and the last loss."""
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=rate)
    network.train()
    seen = []
    for _ in range(steps):
        loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen[0], seen[-1]


@pytest.mark.parametrize("name", ["softmax", "diff", "grouped_diff_v2", "dex", "qwen3"])
def test_lora(name, needs, tmp_path):
    peft = needs("peft")
    base = differential_qwen(tmp_path / "base") if name == "qwen3" else saved(tmp_path / "base", name)
    ids = tokens(4, 24)
    before = logits(base, ids)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=PROJECTIONS, task_type="CAUSAL_LM"))
    learning = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * 2 * len(PROJECTIONS)
    assert all("lora_" in name for name in learning)
    assert torch.equal(logits(adapted, ids), before)  # B starts at zero
    first, last = own_steps(adapted, ids)
    assert last < first - 0.05
    after = logits(adapted, ids)
    assert (after - before).abs().max() > 0.1
    adapted.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert torch.equal(logits(again, ids), after)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), after, atol=1e-5, rtol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids), logits(merged, ids))


@pytest.mark.parametrize("name", ["diff", "qwen3"])
def test_the_folder_of_an_adapter(name, needs, tmp_path):
    """It opens with the model that it names; both are read from safetensors inside their folders alone."""
    peft = needs("peft")
    base, adapter, ids = tmp_path / "base", tmp_path / "adapter", tokens(2, 24)
    _ = differential_qwen(base) if name == "qwen3" else saved(base, name)
    network = AutoModelForCausalLM.from_pretrained(base)
    lora = peft.LoraConfig(target_modules=PROJECTIONS, task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(network, lora)
    adapted.save_pretrained(adapter)
    for opens in (type(network), AutoModelForCausalLM):
        assert torch.equal(logits(opens.from_pretrained(adapter), ids), logits(adapted, ids))
    (base / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (base / "model.safetensors").symlink_to("../outside.safetensors")
    for opens in (type(network), AutoModelForCausalLM):
        with pytest.raises(CheckpointError, match=r"model\.safetensors is a link out of the folder"):
            opens.from_pretrained(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(peft.get_peft_model_state_dict(adapted), adapter / "adapter_model.bin")
    (base / "model.safetensors").unlink()
    (tmp_path / "outside.safetensors").rename(base / "model.safetensors")
    for opens in (type(network), AutoModelForCausalLM):
        with pytest.raises(CheckpointError, match=r"there is no adapter_model\.safetensors here"):
            opens.from_pretrained(adapter)


@torch.no_grad()
def test_adapted_embeddings_are_multiplied(needs):
    """PEFT's sum of the embedding and its adapter, times the factor, is what the first layer reads."""
    peft = needs("peft")
    base = tiny(embedding_multiplier=3.3, tie_word_embeddings=False)
    ids, embedding = tokens(2, 8) % 61, base.get_input_embeddings().weight.clone()
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, lora)
    layer = adapted.get_input_embeddings()
    a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    a.normal_(generator=torch.Generator().manual_seed(0))
    b.normal_(generator=torch.Generator().manual_seed(1))
    expected = 3.3 * (embedding[ids] + 8 / 4 * (b @ a).T[ids])
    found = adapted(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(found.hidden_states[0], expected)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), found.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention_type", VARIANTS)
def test_prefix_tuning(attention_type, needs, tmp_path):
    peft = needs("peft")
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4}
    if attention_type == "grouped_diff_v2":
        shape["num_noise_heads"] = 4  # so that a token caches as much as PEFT makes
    base = saved(tmp_path / "base", attention_type, initializer_range=0.3, **shape)
    ids = tokens(3, 9)
    adapted = peft.get_peft_model(base, peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
    first, last = own_steps(adapted, ids, rate=0.3)
    assert last < first - 0.02
    after = logits(adapted, ids)
    # The same keys and values, in the heads of a cache that the model fills itself.
    filled = base(ids[:1, :5]).past_key_values.layers
    learned = adapted.prompt_encoder["default"].embedding.weight.detach().unflatten(1, (len(filled), 2, -1))
    pairs = []
    for layer, pair in zip(filled, learned.unbind(1), strict=True):
        form = layer.keys.transpose(1, 2).shape
        assert layer.values.shape == layer.keys.shape
        pairs.append(tuple(part.reshape(form).transpose(1, 2).expand(3, -1, -1, -1) for part in pair.unbind(1)))
    assert torch.equal(base(ids, past_key_values=DynamicCache(pairs)).logits, after)
    continued = adapted.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    for end in range(9, 13):
        assert torch.equal(logits(adapted, continued[:, :end])[:, -1].argmax(-1), continued[:, end])
    adapted.save_pretrained(tmp_path / "prefix")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, tmp_path / "prefix"), ids), after)


def test_peft_wants_target_modules_and_all_linear_finds_them(needs):
    peft = needs("peft")
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(model(), peft.LoraConfig(task_type="CAUSAL_LM"))
    for attention_type, more in (("diff", set()), ("diff_v2", {"lambda_proj"})):
        lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model(attention_type), lora)
        names = {name.split(".lora_A")[0].split(".")[-1] for name, _ in adapted.named_parameters() if "lora_A" in name}
        assert names == {*PROJECTIONS, "gate_proj", "up_proj", "down_proj"} | more


@pytest.mark.parametrize("attention_type", TRAINED_TYPES)
def test_trainer(attention_type, needs, tmp_path):
    needs("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 24)]
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=6, save_steps=3, seed=5, **ARGUMENTS)
    trainer = Trainer(model=model(attention_type), args=arguments, train_dataset=rows)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.05
    ids = tokens(2, 20, seed=4)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert torch.equal(logits(opened, ids), logits(trainer.model, ids))
    resumed = Trainer(model=model(attention_type), args=arguments, train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert losses(resumed) == losses(trainer)
    assert torch.equal(logits(resumed.model, ids), logits(trainer.model, ids))
    expected = torch.stack([logits(trainer.model, row["input_ids"][None])[0] for row in rows])
    trainer.model.loss_chunk_tokens = 7
    predicted = torch.tensor(trainer.predict(rows).predictions)
    torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-5)


@pytest.fixture
def tuned(needs, tmp_path):
    """Fine-tune a model with TRL until its loss has fallen, and save it in `tuned`; the trainer."""
    trl, datasets = needs("trl"), needs("datasets")

    def tune(network, *, fall=0.1, settings=None, **options):
        settings = ARGUMENTS | {"max_steps": 4, "max_length": 64, "bf16": False} | (settings or {})
        rows = datasets.Dataset.from_list([{"text": text} for text in SENTENCES])
        arguments = trl.SFTConfig(str(tmp_path / "run"), save_strategy="no", **settings)
        trainer = trl.SFTTrainer(model=network, args=arguments, train_dataset=rows, **options)
        trainer.train()
        assert losses(trainer)[-1] < losses(trainer)[0] - fall
        trainer.save_model(str(tmp_path / "tuned"))
        return trainer

    return tune


@pytest.mark.parametrize("attention_type", TRAINED_TYPES)
def test_supervised_fine_tuning_of_packed_rows(attention_type, tuned, tmp_path):
    saved(tmp_path / "base", attention_type)
    network, tokenizer = (kind.from_pretrained(tmp_path / "base") for kind in (AutoModelForCausalLM, AutoTokenizer))
    settings = {"packing": True, "gradient_checkpointing": False, "per_device_train_batch_size": 2}
    trainer = tuned(network, settings=settings, processing_class=tokenizer)
    opened, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"), tokens(2, 20)
    assert torch.equal(logits(opened, ids), logits(trainer.model, ids))


def test_the_example_tunes_on_answers_alone(needs, tmp_path, monkeypatch, capsys):
    """What users say is noise, of ln(26) = 3.3 nats a letter, so a low loss is that of the answers."""
    needs("trl")
    monkeypatch.chdir(tmp_path)
    tokenizer, draw, rows = byte_tokenizer(), random.Random(0), []
    sizes = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = DiffTransformerConfig(**sizes, max_position_embeddings=256, eos_token_id=tokenizer.end_of_text)
    DiffTransformerForCausalLM(config).save_pretrained("base")
    tokenizer.save("base")
    for _ in range(120):
        noise = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=30))
        rows.append([{"role": "user", "content": noise}, {"role": "assistant", "content": "I see."}])
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ["base", "chats.jsonl", "--epochs", "6", "--batch", "4", "--length", "256", "--rate", "0.01"]
    script = Path(__file__).parents[2] / "examples" / "sft_trl.py"
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    assert losses(runpy.run_path(str(script))["main"]())[-1] < 0.3
    capsys.readouterr()
    assert main(["generate", "tuned", noise, "--chat", "--max-new-tokens", "20"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "I see."


@pytest.mark.parametrize("attention_type", ["diff", "grouped_diff"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL calls it
def test_grpo_with_continuous_batching(attention_type, needs, tmp_path):
    """The completions that are rewarded are those of `generate` (the likeliest token has probability 1)."""
    trl, datasets = needs("trl"), needs("datasets")
    fields = {"num_attention_heads": 5, "head_dim": 8} if attention_type.startswith("grouped") else {}
    network = scramble(saved(tmp_path / "base", attention_type, tie_word_embeddings=False, **fields))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    prompts, length = ["the quick", "brown fox jumps"], 6
    expected, rewarded = {}, {}
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        row = network.generate(ids, do_sample=False, max_new_tokens=length, eos_token_id=None)
        expected[prompt] = row[0, ids.shape[1] :].tolist()

    def reward(prompts, completion_ids, **_):
        rewarded.update(zip(prompts, completion_ids, strict=True))
        return [float(len(set(ids))) for ids in completion_ids]

    arguments = trl.GRPOConfig(
        str(tmp_path / "run"),
        max_steps=1,
        num_generations=2,
        max_completion_length=length,
        top_k=1,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"page_size": 4, "num_blocks": 48, "max_batch_tokens": 16},
        bf16=False,
        gradient_checkpointing=False,
        **ARGUMENTS | {"per_device_train_batch_size": 4},
    )
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trl.GRPOTrainer(
        model=network, reward_funcs=reward, args=arguments, train_dataset=rows, processing_class=tokenizer
    ).train()
    assert rewarded == expected


@pytest.mark.parametrize("make", [saved, differential_qwen])
def test_trl_opens_a_folder_by_its_path(make, tuned, tmp_path):
    before = make(tmp_path / "base")
    trainer = tuned(str(tmp_path / "base"))
    assert type(trainer.model) is type(before)
    opened, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"), tokens(2, 20)
    assert torch.equal(logits(opened, ids), logits(trainer.model, ids))

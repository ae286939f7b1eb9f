"""Whole models, a run, results and texts to damage, and a server that runs the command on what is left of them."""

import json
import random

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from difftransformer.convert import convert_folder
from difftransformer.data import byte_tokenizer
from difftransformer.model.quiet import quietly
from difftransformer_lab.cli.main import main
from difftransformer_lab.results import write_result
from tests.conftest import TOY
from tests.report.conftest import make_comparison
from tests.support import tiny_folders
from tests.support.forks import ForkServer

WARM_UP = (
    ["generate", "ours", "a", "--max-new-tokens", "2"],
    ["generate", "llama", "a", "--max-new-tokens", "2"],
    ["eval", "perplexity", "ours", "--text", "text.txt", "--windows", "1", "--out", "warm/perplexity"],
    ["export", "ours", "warm/export"],
    ["upcycle", "llama", "warm/upcycled", "--to", "diff", "--text", "text.txt", "--tokens", "9"],
    ["eval", "run"],
    ["report", "results.json", "--out", "warm/report"],
    ["bench", "nothing"],
    ["info", "tiny"],
)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A folder with everything that commands open."""
    folder = tmp_path_factory.mktemp("whole")
    with quietly():
        tiny_folders.saved(folder / "ours")
        convert_folder(folder / "ours", folder / "diffllama", to="diffllama")
        tiny_folders.model().save_pretrained(folder / "sharded", max_shard_size="20KB")
        torch.manual_seed(1)
        sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        llama = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=128)
        LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    for name in ("llama", "sharded"):
        byte_tokenizer().save(folder / name)
    draw = random.Random(3)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(99)]
    lines = "".join(" ".join(draw.choices(words, k=9)) + "\n" for _ in range(99))
    (folder / "text.txt").write_text(lines, encoding="utf-8")
    rows = [{"text": f"a {word} text", "label": word[0], "problem": "1+1?", "answer": "2"} for word in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    qa = [{"document": " ".join(words[:30]), "summary": words[0], "question": "what?", "answer": words[0]}] * 3
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in qa), encoding="utf-8")
    recipe = json.loads(json.dumps(TOY))
    recipe["data"] |= {"source": str(folder / "text.txt"), "folder": str(folder / "shards"), "tokenizer": "byte"}
    recipe["training"] |= {"steps": 2, "context_stages": [[0, 64]], "validate_every": 1, "checkpoint_every": 1}
    recipe["training"]["retrieval"] = None
    recipe["evaluation"] = recipe["evaluation"][:1]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    start = recipe | {"model": {}, "start_from": "ours", "name": "start"}
    (folder / "start.yaml").write_text(yaml.safe_dump(start), encoding="utf-8")
    tasks = [{"task": "perplexity", "options": {"text": "text.txt", "windows": 2}}]
    (folder / "suite.yaml").write_text(yaml.safe_dump({"name": "small", "tasks": tasks}), encoding="utf-8")
    study = {
        "name": "small",
        "question": "?",
        "recipe": "recipe.yaml",
        "reference": "twin",
        "arms": {
            "diff": {"set": {"model.attention_type": "diff"}},
            "twin": {"set": {"model.attention_type": "softmax"}},
        },
        "figures": [{"label": "loss", "task": "perplexity", "name": "nll"}],
        "presets": {"laptop": {"seeds": 1}},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    assert main(["eval", str(folder / "run")]) == 0
    write_result(make_comparison(seeds=1, layers=2, needle_counts=1), folder / "results.json")
    return folder


@pytest.fixture(scope="session")
def server(whole):
    with ForkServer(whole, WARM_UP) as made:
        yield made

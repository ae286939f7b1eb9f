"""One of the processes of test_tensor_parallel.py: logits, greedy tokens and gradients of every saved model.

Run with WORLD_SIZE=1 it does the same with whole models.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from difftransformer.families import family_config
from tests.support.parallel_steps import whole
from tests.support.tiny_models import scramble, tiny, tokens

FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
EIGHT = {"num_attention_heads": 8, "hidden_size": 64}
CASES = {
    "softmax": FOUR,
    "diff": FOUR,
    "diff, grouped keys": EIGHT | {"num_key_value_heads": 4},
    "diff, no gain, untied": FOUR | {"head_norm": "plain", "tie_word_embeddings": False},
    "diff, lambda by head": FOUR | {"lambda_form": "head"},
    "diff, multiplied": FOUR | {"embedding_multiplier": 3.3},
    "diff, QK norm": FOUR | {"qk_norm": True},
    "diff_v2": FOUR,
    "grouped_diff": EIGHT | {"num_noise_heads": 2},
    "grouped_diff_v2": EIGHT | {"num_noise_heads": 2},
    "xsa": EIGHT | {"num_key_value_heads": 4},
    "gate": EIGHT | {"num_key_value_heads": 4},
    "diff_gate": FOUR,
    "softmax_norm": FOUR,
    "dex": FOUR,
    "dex, heads of one process": FOUR | {"dex_heads": [[0, 1], [1, 2]]},
}

FAMILIES = {
    "qwen3 diff": {"lambda_form": "layer", "head_norm": "gain"},
    "qwen3 diff_v2": {},
    "qwen3 dex": {},
    "qwen3 xsa": {},
    "qwen3 diff_gate": {"lambda_form": "layer", "head_norm": "gain"},
    "qwen3 grouped_diff, lambda by head": {"lambda_form": "head", "num_noise_heads": 4},
}


def saved(name, folder):
    """Save the model of a case."""
    if name in CASES:
        tiny(**fields(name)).save_pretrained(folder)
        return
    family, _, to = name.partition(",")[0].partition(" ")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    if "diff" in to:
        heads |= {"num_differential_heads": 4, "num_differential_key_value_heads": 2, "value_head_dim": 8}
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "eos_token_id": None}
    config = family_config(family)(attention_type=to, **heads | sizes | FAMILIES[name])
    torch.manual_seed(0)
    scramble(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)


def fields(name):
    """The configuration of a case."""
    return CASES[name] | {"attention_type": name.partition(",")[0]}


def results(folder, **options):
    """Logits, gradients of the loss, and greedy tokens, in float64 but for the lambda vectors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
    ids = tokens(2, 9)
    found = {"tokens": model.eval().generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)}
    out = model.train()(ids, labels=ids)
    out.loss.backward()
    grads = {f"grad {name}": whole(p.grad).clone() for name, p in model.named_parameters()}
    return found | {"logits": whole(out.logits).detach()} | grads


def main():
    """Be the process of a rank. The arguments are the file where the processes meet and the folder of models."""
    torch.set_num_threads(1)
    meeting, models = sys.argv[1:3]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    found = {folder.name: results(folder, tp_plan="auto") for folder in sorted(Path(models).iterdir())}
    if rank == 0:
        torch.save(found, f"{meeting}.results")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own teardown

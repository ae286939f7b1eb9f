"""One of the processes of test_fsdp.py: three AdamW steps of every case, losses and gradient norms printed as JSON.

Run with WORLD_SIZE=1 it does the same without a process group, on the whole batch.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from difftransformer.model.modeling import DecoderLayer
from difftransformer.model.nll import summed_nll
from tests.support.tiny_models import tiny, tokens

CASES = {
    **{name: {"attention_type": name} for name in ("diff", "diff_v2", "grouped_diff_v2", "dex", "softmax")},
    "softmax, headwise norm": {"attention_type": "softmax", "softmax_head_norm": "gain"},
    "grouped_diff, QK norm": {"attention_type": "grouped_diff", "qk_norm": True},
    "diff, scalar lambda": {"lambda_form": "scalar"},
    "diff, untied, grouped": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "diff, compiled": {"num_hidden_layers": 10}, "diff, compiled, DDP": {"num_hidden_layers": 10},
    "diff, bf16": {}, "diff, chunked loss": {}, "diff, multiplied": {"embedding_multiplier": 3.3},
}  # fmt: skip


def train(name, rank, world):
    # AdamW's first steps depend on signs of gradients, so sums in another order need float64; compiled layers have SGD instead.
    dtype = torch.float32 if name.endswith("bf16") or "compiled" in name else torch.float64
    model = tiny(**CASES[name]).to(dtype).train()
    model.loss_chunk_tokens = 7 if name.endswith("chunked loss") else None
    compiled, counter, whole = "compiled" in name and world > 1, CompileCounterWithBackend("aot_eager"), model
    torch.compiler.reset()
    for layer in model.model.layers if compiled else ():
        layer.compile(backend=counter)
    if world > 1 and name.endswith("DDP"):
        whole = DistributedDataParallel(model)
    elif world > 1:
        mesh = init_device_mesh("cpu", (world,))
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = low if name.endswith("bf16") else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "compiled" in name:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    steps = []
    for step in range(3):
        ids = tokens(4, 16, seed=step).chunk(world)[rank]
        loss = whole(ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        lambda_norm = torch.nn.utils.get_total_norm(
            [p.grad for n, p in model.named_parameters() if "lambda" in n] or []
        )
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        if world > 1:
            norm, lambda_norm = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (norm, lambda_norm))
            dist.all_reduce(loss)
        steps.append([loss.item() / world, norm.item(), lambda_norm.item()])
    lambdas = {p.dtype for n, p in model.named_parameters() if "lambda" in n}
    assert lambdas <= {dtype}
    assert counter.frame_count == compiled  # one graph for all layers
    return steps


def flattened(attention_type):
    """Return a bf16 model's loss after each of two steps, of plain PyTorch and of FSDP1; all processes see all rows."""
    losses = []
    for wraps in (False, True):
        model = tiny(attention_type=attention_type).train().to(torch.bfloat16)
        if wraps:
            policy, device = ModuleWrapPolicy({DecoderLayer}), torch.device("cpu")
            model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ids = tokens(4, 16)
        losses.append([])
        for _ in range(3):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses


def vocabulary_parallel(world):
    """Return the loss, and the gradients of hidden states and of the head, whose rows are divided over the ranks."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 16, generator=draw), torch.randn(64, 16, generator=draw)
    targets = torch.randint(64, (30,), generator=draw)
    if world > 1:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (world,)), [Shard(0)])
    hidden.requires_grad_(), weight.requires_grad_()
    loss = summed_nll(hidden, weight, targets.where(targets % 5 > 0, -100), chunk_tokens=7)
    loss.backward()
    gradient = weight.grad.full_tensor() if world > 1 else weight.grad
    return [value.flatten().tolist() for value in (loss.detach(), hidden.grad, gradient)]


def main():
    """Be the process of a rank; the file where the processes meet is the only argument."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    results = {name: train(name, rank, world) for name in CASES}
    results["vocabulary parallel"] = vocabulary_parallel(world)
    if world > 1:
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate says it
        results |= {f"FSDP1, {name}": flattened(name) for name in ("diff", "softmax")}
    if rank == 0:
        print(json.dumps(results), flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        # gloo's threads sometimes outlive the group and abort the interpreter's own teardown; all work is done here.
        os._exit(0)

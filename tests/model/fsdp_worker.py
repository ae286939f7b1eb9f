"""One process of the FSDP2 test: three AdamW steps on its part of the batch. Prints losses and gradient norms."""

import json
import sys

import torch
import torch.distributed as dist
from small_models import VOCABULARY, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 3


def train(shape, rank=0, world=1, precision="fp32"):
    """Losses and gradient norms of STEPS steps; sharded where there are several processes."""
    model = make_model(shape).train()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32
        )
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    measured = []
    for step in range(STEPS):
        ids = torch.randint(1, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = model(ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float().clone()
        if world > 1:
            dist.all_reduce(mean)
        measured.append((mean.item() / world, norm.item()))
    return measured


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = train(sys.argv[1], dist.get_rank(), dist.get_world_size(), sys.argv[2])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()

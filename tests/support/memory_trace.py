"""One training step on fake tensors, as one of many ranks: what PyTorch's own memory tracker finds, without the memory.

Operators run on shapes alone, FSDP2 runs on a fake process group, and the tracker follows every storage. The fake device is a
CPU, so norms keep one tensor more than a GPU's fused ones, as the formulas count too. The tracker's time grows with
the square of the number of modules, so models of few layers are traced, and the others follow: every layer adds the same bytes.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from difftransformer.model import DiffTransformerForCausalLM
from difftransformer.model.nll import loss_chunk, summed_next_token_nll
from difftransformer.train.parallel import Mesh, Processes

TRACED_LAYERS = (4, 5)  # with fewer, gathered weights may outweigh activations


def traced_bytes(config, training, parallel, processes):
    """Return the peak bytes of one rank in a step after the first.

    Args:
        config: Model configuration.
        training: Training configuration.
        parallel: How ranks divide the run.
        processes: Number of ranks.
    """
    with _fake_ranks(processes):
        mesh = Mesh(Processes(count=processes), parallel)
        few, more = TRACED_LAYERS
        low, high = (_peak_bytes(config, layers, training, mesh) for layers in TRACED_LAYERS)
    return low + (high - low) * (config.num_hidden_layers - few) // (more - few)


def _peak_bytes(config, layers, training, mesh):
    config = config.twin(config.attention_type)
    config.num_hidden_layers = layers
    config.attn_backend = "cpu"  # its operator keeps what a GPU kernel keeps
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # those of device meshes
        model = DiffTransformerForCausalLM(config).train()
    if training.gradient_checkpointing:
        # Newer releases of transformers rename the method and warn about the old name.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable()
    model = mesh.place(model, training)  # its parameters are fake, and the meshes are not
    with mode:
        return tracked_bytes(model, training, mesh)


def tracked_bytes(model, training, mesh):
    """Return the peak bytes of the tensors of this process in a step, by PyTorch's tracker.

    Args:
        model: The model in its place on the mesh; its parameters may be fake, under their mode.
        training: Training configuration.
        mesh: How ranks divide the run.
    """
    rows = training.batch_tokens // training.context_tokens // training.accumulation // mesh.row_ranks
    tokens = rows * training.context_tokens // mesh.context
    model.loss_chunk_tokens = training.loss_chunk_tokens or loss_chunk(tokens, model.config.vocab_size, "cuda")
    # The optimizer sees this rank's parts, because the tracker counts a DTensor as large as the whole.
    own = {parameter: _own(parameter.detach()) for parameter in model.parameters()}
    optimizer = torch.optim.AdamW(own.values(), fused=True)
    ids = torch.zeros(rows, training.context_tokens // mesh.context, dtype=torch.long)

    for mine in own.values():  # as after the first step
        moments = {name: torch.zeros_like(mine) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[mine] = {"step": torch.zeros(()), **moments}
    parts = min(2, training.accumulation)  # more hold no more

    def compute(part):
        mesh.synchronise(model, now=part == parts - 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=training.precision == "bf16"):
            loss = summed_next_token_nll(model, ids, ids)
        loss.backward()

    if mesh.tensor > 1:  # DTensor runs each operation once on fake tensors of the whole shapes, to know the shapes
        compute(parts - 1)
        model.zero_grad()
    tracker = _Tracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for part in range(parts):
            compute(part)
            tracker.reset_mod_stats()  # which it has for one pass only; the peak stays
        for parameter, mine in own.items():
            mine.grad = _own(parameter.grad)
        optimizer.step()
    return int(sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values()))


class _Tracker(MemTracker):
    """PyTorch's tracker below DTensor: of tensors that ranks divide, it sees the part of this one."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        """Track an operation on plain tensors."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(operator, types, arguments, options)


def _own(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def _fake_ranks(count):
    """Be rank 0 of a group whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()

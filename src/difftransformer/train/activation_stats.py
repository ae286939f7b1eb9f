"""Activation statistics while a model trains: the entropy of its attention, and its largest logits and hidden states."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..data import validation_rows
from ..model.nll import summed_next_token_nll
from ..ops import observe_inputs
from ..ops.logits import logits_of_rows
from ..ops.problem import Restrictions
from .checkpoint import CheckpointState
from .config import LogsConfig, TrainingConfig
from .metrics import InsideMetrics, finite
from .parallel import Mesh
from .trainer import Callback, Trainer


class ActivationStats(Callback):
    """Writes a line of `InsideMetrics` every `logs.inside_every` steps."""

    def __init__(self, logs: LogsConfig) -> None:
        self._every = logs.inside_every

    def on_restore(self, trainer: Trainer, state: CheckpointState | None) -> None:
        """Take the first validation row, whether or not its tokens count in the loss."""
        if self._every:
            config = trainer.config
            self._row = validation_rows(trainer.shards, config.context_tokens, config.validation_windows)[:1]

    def on_step(self, trainer: Trainer, figures: dict[str, Any]) -> None:
        """Look inside if it is due."""
        if self._every and trainer.step % self._every == 0:
            stats = activation_stats(trainer.model, self._row, trainer.config, trainer.mesh)
            if stats is not None:
                trainer.report(InsideMetrics(step=trainer.step, **stats))


@torch.no_grad()
def activation_stats(
    model: Any, row: Tensor, config: TrainingConfig, mesh: Mesh
) -> dict[str, list[float | None]] | None:
    """Read a row, and return the fields of `InsideMetrics` except the step; None if the model's attention cannot be seen.

    No weight and no random generator changes. Attention runs its usual kernels, and its maps are formed beside them, some rows
    at a time.

    Args:
        model: The model, or this process's part of it.
        row: (1, 3, T) input ids, targets and positions (see `validation_rows`).
        config: Training configuration.
        mesh: The processes, all of which take part.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    blocks = [
        module for module in model.modules() if type(module).__name__.endswith(tuple(model._no_split_modules or ()))
    ]
    if not layers or len(blocks) != len(layers):
        return None
    # For each layer: the sum and the number of the entropies, the largest logit and the largest hidden state.
    seen = torch.zeros(len(layers), 4, dtype=torch.float64)
    layer = 0

    def enter(place: int, module: nn.Module, arguments: Any) -> None:
        nonlocal layer
        layer = place

    def leave(place: int, module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        seen[place, 3] = torch.maximum(seen[place, 3], hidden.abs().amax().cpu())

    def observe(maps: Sequence[tuple[Tensor, Tensor]], restrictions: Restrictions, scale: float) -> None:
        for query, key in maps:
            for scores, allowed in logits_of_rows(query, key, restrictions, scale):
                if allowed is not None:
                    scores = scores.masked_fill(~allowed, -torch.inf)
                weights = scores.softmax(-1).nan_to_num()
                largest = scores.masked_fill(scores == -torch.inf, 0).abs().amax()
                seen[layer, 0] += torch.special.entr(weights).sum().cpu()
                seen[layer, 1] += weights.numel() // weights.shape[-1]
                seen[layer, 2] = torch.maximum(seen[layer, 2], largest.cpu())

    device = mesh.processes.device
    ids, targets, positions = row.unbind(1)
    inputs = mesh.inputs(ids, targets, positions if config.pack_documents else None)
    model.eval()
    # A compiled layer would not see the observer.
    with ExitStack() as hooks, observe_inputs(observe), torch.compiler.set_stance("force_eager"):
        for place, (attention, block) in enumerate(zip(layers, blocks, strict=True)):
            hooks.callback(attention.register_forward_pre_hook(lambda *words, at=place: enter(at, *words)).remove)
            hooks.callback(block.register_forward_hook(lambda *words, at=place: leave(at, *words)).remove)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            summed_next_token_nll(model, **inputs)
    model.train()
    mesh.forget_whole(model)
    stats = torch.stack(mesh.processes.gathered(seen))  # processes may have other heads or tokens
    sums, counts = stats[..., 0].sum(0), stats[..., 1].sum(0)
    if not counts.all():
        return None
    return {
        "attention_entropy_nats": finite((sums / counts).tolist()),
        "largest_logits": finite(stats[..., 2].amax(0).tolist()),
        "largest_hidden_states": finite(stats[..., 3].amax(0).tolist()),
    }

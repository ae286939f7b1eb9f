"""difftransformer eval TASK: one experiment on any saved model. The task's own options are the fields of its dataclass."""

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..evals.tasks import options_class
from ..hub import open_language_model
from ..model.dtypes import WeightsDtype
from ..report.tasks import measurement_table, write_picture
from ..report.terminal import _rich
from ..studies.tasks import evaluate_task
from .arguments import check_device
from .console import console, log, resumable, show
from .progress import evaluation_progress


def declare(verb: str) -> type:
    """The dataclass whose fields a verb takes beside `run`'s own arguments."""
    return options_class(verb.removeprefix("eval "))


def run(
    model: str,
    out: str | None = None,
    device: str = "cpu",
    dtype: WeightsDtype = "auto",
    context_tokens: int | None = None,
    batch_tokens: int = 16_384,
    prefix_caching: bool = True,
    accelerate: bool = True,
    *,
    verb: str,
    options: Any,
) -> int:
    """Run one experiment on a model.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, folder of any causal language model that transformers opens
            without code of its own, .gguf file, or owner/name on the Hugging Face hub.
        out: Folder for results, answers and picture; evals/MODEL by default. An evaluation that was stopped goes on there.
        device: cpu or cuda.
        dtype: Of the weights; auto is what they were saved in.
        context_tokens: Most tokens of a row; the model's positions by default.
        batch_tokens: Most tokens of rows side by side.
        prefix_caching: Whether what prompts share at their beginning is computed once.
        accelerate: Whether other models' attention goes through this package's kernels, where these can say it.
        verb: The command.
        options: The task's own.
    """
    check_device(device)
    for flag, value in (("--batch_tokens", batch_tokens), ("--context_tokens", context_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: give at least 1")
    name = verb.removeprefix("eval ")
    folder = Path(out) if out else Path("evals", Path(model).resolve().name)
    with (
        resumable("stopped; every answer is saved"),
        open_language_model(
            model,
            device=device,
            dtype=dtype,
            batch_tokens=batch_tokens,
            context_tokens=context_tokens,
            prefix_caching=prefix_caching,
            accelerated=accelerate,
        ) as opened,
        evaluation_progress(name) as watch,
    ):
        result = evaluate_task(name, options, opened, folder, device=device, watch=watch, say=log)
    console.print(_rich(measurement_table([result], brief=True)))
    picture = write_picture([result], folder / f"{name}.svg")
    if picture is not None:
        show(f"Figure: {picture}")
    show(f"Results: {folder / f'{name}.json'}")
    return 0


def options_from(cls: type, values: dict[str, Any]) -> Any:
    """The options among parsed arguments, taken out of them."""
    return cls(**{field.name: values.pop(field.name) for field in dataclasses.fields(cls)})

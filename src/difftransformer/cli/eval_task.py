"""difftransformer eval TASK: one experiment on any saved model. The task's own options are the fields of its dataclass."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from ..evals.tasks import options_class
from ..hub import open_language_model
from ..report.tasks import measurement_table, write_picture
from ..report.terminal import _rich
from ..studies.tasks import evaluate_task
from .console import console, say
from .hardware import check_device
from .progress import evaluation_progress

EXIT_INTERRUPTED = 130


def declare(verb: str) -> type:
    """The dataclass whose fields a verb takes beside `run`'s own arguments."""
    return options_class(verb.removeprefix("eval "))


def run(
    model: str,
    out: str | None = None,
    device: str = "cpu",
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
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
    try:
        with (
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
            result = evaluate_task(name, options, opened, folder, device=device, watch=watch, say=say)
    except KeyboardInterrupt:
        again = shlex.join(["difftransformer", *sys.argv[1:]])
        say(f"Stopped; every answer is saved. Go on with: {again}")
        return EXIT_INTERRUPTED
    console.print(_rich(measurement_table([result], brief=True)))
    picture = write_picture([result], folder / f"{name}.svg")
    if picture is not None:
        console.print(f"Figure: {picture}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Results: {folder / f'{name}.json'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def options_from(cls: type, values: dict[str, Any]) -> Any:
    """The options among parsed arguments, taken out of them."""
    return cls(**{field.name: values.pop(field.name) for field in dataclasses.fields(cls)})

"""difftransformer eval TASK: one task on any saved model. The task's own flags are the fields of its options."""

from pathlib import Path
from typing import Any

from ..evals.tasks import task_kind
from ..files import locked
from ..results.base import WeightsDtype
from ..sources import check_model
from .arguments import check_device, check_positive
from .console import Gaps, console, log, resumable, show
from .progress import evaluation_progress


def declare(verb: str) -> type:
    """Return the dataclass whose fields a command takes beside the arguments of `run`."""
    return task_kind(verb.removeprefix("eval ")).options


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
    """Run one task on a model.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, folder of any causal language model that transformers opens
            without custom code, .gguf file, or owner/name on the Hugging Face hub.
        out: Folder for results, answers and picture; evals/MODEL by default. An interrupted evaluation continues there.
        device: cpu or cuda.
        dtype: Dtype of the weights; auto keeps the one in which they were saved.
        context_tokens: Maximum number of tokens of a row; the model's positions by default.
        batch_tokens: Maximum number of tokens of a batch.
        prefix_caching: Whether to compute a common prefix of several prompts only once.
        accelerate: Whether to compute the attention of other models with this package's kernels, where these support it.
        verb: The command.
        options: Options of the task.
    """
    check_model(model)
    from ..hub import open_language_model
    from ..report.tasks import measurement_table, write_picture
    from ..report.tasks.pairs import corrected_pairs, pairs_table, task_pairs
    from ..report.terminal import rich_table
    from ..studies.tasks import evaluate_task

    check_device(device)
    check_positive(batch_tokens=batch_tokens, context_tokens=context_tokens)
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
        locked(folder),
        evaluation_progress(name) as progress,
    ):
        result = evaluate_task(name, options, opened, folder, device=device, progress=progress, log=log)
    console.print(rich_table(measurement_table([result], brief=True)))
    if (paired := pairs_table(name, corrected_pairs({name: task_pairs([result])})[name])) is not None:
        console.print(rich_table(paired))
    gaps = Gaps(verb)
    for gap in result.gaps:
        gaps(gap)
    try:
        if (picture := write_picture([result], folder / f"{name}.svg")) is not None:
            show(f"Figure: {picture}")
    except OSError:  # such as a full disk
        raise
    except Exception as error:  # such as from undefined figures, which leave too little to draw
        gaps(f"the figure: {error!r}")
    show(f"Results: {folder / f'{name}.json'}")
    return gaps.status

"""difftransformer eval TASK: one task on any saved model. The task's own flags are the fields of its options."""

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftransformer.sources import check_model
from difftransformer.typed import WeightsDtype

from ..evals.engine import no_progress
from ..evals.tasks import task_kind
from .arguments import check_positive
from .console import Gaps, console, log, resumable, show
from .members import run_together
from .progress import evaluation_progress

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes

    from ..results import TaskResult


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
    processes: int | None = None,
    divide_weights: bool = False,
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
        processes: Number of processes of this machine, which divide the questions; torchrun starts more machines.
        divide_weights: Whether the processes divide the weights of one model that does not fit one device, and all compute
            every question. Otherwise each has its own model.
        verb: The command.
        options: Options of the task.
    """
    name = verb.removeprefix("eval ")
    folder = Path(out) if out else Path("evals", Path(model).resolve().name)

    def check() -> None:
        check_model(model)
        check_positive(batch_tokens=batch_tokens, context_tokens=context_tokens)

    def evaluate(crew: "Processes") -> int:
        from difftransformer_lab.evals.opening import open_language_model

        from ..studies.tasks import evaluate_task

        with resumable("stopped; every answer is saved"), ExitStack() as stack:
            opened = stack.enter_context(
                open_language_model(
                    model,
                    device=device,
                    dtype=dtype,
                    batch_tokens=batch_tokens,
                    context_tokens=context_tokens,
                    prefix_caching=prefix_caching,
                    accelerated=accelerate,
                    processes=crew,
                    divide_weights=divide_weights,
                )
            )
            stack.enter_context(crew.locked(folder))
            progress = stack.enter_context(evaluation_progress(name) if crew.is_first else nullcontext(no_progress))
            said = log if crew.is_first else lambda text: None
            result = evaluate_task(
                name, options, opened, folder, device=device, processes=crew, progress=progress, log=said
            )
        return _show(result, folder, verb) if crew.is_first else 0

    return run_together(evaluate, device, processes, check)


def _show(result: "TaskResult", folder: Path, verb: str) -> int:
    """Print a result, draw its figure, and return the exit status."""
    from ..report.tasks import measurement_table, write_picture
    from ..report.tasks.pairs import corrected_pairs, pairs_table, task_pairs
    from ..report.terminal import rich_table

    name = result.task
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

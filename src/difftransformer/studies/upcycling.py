"""The upcycling study: one pretrained model made differential in several ways, and each trained on like the model as it was."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..attention import label
from ..convert.upcycle import upcycle_folder
from ..data import Shards, prepare_shards
from ..errors import ConfigError, ResultsError
from ..evals import check_evaluation, evaluate
from ..hub import measure_drift, open_model, source_folder
from ..model import DiffTransformerConfig
from ..results import Drift, Evaluation, Upcycling, read_result, write_result
from .comparison import compare_metrics, run_result, summary
from .environment import command_line, environment, now
from .jobs import Job, run_jobs
from .recipe import Recipe, recipe_dict
from .run import found_evaluation, is_trained, start_run

PLAIN = "softmax"
RESULTS_FILE, BEFORE_FILE = "results.json", "before.json"
DRIFT_TOKENS = 2000


def upcycling_study(
    recipe: Recipe,
    source: str,
    folder: Path,
    *,
    to: Sequence[str],
    watch: Callable[[Sequence[Job]], None] = lambda jobs: None,
    say: Callable[[str], None] = lambda text: None,
) -> Upcycling:
    """Convert, compare logits, evaluate, train each model on the same batches, evaluate; write results.json.

    What is whole in the folder already is not done again.

    Args:
        recipe: What is trained on and how; its model is empty, its tokenizer the source's.
        source: The pretrained model: a folder, a GGUF file, or owner/name on the hub.
        folder: For models/, runs/, results.json.
        to: Attention types, without the plain one, which is always trained too.
        watch: Called again and again with the jobs while they run.
        say: Told what is being done.

    Raises:
        DiffTransformerError: the source cannot be converted, or a run failed; its message.
        Interrupted: a signal; every run has saved a checkpoint.
    """
    if recipe.evaluation.nll is None:
        raise ConfigError("evaluation.nll: null leaves out the validation loss, which this study compares")
    if recipe.start_from is not None:
        raise ConfigError(f"start_from={recipe.start_from!r}: the study starts from the converted models; leave it out")
    names = [*(name for name in dict.fromkeys(to) if name != PLAIN), PLAIN]
    models = {name: folder / "models" / name for name in names}
    with source_folder(source) as pretrained:
        for name, place in models.items():
            if not place.exists():
                say(f"making {name}")
                upcycle_folder(pretrained, place, to=name)
        recipe = dataclasses.replace(
            recipe, start_from=str(models[PLAIN]), data=dataclasses.replace(recipe.data, tokenizer=str(models[PLAIN]))
        )
        shards = prepare_shards(recipe.data, log=say)
        check_evaluation(shards, recipe.evaluation, context_tokens=recipe.training.context_tokens)
        drift = {}
        for name, place in models.items():
            say(f"comparing the logits of {name} with the source's")
            drift[name] = _drift(pretrained, place, folder / "drift" / f"{name}.json", shards)
    say("evaluating before training")
    before = _before(recipe, folder / BEFORE_FILE, shards, models[PLAIN])
    jobs = []
    for name, place in models.items():
        run = dataclasses.replace(recipe, start_from=str(place))
        at = folder / "runs" / f"{name}-seed{recipe.training.seed}"
        start_run(at, run)
        done = is_trained(at, run) and found_evaluation(at) is not None
        threads = max(1, torch.get_num_threads() // recipe.compare.jobs)
        jobs.append(Job(label=_label(name), folder=at, steps=recipe.training.steps, threads=threads, done=done))
    say(f"training {len(jobs)} models, {recipe.compare.jobs} at a time")
    run_jobs(jobs, at_once=recipe.compare.jobs, watch=watch)
    result = _collect(recipe, source, folder, models, drift, before)
    write_result(result, folder / RESULTS_FILE)
    return result


def _label(name: str) -> str:
    return "unconverted" if name == PLAIN else label(name)


def _drift(source: Path, target: Path, cached: Path, shards: Shards) -> Drift:
    try:
        return read_result(cached, Drift)
    except ResultsError:
        tokens = torch.from_numpy(shards.tokens("validation")[:DRIFT_TOKENS].astype("int64"))
        drift = measure_drift(source, target, tokens)
        write_result(drift, cached)
        return drift


def _before(recipe: Recipe, cached: Path, shards: Shards, plain: Path) -> Evaluation:
    try:
        return read_result(cached, Evaluation)
    except ResultsError:
        context = recipe.training.context_tokens
        measured = evaluate(
            open_model(plain, model_type="difftransformer"), shards, recipe.evaluation, context_tokens=context
        )
        result = Evaluation(
            checkpoint=plain.name,
            command=command_line(),
            created=now(),
            environment=environment(),
            nll=measured.nll,
            needle=measured.needle,
            allocation=measured.allocation,
        )
        write_result(result, cached)
        return result


def _collect(
    recipe: Recipe, source: str, folder: Path, models: dict[str, Path], drift: dict[str, Drift], before: Evaluation
) -> Upcycling:
    runs = [run_result(folder, name, recipe.training.seed) for name in models]
    configs = {name: DiffTransformerConfig.from_pretrained(place) for name, place in models.items()}
    summaries = [
        dataclasses.replace(summary(name, config, recipe.training.context_tokens), label=_label(name))
        for name, config in configs.items()
    ]
    plain = summaries[-1].parameters
    document = recipe_dict(recipe)
    del document["start_from"]  # each run has its own, in its folder
    return Upcycling(
        name=recipe.name,
        command=command_line(),
        created=now(),
        environment=environment(),
        recipe=document,
        source=Path(source).name,
        models=summaries,
        added_parameters={row.model: row.parameters - plain for row in summaries},
        drift=drift,
        before=before,
        runs=runs,
        differences={name: compare_metrics(runs, [name, PLAIN]) for name in models if name != PLAIN},
    )

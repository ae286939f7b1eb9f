"""difftransformer demo."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftransformer.errors import ConfigError
from difftransformer.files import locked

from ..recipe_files import read_recipe
from .arguments import check_positive
from .console import Gaps, log, resumable, show, show_next, show_table
from .progress import evaluation_progress, study_progress, watch_pair

if TYPE_CHECKING:
    from ..studies import Recipe

OUT = "reports/demo"
PAIR = ("demo", "demo-twin")
MODELS = ("diff", "softmax")
STEPS, FEWEST_STEPS = 400, 10
FIRST_STAGE = 0.4
"""Share of the steps with short rows, as in the recipe."""
VALIDATIONS = 5
TASKS, FEWER = ("perplexity", "needle"), {"documents": 5, "windows": 32}
ANSWER_TOKENS = 3


def run(out: str = OUT, steps: int = STEPS, seed: int = 0) -> int:
    """Ask the two small models that come with the package, train such a pair, and compare it with the stored result.

    It takes about two minutes on two idle cores. `compare demo` trains all models and seeds of the recipe.

    Args:
        out: Folder for runs, the page and the attention maps.
        steps: Steps of each of the two runs, a part of the recipe's.
        seed: Training seed.
    """
    check_positive(steps=steps)
    if steps < FEWEST_STEPS:
        raise ConfigError(f"--steps {steps}: give at least {FEWEST_STEPS}")
    folder = Path(out)
    maps = _ask(folder)
    from difftransformer.ops import build

    kernels = threading.Thread(target=build.load, daemon=True)
    kernels.start()
    from ..analysis import read_studies
    from ..report.stored import beside_table, stored_demo, write_demo
    from ..studies import compare, watched_by

    recipe = _short_recipe(steps, seed)
    with locked(folder):
        with resumable("stopped; every run is saved"):
            _tokenize(recipe)
            kernels.join()
            log(
                f"training DIFF and its Transformer twin side by side, {steps} steps each, about a minute on two idle cores"
            )
            with study_progress() as bars, watched_by(watch_pair(bars)):
                compare(recipe, folder, costs=False)
        (done,), stored, gaps = read_studies(folder), stored_demo(), Gaps("demo")
        page = write_demo(done, stored, folder, maps, gaps)
        show_table(beside_table(done, stored))
    show(f"Report: {page}: open it in a browser")
    show_next("compare", "demo", "--out", "reports/demo-full")
    return gaps.status


def _ask(folder: Path) -> Path:
    """Print what the shipped models answer to a needle prompt, and write the page of their maps."""
    log("opening the two trained models that come with the package, some seconds")
    from difftransformer.hub import open_model, open_tokenizer, source_folder
    from difftransformer.model.transformers_errors import quietly
    from difftransformer.ops import use_backend

    from ..explorer import DEFAULT_PROMPT, maps

    show(f"\n{DEFAULT_PROMPT}")
    pairs: list[tuple[Any, Any]] = []
    with quietly(), use_backend("reference"):  # the kernels may not have been built yet
        for name, kind in zip(PAIR, ("DIFF", "its Transformer twin"), strict=True):
            with source_folder(name) as source:
                pairs.append((open_model(source), open_tokenizer(source)))
            show(f"  {kind} ({name}) answers: {_answer(*pairs[-1], DEFAULT_PROMPT)}")
        page = maps(*pairs[0], prompt=DEFAULT_PROMPT, beside=pairs[1], names=PAIR).save(folder / "maps.html")
    show("One question shows what retrieval is, and proves nothing: the table at the end has the shares of many.")
    show(f"\nAttention maps of both: {page}: open it in a browser\n")
    return page


def _answer(network: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = network.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).split("\n")[0]


def _short_recipe(steps: int, seed: int) -> "Recipe":
    """Return the recipe `demo` with two models, one seed, and fewer steps and questions."""
    from ..studies.recipe import recipe_from

    document = read_recipe("demo")
    training = document["training"]
    (_, short), *_, (_, full) = training["context_stages"]
    training |= {"steps": steps, "seed": seed, "context_stages": [[0, short], [round(FIRST_STAGE * steps), full]]}
    training |= {"validate_every": steps // VALIDATIONS}
    document["compare"] = {"models": list(MODELS), "seeds": 1, "jobs": len(MODELS)}
    document["evaluation"] = [one for one in document["evaluation"] if one["task"] in TASKS]
    for one in document["evaluation"]:
        one["options"] |= {name: count for name, count in FEWER.items() if name in one["options"]}
    return recipe_from(document, source="demo")


def _tokenize(recipe: "Recipe") -> None:
    from difftransformer.data import prepare_shards

    log("preparing the data, Python's own sources: training a tokenizer and tokenising, about 15 seconds, once")
    with evaluation_progress("tokenising"):
        prepare_shards(recipe.data)

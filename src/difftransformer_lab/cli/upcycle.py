"""difftransformer upcycle."""

from pathlib import Path

from difftransformer.errors import ConfigError, DataError
from difftransformer.files import locked
from difftransformer.sources import check_model

from .console import log, show, show_next
from .progress import evaluation_progress, training_shown

FEWEST_TOKENS = 2  # of a comparison, which continues the first half of the text


def run(
    model: str,
    out: str,
    to: str | None = None,
    train: str | None = None,
    text: str | None = None,
    tokens: int | None = None,
    head_norm: str | None = None,
    seed: int | None = None,
    set: list[str] | None = None,
) -> int:
    """Make a pretrained language model differential without changing its outputs, and compare the logits.

    Args:
        model: Folder with config.json and safetensors, a .gguf file, or owner/name on the Hugging Face hub.
        out: New or empty folder for the model. With --train, the folder of the study.
        to: diff, diff_v2, grouped_diff, grouped_diff_v2, dex, gate, diff_gate, or softmax for the plain model, in this
            package's layout if it is a Llama or Mistral; softmax+TYPE for the plain model with MLPs wider by as many parameters
            as TYPE adds; with --train several, separated by commas (default diff,diff_v2,dex).
        train: Recipe to train each model and the unconverted one with; they are evaluated before and after.
        text: Text for the comparison of logits: a text file or any source of a recipe (default python-stdlib).
        tokens: Number of tokens to compare (default 256); 0 leaves the comparison out.
        head_norm: none; a headwise norm would change the outputs and is refused.
        seed: Seed of the random start of new parameters (default 0).
    """
    check_model(model)
    import torch

    from difftransformer.data import Tokenizer, read_documents
    from difftransformer.families.llama import check_target, targets
    from difftransformer.families.upcycle import upcycle_folder
    from difftransformer.hub import source_folder

    from ..evals.drift import measure_drift

    if to is None and train is None:
        raise ConfigError(f"--to is missing; choose one of {', '.join(targets())}")
    kinds = [name.strip() for name in (to or "diff,diff_v2,dex").split(",")]
    for kind in kinds:
        check_target(kind)
    if train is not None:
        alone = {"--text": text, "--tokens": tokens, "--head-norm": head_norm, "--seed": seed}
        if given := [option for option, value in alone.items() if value is not None]:
            raise ConfigError(f"{given[0]} is not used with --train; leave it out")
        return _study(model, Path(out), kinds, train, set or [])
    if set:
        raise ConfigError(f"--set {set[0]}: changes the recipe of --train; give one")
    text, tokens = text or "python-stdlib", 256 if tokens is None else tokens
    if tokens and tokens < FEWEST_TOKENS:
        raise ConfigError(f"--tokens {tokens}: give at least {FEWEST_TOKENS}, or 0 for no comparison")
    if len(kinds) > 1:
        raise ConfigError(f"--to {to}: several are made with --train only; choose one of {', '.join(targets())}")
    with source_folder(model) as source:
        ids: list[int] = []
        if tokens:
            tokenizer = Tokenizer.load(source)
            for document in read_documents(text):
                ids += tokenizer.encode(document.text)
                if len(ids) >= tokens:
                    break
            if len(ids) < FEWEST_TOKENS:
                raise DataError(f"{text}: {len(ids)} tokens, too few to compare; give a longer text, or --tokens 0")
        done = upcycle_folder(source, out, to=kinds[0], head_norm=head_norm, seed=seed or 0)
        for note in done.converted.notes:
            log(note)
        share = done.added_parameters / (done.parameters - done.added_parameters)
        show(f"{out}: {kinds[0]}, {done.parameters:,} parameters, {done.added_parameters:,} of them new ({share:+.1%})")
        if ids:
            with evaluation_progress(f"comparing with {model}"):
                drift = measure_drift(source, out, torch.tensor(ids[:tokens]))
            show(
                f"On {drift.tokens} tokens of {text}, in fp32 and eager attention: logits differ by at most "
                f"{drift.largest_logit_difference:.1e} (the largest is {drift.largest_logit:.1f}); "
                f"{drift.greedy_same_tokens} of {drift.greedy_tokens} greedy tokens are the same in the default attention"
            )
    show_next("eval", "perplexity", model, out)
    return 0


def _study(model: str, out: Path, kinds: list[str], train: str, overrides: list[str]) -> int:
    from ..analysis import read_studies
    from ..studies import load_recipe, upcycle_and_train
    from .report import show_study

    recipe = load_recipe(train, overrides)
    with locked(out):
        with training_shown(recipe.name):
            upcycle_and_train(recipe, model, out, to=kinds)
        return show_study(read_studies(out)[0], out, "upcycle")

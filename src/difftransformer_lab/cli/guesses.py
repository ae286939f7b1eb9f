"""Replies to options that people guess and that do not exist."""

from collections.abc import Sequence

from difftransformer.errors import ConfigError

REPLIES = {
    "train --resume": "train RUN goes on with the run in the folder RUN, and so does the command that started it",
    "train --seeds": "train makes one run; compare RECIPE --seeds N trains N of each model",
    "eval --data": "eval ask MODEL questions.jsonl asks questions of your own",
    "eval needle --length": "use --lengths N, or --lengths N,N,... for several",
    "train --batch-size": "use --set training.batch_tokens=N, the number of tokens of a step",
}


def check_guesses(verb: str, words: Sequence[str]) -> None:
    """Raise a ConfigError with the reply to a wrong guess."""
    if verb == "compare" and len(words) > 1 and not any(word.startswith("-") for word in words[:2]):
        models = " ".join(words[:2])
        raise ConfigError(f"it trains the models of one recipe; eval quick {models} compares trained ones")
    parts = [part for word in words for part in word.split("=", 1)]
    if verb == "convert" and "--to" in parts[:-1]:
        from difftransformer.attention import variants

        if (to := parts[parts.index("--to") + 1]) in variants():
            run = f"difftransformer upcycle MODEL TARGET --to {to}"
            raise ConfigError(f"--to {to} is an attention type, not a layout; for that run {run}")
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if reply := REPLIES.get(f"{verb} {flag}"):
            raise ConfigError(f"no option {flag}; {reply}")

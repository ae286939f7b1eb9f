"""The command `difftransformer VERB ...`. Each verb is one file. The signature of its function `run` is the command line.

Nothing heavy is imported before a verb is chosen. Errors of this package are printed on one line with exit status 2; `--debug`
shows the traceback.
"""

import dataclasses
import errno
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from difftransformer._version import __version__
from difftransformer.errors import EXIT_ERROR, EXIT_INTERRUPTED, ConfigError, DiffTransformerError, FailedElsewhere

from ..printable import printable_line

LONGEST_WORD, LONGEST_MESSAGE = 250, 2000  # characters of an error; a word of the command line may have any number
GROUPS = {
    "study": {
        "demo": "Ask trained models, train a pair, read the page",
        "compare": "Train a model and its same-size twin, write a report",
        "study": "Train variants with many seeds, add to the results",
        "report": "Write the report of a results file again",
    },
    "train": {"train": "Train one model from a recipe, or continue a run", "tokenize": "Turn text into token shards"},
    "models": {
        "generate": "Continue a prompt with a run or any saved model",
        "info": "Sizes, memory, FLOPs of a model or recipe; its start",
        "upcycle": "Make a pretrained model differential, losing nothing",
        "convert": "Convert a model's folder to another layout and back",
        "export": "Write a clean Hugging Face folder with a model card",
    },
    "evaluate": {
        "eval": "Run a recipe's tasks, one task or a suite on models",
        "maps": "Write every head's attention maps to one page",
        "check causality": "Check that a model does not look into the future",
    },
    "tools": {
        "bench": "Time attention or whole models on this machine",
        "build-kernels": "Build the CPU attention kernels ahead of first use",
        "doctor": "Check the backends, print what a bug report needs",
    },
}
VERBS = {verb: line for group in GROUPS.values() for verb, line in group.items()}


def verbs() -> dict[str, str]:
    """Map every command, `eval TASK` among them, to its line of help."""
    from ..evals.registry import task_help

    return VERBS | {f"eval {name}": line for name, line in task_help().items()}


def main(arguments: Sequence[str] | None = None) -> int:
    if sys.stdout is None:
        return _fail("difftransformer: standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not have every character
    warnings.formatwarning = lambda message, *_, **__: printable_line(f"warning: {message}") + "\n"
    try:
        status = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except OSError as error:
        if error.filename is not None:
            raise
        # Python would write what is left once more at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read has seen enough
            return EXIT_ERROR
        return _fail(f"difftransformer: standard output cannot be written ({error.strerror})")


def _main(words: list[str]) -> int:
    debug = "--debug" in words
    if debug:
        words.remove("--debug")
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words in (["tasks"], ["eval", "list"], ["eval", "--list"]):
        print(*_tasks()[1:], sep="\n")
        return 0
    # Commands draw one progress bar. transformers would draw one for every small file that it writes or reads.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    verb = words[0]
    try:
        called, words = split_verb(words)
        verb = "eval" if called.endswith((".yaml", ".yml")) else called
        return _run(called, words)
    except FailedElsewhere:
        return EXIT_ERROR
    except DiffTransformerError as error:
        if debug:
            raise
        return _fail(f"difftransformer {verb}: {error}")
    except (MemoryError, RuntimeError) as error:
        if debug or not (isinstance(error, MemoryError) or _is_out_of_memory(error)):
            raise
        reason = str(error).partition("\n")[0]
        return _fail(f"difftransformer {verb}: not enough memory{reason and f' ({reason})'}; ask for less")
    except OSError as error:
        is_of_stdout = error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC)  # writers name their files
        if debug or is_of_stdout:
            raise
        advice = "; make room and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"difftransformer {verb}: {place}{error.strerror or error}{advice}")
    except KeyboardInterrupt as stop:
        return _fail(f"difftransformer {verb}: {stop or 'interrupted'}", getattr(stop, "status", EXIT_INTERRUPTED))


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split the arguments into the verb and the words after it; what follows `eval` may be a task or a suite."""
    from ..evals.registry import task_help
    from ..recipe_files import shipped_recipes

    verb, rest = words[0], list(words[1:])
    several = [*task_help(), *shipped_recipes("suites")]
    if verb not in VERBS and " ".join(words[:2]) not in VERBS:
        own = [one for one in VERBS if one.startswith(f"{verb} ")]  # such as "check causality"
        advice = (
            f"; choose {' or '.join(own)}" if own else _nearest(verb, VERBS, others=[f"eval {one}" for one in several])
        )
        raise ConfigError(f"no such command{advice}")
    if verb != "eval":
        return (verb, rest) if verb in VERBS else (" ".join(words[:2]), rest[1:])
    if not rest or rest[0].startswith("-"):
        return verb, rest
    first = rest[0]
    if first in several or first.endswith((".yaml", ".yml")):
        return f"eval {first}", rest[1:]
    is_near = bool(get_close_matches(first, several))
    if not Path(first).exists() and (is_near or (rest[1:2] and not rest[1].startswith("-"))):
        raise ConfigError(f"no task, suite or model {first!r}{_nearest(first, several)}")
    return verb, rest


def _nearest(word: str, known: Sequence[str] | dict[str, str], *, others: Sequence[str] = ()) -> str:
    spelled = [one for one in others if one == word.replace("_", " ")]  # such as eval_needle
    longer = [one for one in known if word.startswith(one)]  # such as evaluate
    near = spelled or longer or get_close_matches(word, [*known, *others], n=1)
    return f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(known)}"


def module_name(verb: str) -> str:
    return "eval_task" if verb.startswith("eval ") else re.sub("[- ]", "_", verb)


def _run(verb: str, words: list[str]) -> int:
    from .arguments import help_page, parser_of, read_words
    from .console import log_shown
    from .guesses import check_guesses

    module = importlib.import_module(f".{module_name(verb)}", __package__)
    own = module.declare(verb) if hasattr(module, "declare") else None
    about = verbs().get(verb, "Run the tasks of a suite on one or more models")
    parser = parser_of(f"difftransformer {verb}", about, module, own)
    if {"-h", "--help"} & set(words):
        print(
            help_page(parser, own if verb.startswith("eval ") else None),
            *(_tasks() if verb == "eval" else ()),
            sep="\n",
        )
        return 0
    check_guesses(verb, words)
    values = read_words(parser, words)
    if own is not None:
        values["options"] = own(**{field.name: values.pop(field.name) for field in dataclasses.fields(own)})
    if hasattr(module, "declare"):
        values["verb"] = verb
    with log_shown():
        return int(module.run(**values) or 0)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch, perhaps not imported, ran out of memory."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _fail(message: str, status: int = EXIT_ERROR) -> int:
    message = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda long: f"{long[0][:60]}...{long[0][-20:]}", message)
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
    if sys.stderr is not None:
        with suppress(OSError):  # there is nowhere left to say it
            print(printable_line(message), file=sys.stderr, flush=True)
    return status


def _tasks() -> list[str]:
    from ..evals.registry import task_help
    from ..recipe_files import shipped_recipes

    return [
        "",
        "difftransformer eval TASK MODEL... asks one or more models one task; eval TASK --help shows its options:",
        *(f"  {name:<15}{line}" for name, line in task_help().items()),
        "",
        "difftransformer eval SUITE MODEL... writes one page of several tasks. A suite is "
        f"{', '.join(shipped_recipes('suites'))} or FILE.yaml.",
    ]


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [
        f"{group if not place else '':<9}{verb:<{width}}  {line}"
        for group, members in GROUPS.items()
        for place, (verb, line) in enumerate(members.items())
    ]
    others = [
        "  difftransformer COMMAND --help   its arguments; eval --list has the tasks",
        "  difftransformer --version        the version",
        "  --debug                          with any command: the traceback of an error",
    ]
    return "\n".join(["usage: difftransformer COMMAND ...", "", *lines, "", *others])

"""The command `difftransformer VERB ...`. Each verb is one file with a function `run`, whose signature is the command line.

A verb's `ARGUMENTS` declare what a signature cannot express: repeated options, switches and positionals that are optional or
repeated. Nothing heavy is imported before a verb is chosen. Errors of this package are printed on one line with exit
status 2; `--debug` shows the traceback.
"""

import dataclasses
import errno
import importlib
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from difftransformer._version import __version__
from difftransformer.errors import EXIT_ERROR, EXIT_INTERRUPTED, DiffTransformerError, FailedElsewhere
from difftransformer.reading import LARGEST_INT

from ..printable import printable_line

LONGEST_MESSAGE = 2000  # characters of an error; a word of the command line may have any number
VERBS = {
    "compare": "Train a model and its same-size twin on identical batches, evaluate both, write a report",
    "study": "Train several variants of a recipe with many seeds, and add to the results that are there",
    "train": "Train one model from a recipe, or continue a run",
    "eval": "Evaluate a checkpoint: loss, retrieval, attention allocation",
    "eval suite": "Several of these on several models, and one report",
    "maps": "Write the attention maps of every head to one page for a browser: A1, A2 and their difference",
    "generate": "Continue a prompt with a run or any saved model",
    "report": "Write the report of a results file again",
    "upcycle": "Make a pretrained Llama or Mistral differential without changing what it computes",
    "convert": "Convert a model's folder to another layout and back",
    "export": "Write a run or a saved model as a clean Hugging Face folder, with a model card",
    "tokenize": "Turn text into token shards",
    "plan": "Memory, communication and time of a recipe on many GPUs, computed without them",
    "info": "Show the size or the start of a preset, a recipe or a saved model, for both twins; or the attention backends",
    "bench": "Time attention and models of DIFF and its twin on this machine",
    "build-kernels": "Build the CPU attention kernels ahead of their first use",
    "check causality": "Check that a model does not look into the future",
    "doctor": "Check the attention backends on this machine, and print what a bug report needs",
}


def verbs() -> dict[str, str]:
    """Return the help line of every command; `eval TASK` is a command for each evaluation task."""
    from ..evals.registry import task_help

    tasks = {f"eval {name}": line for name, line in task_help().items()}
    items = list(VERBS.items())
    place = list(VERBS).index("eval suite")
    return dict([*items[:place], *tasks.items(), *items[place:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    if sys.stdin is None:  # it was closed; the next file to be opened would take its number
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return _fail("difftransformer: standard output is closed; send it to a file, a pipe or /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not have every character
    warnings.formatwarning = lambda message, *_, **__: printable_line(f"warning: {message}") + "\n"
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _flushed(_main([*words]))
    except OSError as error:
        if error.filename is not None or "--debug" in words:
            raise
        return _flushed(_fail(f"difftransformer: standard output cannot be written ({error.strerror})"))


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
    # Commands draw one progress bar. transformers would draw one for every small file that it writes or reads.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    verb, words = split_verb(words)
    if verb not in (known := verbs()):
        return _fail(f"difftransformer: no command {verb!r}; choose one of {', '.join(known)}")
    try:
        return _run(verb, words)
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
        if debug or (error.filename is None and _is_stdout_broken()):
            raise
        advice = "; make room and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"difftransformer {verb}: {place}{error.strerror or error}{advice}")
    except KeyboardInterrupt as stop:
        return _fail(f"difftransformer {verb}: {stop or 'interrupted'}", getattr(stop, "status", EXIT_INTERRUPTED))


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split the arguments into the verb, of one word or two, and the words after it."""
    length = 2 if " ".join(words[:2]) in verbs() else 1
    return " ".join(words[:length]), list(words[length:])


def module_name(verb: str) -> str:
    """Return the name of the module with a verb's `run`."""
    is_task = verb.startswith("eval ") and verb != "eval suite"
    return "eval_task" if is_task else re.sub("[- ]", "_", verb)


def _run(verb: str, words: list[str]) -> int:
    from jsonargparse import ArgumentError, ArgumentParser

    module = importlib.import_module(f".{module_name(verb)}", __package__)
    parser = ArgumentParser(prog=f"difftransformer {verb}", description=verbs()[verb], exit_on_error=False)
    own = module.declare(verb) if hasattr(module, "declare") else None
    declared: dict[str, dict[str, Any]] = getattr(module, "ARGUMENTS", {})
    skipped = {options.get("dest", flag.removeprefix("--")) for flag, options in declared.items()}
    parser.add_function_arguments(
        module.run, as_positional=True, skip=skipped | ({"verb", "options"} if own else set())
    )
    if own is not None:
        parser.add_class_arguments(own)
    for flag, options in declared.items():
        parser.add_argument(flag, **options)
    try:
        values = parser.parse_args(words).as_dict()
    except ArgumentError as error:
        text = " ".join(str(error).split())
        return _fail(f"difftransformer {verb}: {text}; see difftransformer {verb} --help")
    for name, value in values.items():
        if problem := _problem(value):
            return _fail(f"difftransformer {verb}: {name}: {problem}")
    if own is not None:
        values["options"] = own(**{field.name: values.pop(field.name) for field in dataclasses.fields(own)})
        values["verb"] = verb
    return int(module.run(**values) or 0)


def _problem(value: Any) -> str | None:
    """Return what is wrong with a value of whatever argument, or None."""
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_problem, value)), None)
    if isinstance(value, str) and "\0" in value:
        return f"{value!r} holds NUL; leave it out"
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"an integer of {value.bit_length()} bits; give at most 63"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    return None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch, which may not have been imported, raised the error for want of memory."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _fail(message: str, status: int = EXIT_ERROR) -> int:
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
    if sys.stderr is not None:
        with suppress(OSError):  # there is nowhere left to say it
            print(printable_line(message), file=sys.stderr, flush=True)
    return status


def _flushed(status: int) -> int:
    """Write what is left for standard output, and return the exit status."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would write it again at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or _fail(f"difftransformer: standard output cannot be written ({error.strerror})")
    return status


def _is_stdout_broken() -> bool:
    try:
        print(flush=True)  # nothing less shows it
        return False
    except OSError:
        return True


def _help() -> str:
    known = verbs()
    width = max(map(len, known))
    lines = "\n".join(f"  {verb:<{width}}  {summary}" for verb, summary in known.items())
    return (
        "usage: difftransformer COMMAND ...\n\n"
        "Differential Transformer (arXiv:2410.05258): train it, evaluate it, and compare it with a same-size Transformer.\n\n"
        f"commands:\n{lines}\n\n"
        "  difftransformer COMMAND --help   show the arguments of a command\n"
        "  difftransformer --version        show the version\n"
        "  --debug                          with any command: show the traceback of an error"
    )

"""Malformed command lines: every one ends with exit status 2 and one line, or does its work."""

import dataclasses
import importlib
import inspect
import random

import pytest

from difftransformer_lab.cli.main import module_name, verbs
from difftransformer_lab.evals.registry import registered_tasks
from tests.support.forks import Case

pytestmark = pytest.mark.slow
COUNT = 330
VALUES = (
    "",
    " ",
    "-1",
    "0",
    "1e9",
    "9" * 20,
    "-" + "9" * 20,
    "9" * 5000,
    "1" + "0" * 30,
    "nan",
    "inf",
    "-inf",
    "1e400",
    "null",
    "None",
    "true",
    "[]",
    "{}",
    "[1",
    "[[1]]",
    "[-1]",
    "[" + "9" * 25 + "]",
    "[nan]",
    "{a: 1}",
    "[" * 3000,
    "\x1b[31mred\x07",
    "[bold]x[/nope]",
    "../../x",
    "\udcff\udc80",
    "caf\u00e9 \U0001f98a",
    "a" * 5000,
    "a\nb\rc",
    "\u202ereversed",
    "*a",
    "&a [*a, *a]",
    "!!python/object/apply:os.system [ls]",
    "@x",
    "%",
    "-",
    "0x10",
    "1_000",
    "1:30",
    "2024-01-01",
    "text.txt",
    "nowhere",
    ".",
    "..",
    "/dev/null",
    "/dev/null/x",
    "/proc/self/mem",
    "hf:x:y:z:w",
    "owner/name",
    "a/b/c",
    "ours",
    "cuda",
    "cuda:99",
    "bf16",
    "diff",
    "validation",
    "python-stdlib",
    "[text.txt]",
    "1000000",
    "1000000000000",
)
NEEDLE = (
    "--text",
    "text.txt",
    "--lengths",
    "[80]",
    "--documents",
    "1",
    "--depths",
    "[0.5]",
    "--digits",
    "2",
    "--out",
    "new",
)
BASES = {
    "train": ("train", "recipe.yaml", "--out", "new", "--set", "training.steps=1"),
    "compare": ("compare", "recipe.yaml", "--out", "new", "--set", "training.steps=0"),
    "study": ("study", "study.yaml", "--dry-run", "--results", "new", "--set", "training.steps=1"),
    "eval": ("eval", "run", "--out", "new", "--set", "evaluation.perplexity.windows=2"),
    "eval suite": ("eval", "suite", "ours", "--preset", "suite.yaml", "--out", "new"),
    "generate": ("generate", "ours", "text", "--max_new_tokens", "2"),
    "report": ("report", "results.json", "--out", "new"),
    "upcycle": ("upcycle", "llama", "new", "--to", "diff", "--text", "text.txt", "--tokens", "9"),
    "convert": ("convert", "ours", "new", "--to", "diffllama"),
    "export": ("export", "ours", "new"),
    "tokenize": ("tokenize", "text.txt", "--tokenizer", "byte", "--out", "new"),
    "info": ("info", "ours"),
    "plan": ("plan", "recipe.yaml", "--gpus", "2"),
    "check causality": ("check", "causality", "ours", "--length", "9"),
    "bench": ("bench", "nothing"),
    "build-kernels": ("build-kernels",),
    "eval needle": ("eval", "needle", "ours", *NEEDLE),
    "eval allocation": ("eval", "allocation", "ours", "--length", "80", *NEEDLE[:2], *NEEDLE[4:]),
    "eval perplexity": ("eval", "perplexity", "ours", "--text", "text.txt", "--windows", "2", "--out", "new"),
    "eval recall": ("eval", "recall", "ours", "--text", "text.txt", "--windows", "2", "--out", "new"),
    "eval outliers": ("eval", "outliers", "ours", "--text", "text.txt", "--tokens", "99", "--out", "new"),
    "eval perturbation": ("eval", "perturbation", "ours", "--text", "text.txt", "--windows", "2", "--out", "new"),
    "eval synthetic": ("eval", "synthetic", "ours", "--task", "memorization", "--examples", "2", "--out", "new"),
    "eval icl": ("eval", "icl", "ours", "--train", "rows.jsonl", "--items", "2", "--shots", "[2]", "--out", "new"),
    "eval order": (
        "eval",
        "order",
        "ours",
        "--train",
        "rows.jsonl",
        "--items",
        "2",
        "--orders",
        "2",
        "--shots",
        "2",
        "--out",
        "new",
    ),
    "eval maps": ("eval", "maps", "ours", "--out", "new"),
    "maps": ("maps", "ours", "text", "--out", "new"),
    "eval math": (
        "eval",
        "math",
        "ours",
        "--sets",
        "[rows.jsonl]",
        "--problems",
        "1",
        "--max_new_tokens",
        "2",
        "--out",
        "new",
    ),
    "eval hallucination": (
        "eval",
        "hallucination",
        "ours",
        "--file",
        "qa.jsonl",
        "--items",
        "1",
        "--max_new_tokens",
        "2",
        "--out",
        "new",
    ),
    "eval quantized": ("eval", "quantized", "ours", "--text", "text.txt", "--windows", "1", "--out", "new"),
    "eval harness": ("eval", "harness", "ours", "--out", "new"),
}
NEVER = {"force", "text", "set", "sets"}  # a build of minutes; a tokenization of the whole library


def flags(verb):
    """The names of a command's arguments."""
    module = importlib.import_module(f"difftransformer_lab.cli.{module_name(verb)}")
    names = set(inspect.signature(module.run).parameters) - {"verb", "options"}
    if verb.startswith("eval ") and verb != "eval suite":
        names |= {field.name for field in dataclasses.fields(registered_tasks()[verb.removeprefix("eval ")].options)}
    return sorted(names - NEVER) or ["x"]


def command_line(draw, verb):
    """A valid command line with one or two faults."""
    words = list(BASES[verb])
    for _ in range(draw.choice((1, 1, 2))):
        what = draw.choice(
            ("flag", "flag", "flag", "flag", "replace", "replace", "drop", "unknown", "set", "order", "verb")
        )
        if what == "flag":
            words += [f"--{draw.choice(flags(verb))}", draw.choice(VALUES)]
        elif what == "replace" and len(words) > 1:
            words[draw.randrange(1, len(words))] = draw.choice(VALUES)
        elif what == "drop" and words:
            del words[draw.randrange(len(words))]
        elif what == "unknown":
            words.insert(
                draw.randrange(len(words) + 1),
                draw.choice((*VALUES, "--zzz", "--out=", "--=x", "--seed=", "-x", "--", "---")),
            )
        elif what == "set":
            words += ["--set", f"{draw.choice(KEYS)}={draw.choice(VALUES)}"]
        elif what == "order":
            draw.shuffle(words)
        elif words:
            words[0] = draw.choice(("evla", "Train", "", "\x1b[2J", "--debugx", "-", "eval suit", words[0].upper()))
    return words


KEYS = (
    "name",
    "training.steps",
    "training.seed",
    "training.batch_tokens",
    "training.context_stages",
    "training.optimizer.learning_rate",
    "training.lora",
    "training.accumulation",
    "model",
    "model.hidden_size",
    "model.num_hidden_layers",
    "model.rope_parameters",
    "model.attention_type",
    "model.sliding_window",
    "data",
    "data.folder",
    "data.source",
    "data.tokenizer",
    "data.vocab_size",
    "data.validation_share",
    "data.split_seed",
    "evaluation",
    "evaluation.perplexity",
    "evaluation.perplexity.window",
    "evaluation.x",
    "compare.seeds",
    "compare.models",
    "start_from",
    "",
    ".",
    "x.y.z",
    "training.steps.x",
    "\x00",
    "model.\x1b",
)


def cases(whole, folder):
    for index in range(COUNT):
        draw = random.Random(f"words {index}")
        place = folder / f"{index:03d}" / "here"
        place.mkdir(parents=True)
        for path in whole.iterdir():
            if path.name not in ("warm", "shards", "new"):
                (place / path.name).symlink_to(path)
        words = command_line(draw, draw.choice(list(BASES)))
        yield Case(f"{index}: {[word[:60] for word in words]}", words, str(place))


def test_malformed_command_lines(whole, server, tmp_path):
    outcomes = server.run(list(cases(whole, tmp_path)))
    wrong = [f"{o.case.name}: {', '.join(o.faults())}: {o.err[-1000:]}" for o in outcomes if o.faults()]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}\n" + "\n".join(wrong)
    assert sum(outcome.status == 2 for outcome in outcomes) > COUNT / 2
    assert not list(tmp_path.glob("*/x")), "a name led out of the folder"


def test_every_command_is_tried():
    assert set(BASES) == set(verbs()) - {"doctor"}  # which works for longer than a case may

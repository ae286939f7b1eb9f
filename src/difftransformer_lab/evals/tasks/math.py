"""Mathematical problems: the share that a model solves, and the length of its solutions.

This is arXiv:2410.05258 appendix C. Its prompts and extraction are unknown, so compare models that are evaluated here.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.figure import Figure

from difftransformer.errors import ConfigError, DataError

from ...plots import accuracy_bars, share_intervals
from ...results import TaskResult
from ..engine import Scores, Task
from ..models.stopping import closing_tokens, stop_tokens, text_until
from ..prompts.chat import chat_frame
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..requests import Continuation
from ..scores import accuracy_of_sets, mean, proportion
from ..sets.public import chosen, jsonl_rows, text_field

EXAMPLES = (  # written for this package
    (
        "A baker fills 6 trays with 8 rolls each and sells 19 rolls. How many rolls are left?",
        "The baker makes 6 * 8 = 48 rolls. After selling 19 there are 48 - 19 = 29. The answer is \\boxed{29}.",
    ),
    (
        "Solve 3x - 7 = 11 for x.",
        "Adding 7 to both sides gives 3x = 18. Dividing by 3 gives x = 6. The answer is \\boxed{6}.",
    ),
    (
        "Out of 40 pupils, 35% walk to school. How many do not walk?",
        "Those who walk are 0.35 * 40 = 14. The others are 40 - 14 = 26. The answer is \\boxed{26}.",
    ),
    (
        "What is \\frac{2}{3} of \\frac{9}{4}?",
        "The product is \\frac{2 * 9}{3 * 4} = \\frac{18}{12} = \\frac{3}{2}. The answer is \\boxed{\\frac{3}{2}}.",
    ),
)
SECONDS = 30  # for reading or comparing one answer
INSTRUCTION = "Solve the problem step by step. Then give the final answer alone in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class Options:
    """Mathematical problems on any model.

    Attributes:
        sets: Files .jsonl with question, answer and optionally set on each line. An answer may be a solution that ends in it.
        problems: Maximum number of problems of each set, drawn at random; all by default.
        shots: Worked examples before the problem, 0 to 4.
        prompt: base continues the text of the problem; chat asks in the chat template.
        max_new_tokens: Maximum number of tokens of a solution; the paper has 1024, and 16384 for long reasoning.
        seed: Seed of the random draws.
    """

    sets: list[str] = field(default_factory=list)
    problems: int | None = None
    shots: int = len(EXAMPLES)
    prompt: Literal["base", "chat"] = "base"
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shots <= len(EXAMPLES):
            raise refused(self, "shots", f"give 0 to {len(EXAMPLES)}")
        at_least(self, 1, "max_new_tokens", "problems")
        at_least(self, 0, "seed")


class Problem(NamedTuple):
    set_name: str
    name: str
    question: str
    answer: str


class MathTask(Task):
    rules = 3

    def __init__(self, options: Options, context: TaskContext) -> None:
        if not options.sets:
            raise refused(options, "sets", "name a .jsonl file with question and answer on each line")
        self.options, self.tokenizer = options, context.tokenizer
        self.problems = read_problems(options)
        self.right = [_right_answer(problem) for problem in self.problems]
        self.data_name = ", ".join(options.sets)
        # A worked example is one line, and what follows is another problem.
        self.ending = "\n" if options.prompt == "base" and options.shots else None
        stop = stop_tokens(self.tokenizer, self.ending)
        closing = closing_tokens(self.tokenizer, self.ending) if self.ending else ()
        frame = chat_frame(self.tokenizer) if options.prompt == "chat" else ([self.tokenizer.begin_of_text], [])
        self.requests = [
            Continuation((*frame[0], *ids, *frame[1]), options.max_new_tokens, stop, closing=closing)
            for ids in self.tokenizer.encode_batch([_prompt(options, problem) for problem in self.problems])
        ]
        longest = max(len(request.prompt) for request in self.requests)
        if longest + options.max_new_tokens > context.prompt_tokens:
            raise DataError(
                f"the longest prompt takes {longest} tokens and a solution up to {options.max_new_tokens}, the model's context "
                f"has {context.prompt_tokens}; lower --max-new-tokens or --shots"
            )
        self.choices = [
            f"The prompt was written for this package: {options.shots} worked examples, then the problem.",
            f"Solutions are greedy and end at a special token{' or a line end' * bool(self.ending)}, or after "
            f"{options.max_new_tokens} tokens.",
            "math-verify finds the answer in a solution, and decides whether it equals the right one.",
            "The mean over sets gives each set the same weight.",
        ]

    def scored_by(self) -> Any:
        return [self.ending, *([problem.set_name, problem.name, problem.answer] for problem in self.problems)]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the accuracy on each set and its mean, the length of the solutions, and the share of truncated ones."""
        from math_verify import parse, verify

        graded: list[tuple[str, str, bool]] = []
        lengths: dict[str, list[float]] = defaultdict(list)
        for problem, right, ids in zip(self.problems, self.right, answers, strict=True):
            text, tokens = text_until(self.tokenizer, ids, self.ending)
            given = parse(text, parsing_timeout=SECONDS)
            is_right = bool(verify(right, given, timeout_seconds=SECONDS))
            graded.append((problem.set_name, f"{problem.set_name}/{problem.name}", is_right))
            lengths[problem.set_name].append(float(tokens))
        measurements, items = accuracy_of_sets(graded)
        for name, tokens_of in lengths.items():
            measurements.append(mean("solution length", "tokens", tokens_of, {"set": name}))
            capped = [tokens == self.options.max_new_tokens for tokens in tokens_of]
            measurements.append(proportion("cut by the cap", capped, {"set": name}, better="lower"))
        return Scores(measurements=measurements, items=items)


def read_problems(options: Options) -> list[Problem]:
    by_set: dict[str, list[Problem]] = {}
    for path in map(Path, options.sets):
        for line, row in jsonl_rows(path, ("question", "answer")):
            name = text_field(row, "set", f"{path}: line {line}") if "set" in row else path.stem
            problem = Problem(name, str(line), str(row["question"]).strip(), str(row["answer"]).strip())
            by_set.setdefault(name, []).append(problem)
    return [rows[index] for rows in by_set.values() for index in chosen(len(rows), options.problems, options.seed)]


def _right_answer(problem: Problem) -> list[Any]:
    try:
        from math_verify import parse
    except ImportError:
        raise ConfigError("math-verify is not installed; pip install 'difftransformer[eval]'") from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # an answer that it can't read is a wrong one
    text = problem.answer.rpartition("####")[2].strip()
    has_words = re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3}", text)
    if has_words and not re.search(r"\d", text):
        raise DataError(f"{problem.set_name}/{problem.name}: no number or formula in {text[:60]!r}; see eval ask")
    formula = text if has_words or "$" in text or "\\boxed" in text else f"${text}$"
    right: list[Any] = parse(formula, parsing_timeout=SECONDS)
    return right


def _prompt(options: Options, problem: Problem) -> str:
    shown = [f"Problem: {question}\nSolution: {solution}" for question, solution in EXAMPLES[: options.shots]]
    if options.prompt == "base":
        return "\n\n".join([*shown, f"Problem: {problem.question}\nSolution:"])
    return "\n\n".join([INSTRUCTION, *shown, f"Problem: {problem.question}"])


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    cap = results[0].options["max_new_tokens"]
    caption = f"Share of problems solved, with {share_intervals(results)}. At most {cap} tokens a solution."
    return "Mathematical problems", caption, accuracy_bars(results, "accuracy")


register(TaskKind(name="math", doc=__doc__, options=Options, make=MathTask, draw=draw))

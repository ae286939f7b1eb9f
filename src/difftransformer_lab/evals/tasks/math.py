"""Mathematical problems: the share that a model solves, and the length of its solutions.

This is arXiv:2410.05258 appendix C. The paper gives neither its prompts nor how it extracts answers, so the figures can be
compared between models that are evaluated here, but not with the paper's.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from matplotlib.figure import Figure

from difftransformer.errors import DataError

from ...plots.bars import accuracy_bars, sets_of
from ...plots.curves import curves, select
from ...plots.seeds import share_intervals
from ...results import TaskResult
from ..engine import Scores, Task
from ..judges.math_answers import check_installed, is_right
from ..models.stopping import closing_tokens, stop_tokens, text_until
from ..prompts.chat import chat_frame
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..requests import Continuation
from ..scores import accuracy_of_sets, mean, proportion
from ..sets.math import MATH_SETS, MathProblem, read_math_problems

EXAMPLES = (
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
"""Worked examples, written for this package."""

INSTRUCTION = "Solve the problem step by step. Then give the final answer alone in \\boxed{}."
_PARAGRAPH, _LINE = "\n\n", "\n"
_CHECKPOINT = re.compile(r"(?P<run>.+)[/\\]checkpoints[/\\]step-(?P<step>\d+)[/\\]?")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Mathematical problems on any model.

    Attributes:
        sets: Public sets (gsm8k, math, svamp, asdiv, mawps), or .jsonl files with question, answer and optionally set on each
            line; carp, tabmwp and college_math need a file.
        problems: Maximum number of problems of each set, drawn at random; all by default.
        shots: Worked examples before the problem, 0 to 4.
        prompt: base continues the text of the problem; chat asks in the chat template.
        max_new_tokens: Maximum number of tokens of a solution; the paper has 1024, and 16384 for long reasoning.
        seed: Seed of the random draws.
    """

    sets: list[str] = field(default_factory=lambda: list(MATH_SETS))
    problems: int | None = None
    shots: int = len(EXAMPLES)
    prompt: Literal["base", "chat"] = "base"
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sets:
            raise refused(self, "sets", f"name at least one of {', '.join(MATH_SETS)}, or a .jsonl file")
        if not 0 <= self.shots <= len(EXAMPLES):
            raise refused(self, "shots", f"give 0 to {len(EXAMPLES)}")
        at_least(self, 1, "max_new_tokens", "problems")
        at_least(self, 0, "seed")


class MathTask(Task):
    rules = 2

    def __init__(self, options: Options, context: TaskContext) -> None:
        check_installed()
        self.options, self.tokenizer = options, context.tokenizer
        self.problems = [
            problem for source in options.sets for problem in read_math_problems(source, options.problems, options.seed)
        ]
        self.data_name = ", ".join(options.sets)
        # A worked example is one line, and what follows is another problem.
        self.ending = _LINE if options.prompt == "base" and options.shots else None
        stop = stop_tokens(self.tokenizer, self.ending)
        closing = closing_tokens(self.tokenizer, self.ending) if self.ending else ()
        frame = chat_frame(self.tokenizer) if options.prompt == "chat" else ([self.tokenizer.begin_of_text], [])
        self.requests = [
            Continuation((*frame[0], *ids, *frame[1]), options.max_new_tokens, stop, closing=closing)
            for ids in self.tokenizer.encode_batch([_prompt(options, problem) for problem in self.problems])
        ]
        for problem, request in zip(self.problems, self.requests, strict=True):
            if len(request.prompt) + options.max_new_tokens > context.prompt_tokens:
                raise DataError(
                    f"{problem.set_name}/{problem.name}: the prompt takes {len(request.prompt)} tokens and the solution up to "
                    f"{options.max_new_tokens}, the model's context has {context.prompt_tokens}; lower --max-new-tokens or "
                    "--shots"
                )
        self.choices = _choices(options, self.ending)

    def scored_by(self) -> Any:
        """Return where a solution ends, and the set, name and answer of each problem."""
        return [self.ending, *([problem.set_name, problem.name, problem.answer] for problem in self.problems)]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the accuracy on each set and its mean, the length of the solutions, and the share of truncated ones."""
        right: list[tuple[str, str, bool]] = []
        lengths: dict[str, list[tuple[str, float]]] = defaultdict(list)
        named: dict[tuple[str, str], str] = {}
        for problem, ids in zip(self.problems, answers, strict=True):
            text, tokens = text_until(self.tokenizer, ids, self.ending)
            name = problem.set_name
            unit = named.setdefault((name, problem.question), f"{name}/{problem.name}")  # some sets repeat a question
            right.append((name, unit, is_right(text, problem.answer)))
            lengths[name].append((unit, float(tokens)))
        measurements, items = accuracy_of_sets(right)
        for name, rows in lengths.items():
            units, tokens_of = zip(*rows, strict=True)
            measurements.append(mean("solution length", "tokens", tokens_of, {"set": name}, units=units))
            capped = [tokens == self.options.max_new_tokens for tokens in tokens_of]
            measurements.append(proportion("cut by the cap", capped, {"set": name}, units=units, better="lower"))
        return Scores(measurements=measurements, items=items)


def _prompt(options: Options, problem: MathProblem) -> str:
    shown = [f"Problem: {question}\nSolution: {solution}" for question, solution in EXAMPLES[: options.shots]]
    if options.prompt == "base":
        return _PARAGRAPH.join([*shown, f"Problem: {problem.question}\nSolution:"])
    return _PARAGRAPH.join([INSTRUCTION, *shown, f"Problem: {problem.question}"])


def _choices(options: Options, ending: str | None) -> list[str]:
    end = "the end of the line, as the worked examples do, or a special token" if ending else "a special token"
    return [
        f"The prompt was written for this package: {options.shots} worked examples, then the problem; the paper gives none.",
        f"Solutions are greedy and end at {end}, or after {options.max_new_tokens} tokens.",
        "The answer is the content of the last \\boxed{}, or the text after the last 'answer is', or the last number. "
        "math-verify decides whether it equals the right one, as a number, an expression, an interval or a set; units and "
        "currencies are ignored, and a percentage equals its number with and without the division by 100.",
        "ASDiv is used without its problems that have several answers. CARP, TABMWP and CollegeMath have no public name.",
        "The mean over sets gives each set the same weight.",
    ]


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the accuracy on each set; over training steps if all models are checkpoints (arXiv:2410.05258 Figures 9 and 10)."""
    checkpoints = [_CHECKPOINT.fullmatch(result.model.name) for result in results]
    places = [(match["run"], int(match["step"])) for match in checkpoints if match is not None]
    if len(results) > 1 and len(places) == len(results):
        figure, ax = curves(_runs(results, places), "mean accuracy", "step")
        ax.set(xlabel="training step", ylabel="mean accuracy over sets", ylim=(0, None))
        caption = f"Mean accuracy over {', '.join(sets_of(results))} by checkpoint; bands: {share_intervals(results)}."
    else:
        figure = accuracy_bars(results, "accuracy")
        caption = f"Share of problems solved, with {share_intervals(results)}."
    cap = results[0].options["max_new_tokens"]
    return "Mathematical problems", f"{caption} At most {cap} tokens a solution.", figure


def _runs(results: Sequence[TaskResult], places: Sequence[tuple[str, int]]) -> list[TaskResult]:
    """Return one result for each run, with the mean accuracy at every step."""
    by_run: dict[str, TaskResult] = {}
    for result, (run, step) in zip(results, places, strict=True):
        rows = [replace(row, at={"step": step}) for row in select(result, "mean accuracy")]
        whole = by_run.setdefault(run, replace(result, model=replace(result.model, name=run), measurements=[]))
        whole.measurements.extend(rows)
    return list(by_run.values())


register(TaskKind(name="math", doc=__doc__, options=Options, make=MathTask, draw=draw))

"""Mathematical problems (arXiv:2410.05258 appendix C): the share solved, and how long the reasoning is.

A model writes its way to an answer, greedily; the answer is taken from the text and compared exactly (`math_answers`). The
paper gives neither its prompts nor how it takes answers out of a text, so figures do not compare with its own, only between
models asked here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...data.math_sets import MATH_SETS, MathProblem, read_math_problems
from ...errors import ConfigError, DataError
from ...results import ItemScore, Measurement
from ..chat import chat_frame
from ..scores import mean, mean_of_sets, proportion
from ..stopping import stop_tokens, text_until
from ..task import Continuation, LanguageModel, Scores
from .math_answers import is_right

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
"""Worked examples, of our own."""

INSTRUCTION = "Solve the problem step by step. Then give the final answer alone in \\boxed{}."
_PARAGRAPH, _LINE = "\n\n", "\n"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Mathematical problems on any model.

    Attributes:
        sets: Public sets (gsm8k, math, svamp, asdiv, mawps), or .jsonl files with question, answer and optionally set on each
            line; carp, tabmwp and college_math have files alone.
        problems: Most problems of each set, drawn by the seed; all by default.
        shots: Worked examples before the problem, 0 to 4.
        prompt: base goes on from the problem; chat asks in the chat template.
        max_new_tokens: Most tokens of a solution; the paper has 1024, and 16384 for long reasoning.
        seed: Of the draw.
    """

    sets: list[str] = field(default_factory=lambda: list(MATH_SETS))
    problems: int | None = None
    shots: int = len(EXAMPLES)
    prompt: Literal["base", "chat"] = "base"
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sets:
            raise ConfigError(f"sets=[]: name at least one of {', '.join(MATH_SETS)}, or a .jsonl file")
        if not 0 <= self.shots <= len(EXAMPLES):
            raise ConfigError(f"shots={self.shots}: give 0 to {len(EXAMPLES)}")
        if self.max_new_tokens < 1 or (self.problems is not None and self.problems < 1):
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens}, problems={self.problems}: give at least 1 of each"
            )
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: give 0 or more")


class MathTask:
    """Problems, and how many come out right. See `Task`."""

    def __init__(self, options: Options, model: LanguageModel) -> None:
        self.options, self.tokenizer = options, model.tokenizer
        self.problems = [
            problem for source in options.sets for problem in read_math_problems(source, options.problems, options.seed)
        ]
        self.data_name = ", ".join(options.sets)
        # A worked example is one line: what follows its end is another problem.
        self.ending = _LINE if options.prompt == "base" and options.shots else None
        stop = stop_tokens(self.tokenizer, self.ending)
        frame = chat_frame(self.tokenizer) if options.prompt == "chat" else ([self.tokenizer.end_of_text], [])
        self.requests = [
            Continuation((*frame[0], *ids, *frame[1]), options.max_new_tokens, stop)
            for ids in self.tokenizer.encode_batch([_prompt(options, problem) for problem in self.problems])
        ]
        for problem, request in zip(self.problems, self.requests, strict=True):
            if len(request.prompt) + options.max_new_tokens > model.context_tokens:
                raise DataError(
                    f"{problem.set_name}/{problem.name}: the prompt takes {len(request.prompt)} tokens and the solution up to "
                    f"{options.max_new_tokens}, the model's context has {model.context_tokens}; lower --max_new_tokens or "
                    "--shots"
                )
        self.choices = _choices(options, self.ending)

    def score(self, answers: Sequence[Any]) -> Scores:
        """Accuracy of each set and their mean; the solutions' length, and the share that the cap cut."""
        right: dict[str, list[bool]] = {}
        lengths: dict[str, list[float]] = {}
        capped: dict[str, list[bool]] = {}
        items = []
        for problem, ids in zip(self.problems, answers, strict=True):
            text, tokens = text_until(self.tokenizer, ids, self.ending)
            correct, name = is_right(text, problem.answer), problem.set_name
            right.setdefault(name, []).append(correct)
            lengths.setdefault(name, []).append(float(tokens))
            capped.setdefault(name, []).append(tokens == self.options.max_new_tokens)
            items.append(ItemScore(name="accuracy", item=f"{name}/{problem.name}", score=float(correct)))
        accuracies = [proportion("accuracy", found, {"set": name}) for name, found in right.items()]
        measurements: list[Measurement] = [*accuracies, mean_of_sets("mean accuracy", accuracies)]
        for name in right:
            measurements.append(mean("solution length", "tokens", lengths[name], {"set": name}))
            measurements.append(proportion("cut by the cap", capped[name], {"set": name}, better="lower"))
        return Scores(measurements=measurements, items=items)


def make(options: Options, model: LanguageModel) -> MathTask:
    """The task for a model. See `MathTask`.

    Raises:
        ConfigError: no such set.
        DataError: a set cannot be read, or a prompt does not fit into the context.
    """
    return MathTask(options, model)


def _prompt(options: Options, problem: MathProblem) -> str:
    shown = [f"Problem: {question}\nSolution: {solution}" for question, solution in EXAMPLES[: options.shots]]
    if options.prompt == "base":
        return _PARAGRAPH.join([*shown, f"Problem: {problem.question}\nSolution:"])
    return _PARAGRAPH.join([INSTRUCTION, *shown, f"Problem: {problem.question}"])


def _choices(options: Options, ending: str | None) -> list[str]:
    end = "the end of the line, as the worked examples do, or a special token" if ending else "a special token"
    return [
        f"The prompt is our own: {options.shots} worked examples, then the problem; the paper gives none.",
        f"Solutions are greedy and end at {end}, at the latest after {options.max_new_tokens} tokens.",
        "The answer is what stands in the last \\boxed{}, or follows the last 'answer is', or is the last number. Numbers are "
        "compared exactly, whatever their separators, units or percent signs; other answers letter by letter without "
        "LaTeX's spacing, so that equal expressions written otherwise count as wrong.",
        "ASDiv without its problems of several answers. CARP, TABMWP and CollegeMath have no public name to load them by.",
        "The mean over sets gives each set the same weight.",
    ]

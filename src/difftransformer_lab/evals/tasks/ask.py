"""Questions of your own: exact answers, or the likeliest of given choices.

A line of the file is {"question": ..., "answer": ...}. With "choices", a list of texts that holds the answer, the model answers
with the likeliest of them; without, it goes on greedily.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from difftransformer.errors import DataError

from ...results import ItemScore, Measurement
from ..engine import Scores, Task
from ..models.stopping import closing_tokens, stop_tokens
from ..prompts.chat import chat_frame
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..requests import Loss, Request, ScoredContinuation
from ..scores import mean, proportion, single, unit_scores
from ..sets.public import jsonl_rows, text_field

TEMPLATES = {"base": "Question: {question}\nAnswer:", "chat": "{question}"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Questions of your own.

    Attributes:
        questions: File .jsonl with question, answer and optionally choices on each line; it may also stand behind the models.
        prompt: base continues the template; chat asks in the chat template.
        template: Text around a question; worked examples can stand in it. "Question: {question}", then "Answer:" on the next
            line by default, and the question alone in a chat.
        max_new_tokens: Longest answer to a question without choices.
    """

    questions: str = ""
    prompt: Literal["base", "chat"] = "base"
    template: str | None = None
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        at_least(self, 1, "max_new_tokens")
        if self.template is not None and "{question}" not in self.template:
            raise refused(self, "template", "name the place of the question by {question}")


class AskTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        self.options, self.tokenizer, self.data_name = options, context.tokenizer, options.questions
        self.rows = read_questions(options)
        self.ending = "\n" if options.prompt == "base" else None
        stop = stop_tokens(self.tokenizer, self.ending)
        leading = tuple(token for token in stop if not self.tokenizer.decode([token]).strip())
        closing = closing_tokens(self.tokenizer, self.ending) if self.ending else ()
        self.requests: list[Request] = []
        for _, question, answer, choices in self.rows:
            prompt, follow = self._prompt(question)
            if choices:
                self.requests += [Loss((*prompt, *follow(choice)), first=len(prompt)) for choice in choices]
            else:
                right = tuple(follow(answer))
                how = {"leading": leading, "closing": closing, "right": right}
                self.requests.append(ScoredContinuation(prompt, options.max_new_tokens, stop, **how))
        self.choices = [
            f"The prompt is {options.template or TEMPLATES[options.prompt]!r}"
            + (", in the chat template." if options.prompt == "chat" else "."),
            "Of given choices the answer is the likeliest, by the sum over its tokens; per byte, by that sum divided by its "
            "length in UTF-8.",
            "Without choices the answer is the greedy continuation up to a special token"
            + (" or the end of its first line" if self.ending else "")
            + ". It must equal the right one but for case, spaces around it and a final point.",
        ]

    def _prompt(self, question: str) -> tuple[tuple[int, ...], Any]:
        """Return the tokens of a prompt, and a function that encodes an answer behind it."""
        text = (self.options.template or TEMPLATES[self.options.prompt]).replace("{question}", question)
        if self.options.prompt == "chat":
            before, after = chat_frame(self.tokenizer)
            return (*before, *self.tokenizer.encode(text), *after), self.tokenizer.encode
        advice = "change the end of --template"
        prompt = (self.tokenizer.begin_of_text, *self.tokenizer.encode(text))
        return prompt, lambda answer: self.tokenizer.encode_after(text, f" {answer}", advice)

    def scored_by(self) -> Any:
        return [[line, answer, choices] for line, _, answer, choices in self.rows]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Return the share of right answers, the loss of the right ones, and what a guess among the choices would get."""
        told = iter(answers)
        right, per_byte, guesses, losses = list[bool](), list[bool](), list[float](), list[float]()
        for _, _, answer, choices in self.rows:
            if choices:
                nats = [math.fsum(next(told)) for _ in choices]
                place = choices.index(answer)
                by_length = [loss / len(choice.encode()) for loss, choice in zip(nats, choices, strict=True)]
                right.append(nats.index(min(nats)) == place)
                per_byte.append(by_length.index(min(by_length)) == place)
                guesses.append(1 / len(choices))
                losses.append(nats[place])
            else:
                made = next(told)
                has_losses = isinstance(made, dict)  # which some models cannot tell
                given = self.tokenizer.decode(made["ids"] if has_losses else made).strip()
                right.append(_plain(given.partition("\n")[0] if self.ending else given) == _plain(answer))
                losses += [math.fsum(made["losses"])] if has_losses else []
        names = [f"line {line}" for line, *_ in self.rows]
        rows: list[Measurement] = [proportion("accuracy", right, {})]
        items: list[ItemScore] = unit_scores("accuracy", right, names)
        if guesses:
            rows.append(proportion("accuracy per byte", per_byte, {}))
            rows.append(single("chance among choices", "share", math.fsum(guesses) / len(guesses), len(guesses), {}))
        if len(losses) == len(right):
            rows.append(mean("nll of the answer", "nats", losses, {}, better="lower"))
            items += unit_scores("nll of the answer", losses, names)
        return Scores(measurements=rows, items=items)


def read_questions(options: Options) -> list[tuple[int, str, str, list[str]]]:
    """Return the line, question, answer and choices of every question.

    Raises:
        ConfigError: No file is named.
        DataError: The file is missing or empty, or a line lacks a field.
    """
    if not options.questions:
        raise refused(options, "questions", 'name a .jsonl file with {"question": ..., "answer": ...} on each line')
    rows = []
    for line, row in jsonl_rows(Path(options.questions), ("question", "answer")):
        place = f"{options.questions}: line {line}"
        question, answer, choices = str(row["question"]).strip(), str(row["answer"]).strip(), row.get("choices") or []
        if not isinstance(choices, list):
            raise DataError(f'{place}: "choices" is not a list of texts')
        choices = [text_field({"choices": choice}, "choices", place).strip() for choice in choices]
        if choices and (answer not in choices or len(set(choices)) < max(2, len(choices))):
            raise DataError(
                f"{place}: give two or more different choices, and as the answer {answer[:60]!r} one of them"
            )
        rows.append((line, question, answer, choices))
    return rows


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").casefold()


register(TaskKind(name="ask", doc=__doc__, options=Options, make=AskTask))

"""Conversations as a chat template writes them, with what is learned: the assistant's answers."""

import hashlib
import re
from collections.abc import Iterator

from ..errors import DataError, on_one_line
from .documents import Conversation
from .tokenizer import Tokenizer

DEFAULT_TEMPLATE = r"""
{%- for message in messages -%}
{{ "### " + message.role + "\n" }}
{%- if message.role == "assistant" -%}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else -%}
{{ message.content }}
{%- endif -%}
{{ "\n\n" }}
{%- endfor -%}
{{ "### assistant\n" if add_generation_prompt else "" }}"""
"""Template of tokenizers that have none."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a tokenizer, or `DEFAULT_TEMPLATE`.

    Raises:
        DataError: The tokenizer puts something before every text, so the parts of a conversation cannot be joined.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.template = tokenizer.chat_template or DEFAULT_TEMPLATE
        self.tokens = {"bos_token": tokenizer.begin_of_text_token, "eos_token": tokenizer.end_of_text_token}
        names = sorted(tokenizer.special_tokens, key=len, reverse=True)  # one may begin with another
        self.special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        if tokenizer.encode("\nA") != tokenizer.encode("\n") + tokenizer.encode("A"):
            raise DataError(
                "the tokenizer encodes a text in another way after other text, so conversations cannot be divided into prompts "
                "and answers; use a byte-level tokenizer"
            )

    @property
    def sha256(self) -> str:
        """Fingerprint of the template and the tokens that it writes."""
        return hashlib.sha256(repr((self.template, self.tokens)).encode()).hexdigest()

    def segments(self, conversation: Conversation) -> Iterator[tuple[str, bool]]:
        """Yield the text of a conversation in order, cut where answers begin and end, each with whether it is an answer.

        An answer is what the template marks by `{% generation %}`. In a template without such marks, it is what follows the
        prompt for it, up to and including the last special token before the next message.

        Raises:
            DataError: The template fails, or an answer in it is not what the model will be asked for.
        """
        for role, content in conversation.messages:
            if found := self.special.search(content):
                raise DataError(
                    f"{conversation.place}: a message of the {role} holds {found[0]!r}, which is a special token; remove it"
                )
        if _MARKS.search(self.template):
            text, spans = self._render(conversation, len(conversation.messages), marks=True)
        else:
            text, spans = self._spans(conversation)
        if not any(begin < end for begin, end in spans):
            raise DataError(f"{conversation.place}: the chat template writes no answer; correct the template")
        place = 0
        for begin, end in spans:
            yield from (
                (part, scored) for part, scored in ((text[place:begin], False), (text[begin:end], True)) if part
            )
            place = end
        if place < len(text):
            yield text[place:], False

    def _spans(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Return the whole text, and the span of each answer, found by writing the conversation up to it."""
        messages, spans = conversation.messages, list[tuple[int, int]]()
        whole, _ = self._render(conversation, len(messages))
        for index, (role, _) in enumerate(messages):
            if role == "assistant":
                prompt, _ = self._render(conversation, index, add_generation_prompt=True)
                answered, _ = self._render(conversation, index + 1) if index + 1 < len(messages) else (whole, None)
                if not (whole.startswith(answered) and answered.startswith(prompt)):
                    raise DataError(
                        f"{conversation.place}: the chat template writes message {index + 1} or what is before it in another "
                        "way when more follows, so its tokens are not those that a model is asked for; mark answers in the "
                        "template by {% generation %}, or give conversations with one answer"
                    )
                last = [found.end() for found in self.special.finditer(answered, len(prompt))]
                spans.append((len(prompt), last[-1] if last else len(answered)))
        return whole, spans

    def _render(
        self, conversation: Conversation, count: int, *, marks: bool = False, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the first `count` messages, and the spans that are marked."""
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{"role": role, "content": content} for role, content in conversation.messages[:count]]
        try:
            (text,), spans = render_jinja_template(
                [messages],
                chat_template=self.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"{conversation.place}: the chat template refuses the conversation ({on_one_line(error)}); change one of them"
            ) from None
        return text, spans[0] if marks else []

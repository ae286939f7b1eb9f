"""The tokens that a chat model puts around a user's message."""

from difftransformer.data import Tokenizer
from difftransformer.errors import DataError, on_one_line

_PLACE = "\u241eplace of the message\u241e"


def chat_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a user's message, up to the beginning of the assistant's answer."""
    # Task files import no transformers.
    from transformers.utils.chat_template_utils import render_jinja_template

    from difftransformer.model.transformers_errors import FOREIGN_FAULTS, bounded

    if tokenizer.chat_template is None:
        raise DataError("the tokenizer has no chat template; use --prompt base")
    try:
        with bounded():
            (text,), _ = render_jinja_template(
                [[{"role": "user", "content": _PLACE}]],
                chat_template=tokenizer.chat_template,
                add_generation_prompt=True,
                bos_token=tokenizer.begin_of_text_token,
                eos_token=tokenizer.end_of_text_token,
            )
    except FOREIGN_FAULTS as error:
        raise DataError(f"the tokenizer's chat template fails ({on_one_line(error)}); use --prompt base") from error
    before, place, after = text.partition(_PLACE)
    if not place:
        raise DataError("the tokenizer's chat template does not write a user's message as it is; use --prompt base")
    return tokenizer.encode_special(before), tokenizer.encode_special(after)

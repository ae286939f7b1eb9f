"""A judge that counts the words which an answer shares with its document."""

import re
from collections.abc import Sequence

from difftransformer.errors import ConfigError

from .base import Case, Judgment

_STOP_WORDS = """
a about after all also am an and any are as at be been before being but by can could did do does for from had has have he her
here him his how i if in into is it its just may me might more most my no nor not of off on one only or other our out over own
said same she should so some such than that the their them then there these they this those through to too under until up us
very was we were what when where which while who whom why will with would you your
"""


class OverlapJudge:
    """A judge for which an answer is faithful if enough of its content words occur in the document.

    It is fast and knows nothing of meaning.

    Args:
        threshold: Minimum share of the answer's content words that occur in the document or the question.
    """

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(f"overlap_threshold={threshold}: give a share above 0 and at most 1")
        self.threshold, self.name, self.identity = threshold, "overlap", f"overlap {threshold}"
        self.rules: Sequence[str] = [
            f"An approximation: an answer counts as faithful when at least {threshold:.0%} of its words, the commonest left "
            "out, occur in the document or the question, in whatever order and sense."
        ]

    def judge(self, case: Case) -> Judgment:
        words = sorted(set(_words(case.answer)) - set(_STOP_WORDS.split()))
        given = set(_words(case.document)) | set(_words(case.question or ""))
        missing = [word for word in words if word not in given]
        if not words:
            return Judgment(faithful=False, reasoning="The answer has no content words.")
        share = (len(words) - len(missing)) / len(words)
        absent = f"; not in it: {', '.join(missing)}" if missing else ""
        return Judgment(
            faithful=share >= self.threshold, reasoning=f"{share:.0%} of {len(words)} content words are given{absent}."
        )


def _words(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:['\u2019][^\W\d_]+)?", text.casefold())

"""The answer that a text ends in, and whether it equals the right one.

What the answer is, in the prose of a model, is read here. Whether two answers are equal, as numbers, expressions, intervals or
sets, is decided by `math-verify` (extra `eval`).
"""

import logging
import re
import threading
import unicodedata

from difftransformer.errors import ConfigError

_LONGEST = 400
"""Characters. Longer answers are compared letter by letter."""
_SECONDS = 5  # for reading or comparing one answer
_LAST_STATEMENTS = 20

_DIGITS = (
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)"  # 1,234.5
    r"|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)"  # 1.234,5 and 1.234.567; but 1.234 is a decimal
    r"|\d{1,3}(?:[ '\u2019\u00a0\u2009\u202f]\d{3})+(?:\.\d+)?(?!\d)"
    r"|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
)
_SCALES = {
    "dozen": "12",
    "hundred": "100",
    "thousand": "10^3",
    "million": "10^6",
    "billion": "10^9",
    "trillion": "10^{12}",
}
_CHANGE = "squared|cubed|factorial|halves|thirds|fourths|fifths|sixths|eighths|tenths|hundredths|thousandths"
_SCALE = re.compile(rf"(?<=\d)\s*({'|'.join(_SCALES)})\b")
_FRACTION = r"\\[dtc]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)"
_POWER = r"\s?\^\s?(?:\{[^{}]*\}|-?\w+)"
_WRITTEN = re.compile(
    rf"\\sqrt\{{[^{{}}]*\}}|\d+(?::\d+)+|[a-zA-Z)}}](?:{_POWER}|_\w+)|[-+]?(?:\d+\s*)?{_FRACTION}"
    rf"|(?:(?<![\w)\u00b1])[-+]?|(?<=[a-zA-Z)])){_DIGITS}(?:/\d+)?(?:{_POWER})?(?:\s*(?:{'|'.join(_SCALES)})\b)?"
    rf"(?:\s?\\?%|[a-zA-Z]+|\s(?:{_CHANGE})\b)?"
)
"""A number in a text: 10-3 is 10 and 3. It includes what changes it, as in 2^3, 3x, \\sqrt{5} and 3:30."""
_LISTED = re.compile(r"(?:\s[a-zA-Z]+)?(?:[\s,(]+(?:or|and)\s+|\s?[-\u2013]\s?)\$?")
"""Stands between two numbers when neither is the answer."""

_ANSWER_WORDS = re.compile(
    r"answer(?:\s+(?:to|of|for)\s[^.!?\n:=]{1,60}?)?\s*(?:(?:is|would be|should be|must be|equals)\b|:|=)[ \t]*:?",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")
_QUOTES = " *_`:\"',"
_BEGINNING = re.compile(r"[-+$\u20ac\u00a3\u00b1\u2212\u00bc-\u00be.]*\d|[\[({\\]")
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)|\n")
_REJECTED = re.compile(
    r"(?:\bnot|n['\u2019]t|\bcannot|\bnever|\bneither|\bnor|\brather than|\binstead of|\b(?:less|more|fewer|greater) than"
    rf"|\u2260|!=|\\neq?\b)\s*(?:be\s|equal\s(?:to\s)?|exactly\s)?\s*\$?(?:{_WRITTEN.pattern})"
    rf"(?:,?\s+n?or\s+\$?(?:{_WRITTEN.pattern}))?",
    re.IGNORECASE,
)
"""A number that a text rejects as the answer."""
_CORRECTED = re.compile(
    r"(?:(?:^|[.,;:!?(\n\u2013\u2014-])\s*(?:(?:(?:no|wait|hmm|sorry|oops)\s*[,.:;!\u2013\u2014-]+|actually|correction|i mean"
    r"|rather|make that|scratch that)[\s,.:;!\u2013\u2014-]*){1,4}"
    r"(?:(?:it|that|this)(?:['\u2019]s| is| was| should be| must be)\s+)?(?=[-+$\\]{0,2}\d|\\[dt]?frac)"
    r"|\b(?:mistake|wrong|incorrect|not right|not correct)\s*[.,:;!\n]+)",
    re.IGNORECASE,
)
"""What takes back an answer; the right one follows."""
_OPENING = re.compile(r"^(?:(?:but|it|is|so|equals)\b\s*|it['\u2019]s\s+)+", re.IGNORECASE)
_REASON = re.compile(
    r"(.+?)[\s,(\u2013\u2014-]+(?:because|since|as|for|so|which|where|when|while|after|given|due to|out of)\b",
    re.IGNORECASE | re.DOTALL,
)
_HUGE = re.compile(r"(?:\^|\*\*)\s*\{?\s*[-+]?\d{5}|\d\s*(?:\^|\*\*)\s*\{?\s*\d+\s*(?:\^|\*\*)|\d{5}\s*!|!\s*!")
"""What sympy would write out, digit by digit."""
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3}")  # two letters may be a product
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    rf"(?<=[\d%}}])(?:(?:\s+(?!(?:or|plus|minus|{_CHANGE})\b)[a-zA-Z]{{2,}}\.?)+|\s*(?:[mckd]?m|k?g|m?[lL]|min|[sh]|mph)"
    r"(?:/[a-zA-Z]+)?)(?:\s*\^\{?[23]\}?)?$"
)
_DECIMAL_COMMA = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)")
_PLAIN = (
    (r"\s*,?\s*(?:\\text\{\s*)?\b(?:and|or)\b(?:\s*\})?\s*", ", "),
    (r"\{,\}|\\[,!;: ](?=\d)|(?<=\d)[ '\u2019\u00a0\u2009\u202f](?=\d{3}(?!\d))", ""),  # between thousands
    (r"\s*\((?!or\b)[^()\\]*[a-zA-Z]{2}[^()\\]*\)$", ""),  # a remark
    (r"\\(?:degree|textdegree)|\u00b0[CF]?|\^\s*\{?\s*\\circ\s*\}?", ""),
    (r"^([-+]?)[\u20ac\u00a3]|[\u20ac\u00a3]$", r"\1"),
    (r"(\d)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),  # mixed numbers
    (r"(\d)[eE]\+?(-?\d{1,3})(?!\d)", r"\1 \\times 10^{\2}"),
    (r"\\?%|percent", "%"),
    ("\u2212", "-"),
    ("\u221e", r"\\infty "),
    ("\u03c0", r"\\pi "),
    ("\u222a", r"\\cup "),
    ("\u00d7", r"\\times "),
)
"""What `math-verify` doesn't read, and how it is written for it."""


def extract_answer(text: str) -> str | None:
    """Return the answer that a text gives, or None.

    It is the content of the last \\boxed{...}; or else the rest of the line after the last "####"; or else the sentence after
    the last "answer is" or "answer:", or a correction that follows; or else the whole text, if it is one formula or a sentence
    that begins with a number; or else the last number. A number that the text rejects, as in "not 5", is no answer, nor is
    one of two, as in "5 or 6".
    """
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    for words in reversed(list(_ANSWER_WORDS.finditer(text))[-_LAST_STATEMENTS:]):
        if answer := _stated(text[words.end() :]):
            return answer
    whole = text.strip(_QUOTES + "\n").rstrip(".")
    is_one_sentence = len(whole) <= _LONGEST and not (_SENTENCE_END.search(whole) or _BOXED.search(whole))
    if is_one_sentence and (_BEGINNING.match(whole) or not re.search(r"(?<!\\)\b[a-zA-Z]{2}", whole)):
        return whole or None
    return _last_number(text)


def is_right(text: str, answer: str) -> bool:
    """Whether the text of a model ends in the right answer. `answer` may also be a solution that ends in it."""
    gold, given = answer, extract_answer(text)
    if "####" in answer or _last_boxed(answer) is not None:
        gold = extract_answer(answer) or answer
    if same_answer(text, gold):
        return True
    if given is None:
        return False
    if same_answer(given, gold):
        return True
    given = _TEXT.sub(r" \1 ", given[:_LONGEST])
    if reason := _REASON.match(given):
        given = reason[1]
        if same_answer(given, gold):
            return True
    if not _PROSE.search(given) or _PROSE.search(_written(gold)):
        return False
    number = _last_number(given)  # as in "she has 18 eggs left" and "the sum 3+4=7"
    return number is not None and same_answer(number, gold)


def same_answer(a: str, b: str) -> bool:
    """Whether two answers are equal by `math-verify`: as numbers (50% is 50 and 0.5), expressions, intervals or sets.

    Units and currencies are ignored. Words are equal letter by letter.
    """
    first, second = _written(a), _written(b)
    if first == second or _letters(first) == _letters(second):
        return first != ""
    if max(len(first), len(second)) > _LONGEST or _PROSE.search(first) or _PROSE.search(second):
        return False
    if _HUGE.search(first) or _HUGE.search(second):
        return False
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # an answer that it can't read is a wrong one
    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None  # it sets an alarm
    left, right = (math_verify.parse(f"${text}$", parsing_timeout=seconds) for text in (second, first))
    return bool(math_verify.verify(left, right, timeout_seconds=seconds))


def check_installed() -> None:
    """Check that `math-verify` is there, before a model is asked anything.

    Raises:
        ConfigError: It is missing.
    """
    try:
        import math_verify  # noqa: F401
    except ImportError:
        raise ConfigError(
            "mathematical answers are compared by math-verify, which is missing; run pip install 'difftransformer[eval]'"
        ) from None


def _written(text: str) -> str:
    """Return an answer as LaTeX that `math-verify` reads, without units."""
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", _vulgar, text[: 2 * _LONGEST] if len(text) > 10 * _LONGEST else text)
    text = text.replace("\\$", "$").strip("$ \t\n*`").rstrip(".").strip()
    for pattern, replacement in _PLAIN:
        text = re.sub(pattern, replacement, text)
    text = _DECIMAL_COMMA.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)
    text = _SCALE.sub(lambda match: rf" \times {_SCALES[match[1]]}", text)
    return _UNIT.sub("", text)


def _letters(text: str) -> str:
    """Return a text without what may differ between equal words."""
    text = re.sub(r"[\s$]+", "", _TEXT.sub(r"\1", text)).casefold()
    return text[1:-1] if re.fullmatch(r"\(\w\)", text) else text  # a choice


def _vulgar(fraction: re.Match[str]) -> str:
    return " " + unicodedata.normalize("NFKC", fraction[0]).replace("\u2044", "/")


def _stated(text: str) -> str | None:
    """Return what a text begins with, or its last correction."""
    for correction in reversed(list(_CORRECTED.finditer(text))):
        if answer := _first_kept(text[correction.end() :]):
            return answer
    return _first_kept(text)


def _first_kept(text: str) -> str | None:
    """Return the first sentence of a text, or what a sentence after it puts in the place of a rejected number."""
    for sentence in _SENTENCE_END.split(text.lstrip(" \t"), maxsplit=3)[:3]:
        kept = _REJECTED.sub(" ", sentence).strip(_QUOTES)
        if answer := _OPENING.sub("", kept).strip(_QUOTES).rstrip("."):
            return answer
        if not sentence.strip(_QUOTES):
            return None
    return None


def _last_number(text: str) -> str | None:
    text = _REJECTED.sub(" ", text.replace("{,}", ","))
    numbers = list(_WRITTEN.finditer(text))
    if not numbers or (len(numbers) > 1 and _LISTED.fullmatch(text, numbers[-2].end(), numbers[-1].start())):
        return None
    return numbers[-1][0]


def _last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, inner braces included, or the word after a \\boxed without braces."""
    boxes = list(_BOXED.finditer(text))
    ends: dict[int, int] = {}
    opened: list[int] = []
    for brace in re.finditer("[{}]", text) if boxes else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            ends[opened.pop()] = brace.start()
    for box in reversed(boxes):
        start = box.end()
        if text[start : start + 1] != "{":
            word = text[start : start + _LONGEST].split(maxsplit=1)
            return word[0].strip("$.") if word else None
        if start in ends:
            return text[start + 1 : ends[start]].strip()
    return None

"""The answer that a text ends in, and whether two answers are the same number or the same expression."""

import re
import unicodedata
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

_LONGEST_NUMBER = 100
_LONGEST_LIST = 400
"""Characters. Longer answers are compared letter by letter."""
_LAST_STATEMENTS = 20

_DIGITS = (
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)"  # 1,234.5
    r"|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)"  # 1.234,5 and 1.234.567; but 1.234 is a decimal
    r"|\d{1,3}(?:[ '\u2019\u00a0\u2009\u202f]\d{3})+(?:\.\d+)?(?!\d)"
    r"|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
)
_SEPARATORS = re.compile(r"[, '\u2019\u00a0\u2009\u202f]")
_WITH_DECIMAL_COMMA = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}")
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CHANGE = "squared|cubed|factorial|halves|thirds|fourths|fifths|sixths|eighths|tenths|hundredths|thousandths"
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})\b")
_FRACTION = r"\\[dtc]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)"
_POWER = r"\s?\^\s?(?:\{[^{}]*\}|-?\w+)"
_WRITTEN = re.compile(
    rf"\\sqrt\{{[^{{}}]*\}}|\d+(?::\d+)+|[a-zA-Z)}}](?:{_POWER}|_\w+)|[-+]?(?:\d+\s*)?{_FRACTION}"
    rf"|(?:(?<![\w)\u00b1])[-+]?|(?<=[a-zA-Z)])){_DIGITS}(?:/\d+)?(?:{_POWER})?(?:{_SCALE.pattern})?"
    rf"(?:\s?\\?%|[a-zA-Z]+|\s(?:{_CHANGE})\b)?"
)
"""A number in a text: 10-3 is 10 and 3. It includes what changes it, as in 2^3, 3x, \\sqrt{5} and 3:30."""
_LISTED = re.compile(r"(?:\s[a-zA-Z]+)?(?:[\s,(]+(?:or|and)\s+|\s?[-\u2013]\s?)\$?")
"""Stands between two numbers of which neither is the answer."""

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
"""A number of which a text says that it is not the answer."""
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
    r"(?P<answer>.+?)[\s,(\u2013\u2014-]+(?:(?P<why>because|since)|as|for|so|which|where|when|while|after|given|due to"
    r"|out of)\b",
    re.IGNORECASE | re.DOTALL,
)
_EXPRESSION = re.compile(r"[\\^={}]|\d[a-zA-Z]")

_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\w|\{\w+\}))?(?:\([a-zA-Z]\))?"
_EQUATION = re.compile(rf"(?:(?P<name>{_NAME})\s*=\s*)?(?:[^a-zA-Z=<>!\u2260\u2264\u2265\\,]*=\s*)*")
"""What may stand before an answer: the name of a variable, and arithmetic."""
_WORD = rf"(?!(?:or|plus|minus|{_CHANGE})\b)[a-zA-Z]{{2,}}\.?(?:\s*\^\{{?[23]\}}?)?"
_SHORT = r"(?:[mckd]?m|k?g|m?[lL]|min|[sh]|ft|in|lb|oz|mph|[CFK])(?:\s*\^?\{?[23]\}?)?"
_UNIT = re.compile(
    rf"(?:\s+{_WORD}(?:[ /]+(?:{_WORD}|{_SHORT}))*|\s*{_SHORT}(?:/{_SHORT})?|\s*[$\u20ac\u00a3\u00a2%]|)"
)
"""Behind a number: words after a space, or a usual abbreviation; 3x is no number."""
_REMARK = re.compile(r"\s*\((?!or\b)[^()\\]*(?:[a-zA-Z]{2}|=)[^()\\]*\)$")
_VALUE = re.compile(
    rf"(?P<whole>\d+)\s+(?P<part>\d+)\s*/\s*(?P<parts>\d+)"
    rf"|(?:(?P<factor>{_DIGITS})\s*[\u00d7\u00b7*x]\s*)?(?P<base>\d{{1,4}})\s*\^\s*(?P<power>\d|\{{\s*[-+]?\d{{1,2}}\s*\}})"
    rf"|(?P<above>{_DIGITS})(?:\s*/\s*(?P<below>[-+]?{_DIGITS}))?"
)
_MEASURES = {
    name: (measure, Fraction(size))
    for measure, size, names in (
        ("length", "0.001", "mm millimeter millimetre"),
        ("length", "0.01", "cm centimeter centimetre"),
        ("length", "1", "m meter metre"),
        ("length", "1000", "km kilometer kilometre"),
        ("length", "0.0254", "in inch inches"),
        ("length", "0.3048", "ft foot feet"),
        ("length", "1609.344", "mile"),
        ("mass", "1", "g gram"),
        ("mass", "1000", "kg kilogram"),
        ("volume", "0.001", "ml milliliter millilitre"),
        ("volume", "1", "l liter litre"),
        ("time", "1", "s second"),
        ("time", "60", "min minute"),
        ("time", "3600", "h hour"),
        ("time", "86400", "day"),
        ("dollars", "1", "$ dollar usd"),
        ("dollars", "0.01", "\u00a2 cent"),
        ("euros", "1", "\u20ac euro eur"),
        ("pounds", "1", "\u00a3 gbp"),
        ("share", "0.01", "%"),
    )
    for name in names.split()
}
"""Units in which amounts compare: 100 cm is 1 m and not 100 m. Others are ignored."""

_SPACES = re.compile(r"\\[!,;:> ]|~|\\(?:quad|qquad|left|right|displaystyle)(?![a-zA-Z])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SYMBOLS = {
    "{,}": ",", "\\$": " usd ", "\\%": "%", "percent": "%", "\u2212": "-", "\\times": "\u00d7", "\\cdot": "\u00b7",
    "\\div": "\u00f7", "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne", "\u221e": "\\infty", "\u03c0": "\\pi",
    "\u222a": "\\cup", "+\\infty": "\\infty",
}  # fmt: skip


class _Amount(NamedTuple):
    value: Fraction
    unit: str
    name: str


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
    whole = text.strip(_QUOTES + "\n.")
    is_one_sentence = len(whole) <= _LONGEST_LIST and not (_SENTENCE_END.search(whole) or _BOXED.search(whole))
    if is_one_sentence and (_BEGINNING.match(whole) or not re.search(r"(?<!\\)\b[a-zA-Z]{2}", whole)):
        return whole or None
    return _last_number(text)


def is_right(text: str, answer: str) -> bool:
    """Whether the text of a model ends in the right answer. `answer` may also be a solution that ends in it."""
    gold, found = reference_answer(answer), extract_answer(text)
    if same_answer(text, gold):
        return True
    if found is None:
        return False
    if same_answer(found, gold):
        return True
    reason = _REASON.match(_TEXT.sub(r" \1 ", found[:_LONGEST_LIST]))
    if reason is not None:
        if same_answer(reason["answer"], gold):
            return True
        if reason["why"] or number_of(reason["answer"]) is not None:
            found = reason["answer"]
    if number_of(gold) is None or number_of(found) is not None or _EXPRESSION.search(found):
        return False
    if not re.search("[a-zA-Z]{2}", found):  # no words around a number, as in "she has 18 eggs left"
        return False
    number = _last_number(found)
    return number is not None and same_answer(number, gold)


def reference_answer(answer: str) -> str:
    """Return the answer in a reference: all of it, or the part that is marked by "####" or \\boxed{}."""
    if "####" in answer or _last_boxed(answer) is not None:
        return extract_answer(answer) or answer
    return answer


def same_answer(a: str, b: str) -> bool:
    """Whether two answers are equal.

    They are as exact numbers, element by element, or else letter by letter without LaTeX's spacing. Amounts in known units
    are converted, and other units are ignored. A percentage equals its number with and without the division by 100: 50% is 50
    and 0.5. The elements of a set and the parts of a union have no order.
    """
    first, second = _amount(a), _amount(b)
    if first is not None and second is not None:
        return _same_amount(first, second)
    plain_a, plain_b = plain(a), plain(b)
    if plain_a == plain_b:
        return plain_a != ""
    if max(len(plain_a), len(plain_b)) > _LONGEST_LIST:
        return False
    parts_a, parts_b = (text.split("\\cup") for text in (plain_a, plain_b))
    if len(parts_a) > 1 or len(parts_b) > 1:
        return _same_parts(parts_a, parts_b, has_order=False)
    (ends_a, parts_a), (ends_b, parts_b) = _list(plain_a), _list(plain_b)
    if len(parts_a) > 1 or len(parts_b) > 1 or ends_a or ends_b:
        return ends_a == ends_b and _same_parts(parts_a, parts_b, has_order=ends_a != "{}")
    (name_a, rest_a), (name_b, rest_b) = _named(plain_a), _named(plain_b)
    if rest_a == plain_a and rest_b == plain_b:
        return False
    return (not name_a or not name_b or name_a == name_b) and same_answer(rest_a, rest_b)


def number_of(text: str) -> Fraction | None:
    """Return a text as an exact number, without thousands separators, currency, unit, percent sign and LaTeX; or None.

    Reads integers, decimals, a/b, \\frac{a}{b}, mixed numbers such as 3 1/2 and 3\\frac{1}{2}, powers such as 2^3, 1.5e3,
    1.5 \\times 10^3 and 1.5 million.
    """
    amount = _amount(text)
    return None if amount is None else amount.value


def plain(text: str) -> str:
    """Return an expression without spacing, size commands, units of angle and final full stop."""
    text = _unwrapped(text)
    text = re.sub(r"\s*,?\s+(?:and|or)\s+", ",", text).replace("\\{", "{").replace("\\}", "}")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"^(-?)\\frac\{([\\\w]+)\}\{([\\\w]+)\}$", r"\1\2/\3", text)
    if (letter := re.fullmatch(r"\(([a-zA-Z])\)", text)) is not None:  # a choice
        text = letter[1]
    return text.casefold() if re.fullmatch(r"[a-zA-Z]+", text) else text


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


def _amount(text: str) -> _Amount | None:
    text = _unwrapped(text)
    if len(text) > _LONGEST_LIST:
        return None
    name, text = _named(_REMARK.sub("", text))
    text = re.sub(r"^\(([^(),]*)\)$", r"\1", text)
    text = re.sub(rf"(?<=\d)\s*(?={_FRACTION})", " ", text)
    text = re.sub(_FRACTION, _ratio, text)
    start = re.match(r"([-+]?)\s*([$\u20ac\u00a3]|usd\b|)\s*([-+]?)\s*", text)
    assert start is not None
    rest = re.sub(r"^\(([^(),]*)\)$", r"\1", text[start.end() :])
    found = _VALUE.match(rest)
    if found is None or len(found[0]) > _LONGEST_NUMBER or (start[1] and start[3]):
        return None
    value, end = _value(found), found.end()
    if scale := _SCALE.match(rest, end):
        value, end = value and value * _SCALES[scale[1]], scale.end()
    if value is None or not _UNIT.fullmatch(rest, end):
        return None
    unit = (start[2] or rest[end:]).strip().casefold().rstrip(".")
    return _Amount(-value if "-" in (start[1], start[3]) else value, unit, name)


def _value(found: re.Match[str]) -> Fraction | None:
    if found["whole"]:
        parts = int(found["parts"])
        return int(found["whole"]) + Fraction(int(found["part"]), parts) if parts else None
    if found["base"]:
        base, power = Fraction(found["base"]), int(found["power"].strip("{} "))
        return None if base == 0 and power <= 0 else base**power * _exact(found["factor"] or "1")
    below = _exact(found["below"] or "1")
    return _exact(found["above"]) / below if below else None


def _exact(digits: str) -> Fraction:
    if _WITH_DECIMAL_COMMA.match(digits):
        return Fraction(digits.replace(".", "").replace(",", "."))
    return Fraction(_SEPARATORS.sub("", digits))


def _ratio(fraction: re.Match[str]) -> str:
    above, below = (part.strip("{} ") for part in fraction.groups())
    return fraction[0] if re.search(r"[a-zA-Z\\]", above + below) else f"{above}/{below}"


def _same_amount(a: _Amount, b: _Amount) -> bool:
    if a.name and b.name and a.name != b.name:
        return False
    (measure_a, size_a), (measure_b, size_b) = _measure(a.unit), _measure(b.unit)
    if measure_a and measure_b:
        return measure_a == measure_b and a.value * size_a == b.value * size_b
    if a.value == b.value:
        return True
    return "share" in (measure_a, measure_b) and a.value * size_a == b.value * size_b


def _measure(unit: str) -> tuple[str, Fraction]:
    measure, size = _MEASURES.get(unit) or _MEASURES.get(unit.removesuffix("s")) or ("", Fraction(1))
    return measure, size


def _named(text: str) -> tuple[str, str]:
    """Return the name of a variable that a text gives a value, "" if there is none, and the value."""
    found = _EQUATION.match(text)
    assert found is not None
    return found["name"] or "", text[found.end() :]


def _unwrapped(text: str) -> str:
    for symbol, same in _SYMBOLS.items():
        text = text.replace(symbol, same)
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", _vulgar, text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", _TEXT.sub(r" \1 ", _SPACES.sub("", text)))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\u00b0|\\(?:[()\[\]])", "", text)
    if text.count("$") % 2 == 0:  # around a formula; a single one is a currency
        text = text.replace("$", "")
    return text.strip(" \t\n*`").rstrip(".").strip()


def _vulgar(fraction: re.Match[str]) -> str:
    return " " + unicodedata.normalize("NFKC", fraction[0]).replace("\u2044", "/")


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
            word = text[start : start + _LONGEST_LIST].split(maxsplit=1)
            return word[0].strip("$.") if word else None
        if start in ends:
            return text[start + 1 : ends[start]].strip()
    return None


def _list(text: str) -> tuple[str, list[str]]:
    """Return the brackets around a text, and what the commas between them part; an inner bracket holds its commas."""
    ends, depths = "", _depths(text)
    if len(text) > 1 and text[0] in "([{" and text[-1] in ")]}" and depths[-1] == 0 and min(depths[:-1]) > 0:
        ends, text, depths = text[0] + text[-1], text[1:-1], [depth - 1 for depth in depths[1:-1]]
    commas = [place for place, depth in enumerate(depths) if depth == 0 and text[place] == ","]
    return ends, [text[a + 1 : b] for a, b in pairwise([-1, *commas, len(text)])]


def _depths(text: str) -> list[int]:
    return list(accumulate((character in "([{") - (character in ")]}") for character in text))


def _same_parts(a: list[str], b: list[str], *, has_order: bool) -> bool:
    if len(a) != len(b) or has_order:
        return len(a) == len(b) and all(map(same_answer, a, b))
    left = list(b)
    for part in a:
        same = next((other for other in left if same_answer(part, other)), None)
        if same is None:
            return False
        left.remove(same)
    return True

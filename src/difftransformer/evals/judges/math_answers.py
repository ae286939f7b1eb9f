"""The answer that a text ends in, and whether two answers are the same number or the same expression."""

import re
from fractions import Fraction

_LONGEST_NUMBER = 100
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_NUMBER = rf"[-+]?{_DIGITS}"
_WRITTEN = re.compile(rf"(?<![\w)])[-+]?{_DIGITS}(?:/\d+)?(?:\s?\\?%)?|(?<=[\w)]){_DIGITS}")
"""A number in a text: 10-3 is 10 and 3."""
_ANSWER_WORDS = re.compile(r"answer\s*(?:is|:|=)[ \t]*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)")
_EXPRESSION = re.compile(r"[\\^={}]|\d[a-zA-Z]")
_BOXED = re.compile(r"\\f?boxed\s*")
_WORD = r"[a-zA-Z\u00b0]{2,}\.?(?:\s*\^\{?[23]\}?)?"
_SHORT = r"(?:[mckd]?m|k?g|m?l|min|[sh]|ft|in|lb|oz|mph|[CFK])(?:\s*\^?\{?[23]\}?)?"
_UNIT = re.compile(rf"(?P<number>.*\d)(?:\s+{_WORD}(?:[ /]+(?:{_WORD}|{_SHORT}))*|\s*{_SHORT}(?:/{_SHORT})?)")
"""Of a number: words after a space, or a usual abbreviation; 3x is no number."""
_SPACES = re.compile(r"\\[!,;:> ]|~|\\(?:quad|qquad|left|right|displaystyle)(?![a-zA-Z])")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def extract_answer(text: str) -> str | None:
    """Return the answer that a text gives, or None.

    It is the content of the last \\boxed{...}; or else the rest of the line after the last "####"; or else the rest of the
    sentence after the last "answer is" or "answer:"; or else the last number.
    """
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    if stated := list(_ANSWER_WORDS.finditer(text)):
        line = text[stated[-1].end() :].partition("\n")[0].strip()
        if answer := _SENTENCE_END.split(line, maxsplit=1)[0].strip(" *_`:\"'").rstrip("."):
            return answer
    numbers = _WRITTEN.findall(text)
    return numbers[-1] if numbers else None


def is_right(text: str, answer: str) -> bool:
    """Whether the text of a model ends in the right answer. `answer` may also be a solution that ends in it."""
    gold, found = reference_answer(answer), extract_answer(text)
    if found is None:
        return False
    if same_answer(found, gold):
        return True
    if number_of(gold) is None or number_of(found) is not None or _EXPRESSION.search(found):
        return False
    numbers = _WRITTEN.findall(found)  # words around one, as in "she has 18 eggs left"
    return bool(numbers) and same_answer(numbers[-1], gold)


def reference_answer(answer: str) -> str:
    """Return the answer in a reference: all of it, or the part that is marked by "####" or \\boxed{}."""
    if "####" in answer or _last_boxed(answer) is not None:
        return extract_answer(answer) or answer
    return answer


def same_answer(a: str, b: str) -> bool:
    """Whether two answers are equal: as exact numbers, element by element, or else letter by letter without LaTeX's spacing.

    A percentage equals its number with and without the division by 100: 50% is 50 and 0.5.
    """
    first, second = number_of(a), number_of(b)
    if first is not None and second is not None:
        if first == second:
            return True
        marks = tuple(_unwrapped(text).endswith(("%", "percent")) for text in (a, b))
        return (marks == (True, False) and first / 100 == second) or (marks == (False, True) and second / 100 == first)
    plain_a, plain_b = plain(a), plain(b)
    if plain_a == plain_b:
        return plain_a != ""
    parts_a, parts_b = _parts(plain_a), _parts(plain_b)
    return len(parts_a) == len(parts_b) > 1 and plain_a[0] == plain_b[0] and all(map(same_answer, parts_a, parts_b))


def number_of(text: str) -> Fraction | None:
    """Return a text as an exact number, without thousands separators, currency, unit, percent sign and LaTeX; or None.

    Reads integers, decimals, a/b, \\frac{a}{b}, and mixed numbers such as 3 1/2 and 3\\frac{1}{2}.
    """
    text = _unwrapped(text)
    text = re.sub(r"\s*\([^()]*[a-zA-Z][^()]*\)$", "", text)  # "9 (apples)"
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text)
    text = re.sub(r"(?:\\%|%|percent)$", "", text).strip()
    text = text.lstrip("$\u20ac\u00a3").strip()
    text = re.sub(r"\\frac\s*(\d)\s*(\d)$", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(\d)\s*\\frac\{([^{}]*)\}\{([^{}]*)\}$", r"\1 \2/\3", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    if (unit := _UNIT.fullmatch(text)) is not None:
        text = unit["number"].strip()
    if len(text) > _LONGEST_NUMBER:
        return None
    if (mixed := re.fullmatch(r"([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)", text)) is not None and int(mixed[4]):
        value = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return -value if mixed[1] == "-" else value
    found = re.fullmatch(rf"(-?)\(?({_NUMBER})(?:\s*/\s*({_NUMBER}))?\)?", text)
    if found is None:
        return None
    over = Fraction(found[3].replace(",", "")) if found[3] else Fraction(1)
    if over == 0:
        return None
    value = Fraction(found[2].replace(",", "")) / over
    return -value if found[1] else value


def plain(text: str) -> str:
    """Return an expression without spacing, size commands, units of angle and final full stop."""
    text = _unwrapped(text)
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text)
    if (letter := re.fullmatch(r"\(([a-zA-Z])\)", text)) is not None:  # a choice
        text = letter[1]
    return text.casefold() if re.fullmatch(r"[a-zA-Z]+", text) else text


def _unwrapped(text: str) -> str:
    text = text.strip().replace("\\$", "").replace("\u2212", "-")
    text = re.sub(r"\\[dt]frac", r"\\frac", _TEXT.sub(r" \1 ", _SPACES.sub("", text)))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\(?:[()\[\]])", "", text)
    return text.strip(" \t\n*$`").rstrip(".").strip(" $")


def _last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, inner braces included, or the word after a \\boxed without braces."""
    for match in reversed(list(_BOXED.finditer(text))):
        start = match.end()
        if start >= len(text) or text[start] != "{":
            word = text[start:].split(maxsplit=1)
            return word[0].strip("$.") if word else None
        depth = 0
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + 1 : place].strip()
    return None


def _parts(text: str) -> list[str]:
    """Return the elements of (a, b), [a, b] or a, b; commas in braces and brackets do not divide."""
    if text[:1] in "([" and text[-1:] in ")]" and text:
        text = text[1:-1]
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]

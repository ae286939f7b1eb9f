"""Remove a secret from what a server says."""

import base64
import html
import re
import unicodedata
import urllib.parse
from collections import defaultdict

REDACTED = "[key]"
_PART_CHARACTERS = 8  # shorter parts of a secret are not recognised, unless the secret is shorter itself
_UNIT = re.compile(
    r"%(?:25)*[0-9a-f]{2}|\\+u[0-9a-f]{4}|\\+x[0-9a-f]{2}|\\+[nrt]|&#?\w{1,8};|.", re.DOTALL | re.IGNORECASE
)
_BRACKETING = "\\\"'`"


class Redactor:
    """Replaces a secret and its parts by `[key]`.

    A secret is found as it is, in upper or lower case, URL-encoded, escaped as in JSON or HTML, in base64 and in hexadecimal
    digits, with white space, quotes and invisible characters anywhere in it, and cut short on either side.

    Args:
        secret: The secret; "" replaces nothing.
    """

    def __init__(self, secret: str) -> None:
        self._parts: dict[int, set[str]] = defaultdict(set)
        for form in filter(None, _forms(secret)):
            length = min(len(form), _PART_CHARACTERS)
            self._parts[length] |= {form[start : start + length] for start in range(len(form) - length + 1)}

    def __call__(self, text: str) -> str:
        """Return the text without the secret."""
        units = list(_units(text))
        characters = "".join(character for character, _, _ in units)
        is_secret = bytearray(len(units) + 1)
        for length, parts in self._parts.items():
            for start in range(len(units) - length + 1):
                if characters[start : start + length] in parts:
                    is_secret[start : start + length] = b"\1" * length
        kept, done = [], 0
        for run in re.finditer(b"\1+", is_secret):
            kept += [text[done : units[run.start()][1]], REDACTED]
            done = units[run.end() - 1][2]
        return "".join([*kept, text[done:]])


def _units(text: str) -> list[tuple[str, int, int]]:
    """Return the characters that a text spells, with the places where each begins and ends, without separators."""
    units = []
    for match in _UNIT.finditer(text):
        character = _spelled(match[0])
        if len(character) != 1:  # an entity that is none
            units += [
                (letter, match.start() + place, match.start() + place + 1) for place, letter in enumerate(match[0])
            ]
        elif not (character.isspace() or character in _BRACKETING or unicodedata.category(character) in ("Cc", "Cf")):
            units.append((character, match.start(), match.end()))
    return units


def _spelled(unit: str) -> str:
    if len(unit) == 1:
        return unit
    if unit[0] == "&":
        return html.unescape(unit)
    escape = unit.lstrip("\\")
    if unit[0] == "\\" and escape[0] in "nrtNRT" and len(escape) == 1:
        return "\n"
    return chr(int(unit[-2:] if unit[0] == "%" else escape[1:], 16))


def _forms(secret: str) -> set[str]:
    plain = {secret, secret.lower(), secret.upper(), urllib.parse.unquote(secret)}
    content = secret.encode()
    encoded = {content.hex(), content.hex().upper()}
    for before in range(3):  # bytes before the secret in its group of three
        whole = base64.b64encode(bytes(before) + content).decode()
        # Characters that no byte beside the secret has a part in.
        inside = whole[-(-before * 8 // 6) : (before + len(content)) * 8 // 6]
        encoded |= {inside, inside.translate(str.maketrans("+/", "-_"))}
    return {"".join(character for character, _, _ in _units(form)) for form in plain} | {secret} | encoded

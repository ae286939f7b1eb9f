"""A key is found in what a server says: whole or in parts, in any of the usual encodings."""

import base64
import html
import json
import random
import string
import urllib.parse

import pytest

from difftransformer_lab.evals.judges.redaction import Redactor

KEY = "sk-proj-aB3/dE+9_zQ=x7Y~w"
BYTES = KEY.encode()


def escaped(key):
    return "".join(f"\\u{ord(character):04x}" for character in key)


ECHOES = {
    "plain": KEY,
    "upper case": KEY.upper(),
    "lower case": KEY.lower(),
    "URL-encoded": urllib.parse.quote(KEY, safe=""),
    "every byte URL-encoded": "".join(f"%{byte:02x}" for byte in BYTES),
    "URL-encoded twice": urllib.parse.quote("".join(f"%{byte:02X}" for byte in BYTES)),
    "JSON": json.dumps(KEY),
    "JSON with slashes": KEY.replace("/", "\\/"),
    "JSON by numbers": escaped(KEY),
    "JSON in JSON": json.dumps(escaped(KEY)),
    "HTML": html.escape("".join(f"&#{byte};" for byte in BYTES)).replace("&amp;", "&"),
    "HTML in hex": "".join(f"&#x{byte:x};" for byte in BYTES),
    "bytes": "".join(f"\\x{byte:02x}" for byte in BYTES),
    "hex": BYTES.hex(),
    "base64": base64.b64encode(BYTES).decode(),
    "base64 of the header": base64.b64encode(b"Bearer " + BYTES).decode(),
    "base64 of user and key": base64.b64encode(b"user:" + BYTES + b":more").decode(),
    "base64 of one more": base64.b64encode(b"u:" + BYTES + b"\n").decode(),
    "base64 for URLs": base64.urlsafe_b64encode(BYTES).decode(),
    "lines": "\n".join(KEY),
    "lines of four": "\r\n    ".join(KEY[start : start + 4] for start in range(0, len(KEY), 4)),
    "lines in JSON": "\\n".join(KEY[start : start + 5] for start in range(0, len(KEY), 5)),
    "base64 lines": "\n".join(base64.b64encode(BYTES).decode()[start : start + 6] for start in range(0, 36, 6)),
    "strings": '"\n"'.join(KEY[start : start + 4] for start in range(0, len(KEY), 4)),
    "invisible": "\u200b".join(KEY),
    "first part": KEY[:15],
    "last part": KEY[9:],
}


def spelled(text):
    """Every reading of a text that this test knows, in lower case: if none shows 8 characters of the key, none is there."""
    readings = [text, urllib.parse.unquote(urllib.parse.unquote(text)), html.unescape(text)]
    for source in list(readings):
        kept = "".join(character for character in source if character.isprintable() and not character.isspace())
        readings += [kept, kept.replace('"', ""), kept.replace("\\n", "").replace("\\/", "/").replace('"', "")]
    for source in list(readings):
        readings.append(source.encode("utf-8", "replace").decode("unicode_escape", "replace"))
    return " ".join(readings).lower()


@pytest.mark.parametrize("name", ECHOES)
def test_an_echo_is_replaced_and_what_is_around_it_stays(name):
    found = Redactor(KEY)(f"Before it ({ECHOES[name]}), after it")
    assert found.startswith("Before it (")
    assert found.endswith("), after it")
    assert "[key]" in found
    shown = spelled(found)
    assert not [start for start in range(len(KEY) - 7) if KEY[start : start + 8].lower() in shown]
    assert base64.b64encode(BYTES).decode()[4:24] not in found
    assert len(found) <= len("Before it ([key][key][key]), after it") + 12  # what base64 shares with its neighbours


def test_a_text_without_the_key_stays():
    for text in ("", "100% of \\u0041 & &amp; &nope; \\n\n %zz", "sk-proj", json.dumps({"a": ["é", 1]}), "\\", "%4"):
        assert Redactor(KEY)(text) == text
        assert Redactor("")(text) == text


def test_short_and_odd_keys():
    assert Redactor("EMPTY")("an EMPTY key, E M P T Y, not empty of it") == "an [key] key, [key], not [key] of it"
    assert Redactor("a%41b%2Fc%2D")("say a%41b%2Fc%2D or aAb/c-") == "say [key] or [key]"
    assert Redactor('qu"ote\\n-12345')('the qu"ote\\n-12345 key') == "the [key] key"


def test_random_keys_at_random_places():
    draw = random.Random(1)
    letters = string.ascii_letters + string.digits + "-_.~+/=%&;:"
    for _ in range(60):
        key = "".join(draw.choices(letters, k=draw.randint(16, 60)))
        before, after = ("".join(draw.choices("xyz .", k=draw.randint(0, 30))) for _ in range(2))
        found = Redactor(key)(before + key + after)
        assert "[key]" in found
        assert not [start for start in range(len(key) - 7) if key[start : start + 8] in found]
        assert len(found) <= len(before) + len(after) + len("[key]")

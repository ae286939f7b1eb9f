"""Text that a terminal or a page shows as it is: control characters cannot move the cursor, hide words or forge a line."""

import html
import logging
import re
from pathlib import Path

from difftransformer.files import write_text_atomically

logger = logging.getLogger(__name__)

LINES = "\n\t"

# C0 controls and DEL have pictures of their own in Unicode; the others become U+FFFD: C1 controls, half surrogates, and marks
# that reverse the direction of the text after them.
_SHOWN = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_SHOWN |= dict.fromkeys(
    [*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD
)
_SHOWN_LINES = {code: shown for code, shown in _SHOWN.items() if chr(code) not in LINES}


def printable(text: str) -> str:
    """Replace control characters other than line ends and tabs by visible ones, one for one."""
    return text.translate(_SHOWN_LINES)


def printable_line(text: str) -> str:
    """Replace all control characters, line ends and tabs too."""
    return text.translate(_SHOWN)


def write_page_text(path: Path, text: str) -> None:
    """Write an HTML page, and say so if it replaces a page of another title."""
    there = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    before, now = (re.search("<title>(.*?)</title>", one, re.DOTALL) for one in (there, text))
    if before and now and before[1] != now[1]:
        logger.warning("%s: replaces the page %r", path, html.unescape(before[1]))
    write_text_atomically(path, text)

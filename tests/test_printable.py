"""Control characters become visible, and every other character stays."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from difftransformer_lab.printable import printable, printable_line


@given(st.text(st.characters()))
def test_nothing_that_steers_a_terminal_is_left(text):
    shown = printable(text)
    assert len(shown) == len(text)
    for before, after in zip(text, shown, strict=True):
        if unicodedata.category(before) in ("Cc", "Cs") and before not in "\n\t":
            assert unicodedata.category(after) == "So"
        elif unicodedata.bidirectional(before) not in ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"):
            assert after == before
        else:
            assert after == "\ufffd"
    assert shown.encode() == shown.encode("utf-8", "surrogatepass")


def test_pictures():
    assert printable("a\x1b[31m\x07\r\n\tb\x7f") == "a\u241b[31m\u2407\u240d\n\tb\u2421"
    assert printable_line("a\nb\tc") == "a\u240ab\u2409c"

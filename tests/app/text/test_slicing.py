"""Slices: nothing lost, none too short, and a border is found across the windows of its search."""

import re

from hypothesis import given
from hypothesis import strategies as st

from app.text import slicing
from app.text.slicing import BYTE_LEVEL_BORDER, WORD_BORDER, slices


@given(st.text(alphabet="ab ▁.,日。é", max_size=50), st.integers(1, 9), st.integers(2, 6))
def test_slices_join_to_the_text_and_end_at_borders(text, chars, window):
    before = slicing.WINDOW_CHARS
    slicing.WINDOW_CHARS = window
    try:
        for border in (BYTE_LEVEL_BORDER, WORD_BORDER):
            pieces = list(slices(text, border, chars))
            borders = {match.end() for match in border.finditer(text)}
            assert "".join(pieces) == text
            end = 0
            for piece in pieces[:-1]:
                usable = [place for place in borders if place > end + chars]
                end += len(piece)
                assert end == min(usable)
    finally:
        slicing.WINDOW_CHARS = before


def test_without_a_border_the_text_stays_whole():
    assert list(slices("aaaa bbbb", None, 1)) == ["aaaa bbbb"]
    assert list(slices("aaaaaaaaa", BYTE_LEVEL_BORDER, 1)) == ["aaaaaaaaa"]
    assert list(slices("", BYTE_LEVEL_BORDER, 1)) == []


def test_no_border_lies_where_words_may_join():
    """Contractions, combining marks and runs of digits or letters are never cut."""
    for text in ("I'm", "a’s", "e\u0301", "12", "ab", "  a", "क्", "a\u200db"):
        assert re.search(BYTE_LEVEL_BORDER, text) is None, text

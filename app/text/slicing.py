"""Cuts a long text where a tokenizer cuts it anyway, so that the slices' ids joined are the whole text's ids."""

import re
from collections.abc import Iterator

SLICE_CHARS = 1 << 14
"""About 10 ms of tokenizing."""
WINDOW_CHARS = 1 << 16
"""So much is searched for a border at once; between two windows other Python threads get their turn."""

BYTE_LEVEL_BORDER = re.compile(
    "[0-9A-Za-zÀ-ÖØ-öø-ÿА-яぁ-ゖァ-ヺ一-龥가-힣]"
    r"(?=[ \t\n\r!\"#$%&()*+,\-./:;<=>?@\[\\\]^`{|}~、。「」！（），：；？])"
)
"""A letter or digit before a space or a punctuation mark (no apostrophe, no combining mark, nothing that NFC joins).

In every expression of `pretokenizers.py` letters and digits are followed, within a word, by letters, marks, digits or a
contraction only, and nothing looks behind: so a word ends here, and what follows is cut as if the text began here.
"""
WORD_BORDER = re.compile("[^▁](?=▁)")
"""SentencePiece-style, if no token goes on after a word's end: no piece can reach over this border."""


def slices(text: str, border: re.Pattern[str] | None, chars: int = SLICE_CHARS) -> Iterator[str]:
    """Pieces of at least `chars` characters, each up to the next border; one piece if there is no border."""
    start = 0
    while border is not None and len(text) - start > chars:
        end = _next_border(text, border, start + chars)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _next_border(text: str, border: re.Pattern[str], position: int) -> int:
    while position < len(text):
        match = border.search(text, position, position + WINDOW_CHARS)
        if match is not None:
            return match.end()
        position += WINDOW_CHARS - 1  # the last character of a window cannot be seen before its neighbour
    return len(text)

"""Special tokens against a reference that tries every word at every place."""

from hypothesis import given
from hypothesis import strategies as st

from app.text import specials
from app.text.specials import SpecialTokens

words = st.lists(st.text(alphabet="<a|>b.", min_size=1, max_size=5), unique=True, max_size=12)
texts = st.text(alphabet="<a|>b. ", max_size=40)


def reference(ids: dict[str, int], text: str) -> list[str | int]:
    parts: list[str | int] = []
    plain = ""
    position = 0
    while position < len(text):
        found = max((word for word in ids if text.startswith(word, position)), key=len, default="")
        if found:
            parts += [plain, ids[found]] if plain else [ids[found]]
            plain = ""
        else:
            plain += text[position]
        position += len(found) or 1
    return [*parts, plain] if plain else parts


@given(words, texts)
def test_leftmost_and_longest_are_found(words, text):
    ids = {word: n for n, word in enumerate(words)}
    assert list(SpecialTokens(ids).split(text)) == reference(ids, text)


@given(words, texts)
def test_a_token_over_the_border_of_a_window_is_found(words, text):
    ids = {word: n for n, word in enumerate(words)}
    before = specials.WINDOW_CHARS
    specials.WINDOW_CHARS = 3
    try:
        assert list(SpecialTokens(ids).split(text)) == reference(ids, text)
    finally:
        specials.WINDOW_CHARS = before

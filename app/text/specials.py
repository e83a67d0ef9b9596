"""Finds special tokens in a text: the leftmost first, of those that begin together the longest."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

WINDOW_CHARS = 1 << 16
"""So much is searched at once; between two windows other Python threads get their turn."""


class SpecialTokens:
    """Immutable; safe to share between threads."""

    __slots__ = ("_ids", "_longest", "_pattern")

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._longest = max(map(len, self._ids), default=0)
        self._pattern = re.compile(_pattern_of(self._ids)) if self._ids else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order, as ids of special tokens and non-empty strings without any."""
        start = 0
        for match in self._matches(text):
            if match.start() > start:
                yield text[start : match.start()]
            yield self._ids[match[0]]
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        if self._pattern is None:
            return
        position = 0
        while position < len(text):
            border = position + WINDOW_CHARS
            match = self._pattern.search(text, position, border + self._longest)
            if match is None or match.start() >= border:  # one that begins past the border may be cut off
                position = border
                continue
            yield match
            position = match.end()


def _pattern_of(words: Iterable[str]) -> str:
    """One expression that goes through a text once, however many words there are: shared beginnings are shared."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(root)


def _branches(node: dict[str, Any]) -> str:
    """The words below `node`; the key "" marks the end of one."""
    prefix = ""
    while len(node) == 1 and "" not in node:
        character, node = next(iter(node.items()))
        prefix += re.escape(character)
    longer = [re.escape(character) + _branches(child) for character, child in node.items() if character]
    if not longer:
        return prefix
    optional = "?" if "" in node else ""
    return f"{prefix}(?:{'|'.join(longer)}){optional}"

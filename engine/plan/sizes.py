"""Sizes as people write them: `16GiB`, `700MiB`, `2x16GiB,8GiB`."""

import re

from engine.errors import ConfigError

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MOST_DEVICES = 16
_SIZE = re.compile(r"(?:(\d{1,2})x)?(\d+(?:\.\d+)?)(B|KiB|MiB|GiB|TiB)")


def parse_cards(text: str, written: str) -> list[int]:
    """Bytes of each card in a list joined by commas; `2x16GiB` is two. `written` names the flag in a complaint.

    Raises ConfigError.
    """
    sizes: list[int] = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"{written} {text}: '{part}' is no size; write 16GiB, or 2x16GiB")
        count, figure, unit = match.groups()
        size = round(float(figure) * UNITS[unit])
        if not 1 << 20 <= size <= 1 << 50:
            raise ConfigError(f"{written} {text}: '{part}' is no size of a card")
        sizes += [size] * (int(count) if count else 1)
    if not 0 < len(sizes) <= MOST_DEVICES:
        raise ConfigError(f"{written} {text}: {len(sizes)} cards, expected 1 to {MOST_DEVICES}")
    return sizes


def mib_up(size: int) -> int:
    """MiB, rounded up, so that a need never looks smaller than it is."""
    return -(-size >> 20)


def mib_down(size: int) -> int:
    """MiB, rounded down, so that room never looks larger than it is."""
    return size >> 20

"""Which layers go on which stage: stages are contiguous, the first has the embedding, the last the head."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from engine.errors import ConfigError

Room = Callable[[int, int, int], int]
"""(stage, first layer, layer after its last) → bytes left on that stage; more layers never leave more."""
Split = tuple[int, ...]
"""Layers of each stage, at least one each."""


def bounds(split: Split) -> list[tuple[int, int]]:
    """(first layer, layer after the last) of each stage."""
    ends = list(accumulate(split))
    return list(zip([0, *ends], ends, strict=False))


def rooms(split: Split, room: Room) -> list[int]:
    """What is left on each stage."""
    return [room(stage, first, end) for stage, (first, end) in enumerate(bounds(split))]


def can_split(n_layers: int, n_stages: int, room: Room) -> bool:
    """Whether some split leaves no stage with less than nothing."""
    firsts = {0}
    for stage in range(n_stages - 1):
        ends: set[int] = set()
        for first in firsts:
            longest = n_layers - (n_stages - 1 - stage) - first  # each later stage has a layer
            ends.update(range(first + 1, first + _most_layers(room, stage, first, longest) + 1))
        firsts = ends
    return any(room(n_stages - 1, first, n_layers) >= 0 for first in firsts)


def _most_layers(room: Room, stage: int, first: int, longest: int) -> int:
    """Up to `longest` layers from `first` on that leave the stage no less than nothing."""
    return bisect_left(range(1, longest + 1), True, key=lambda layers: room(stage, first, first + layers) < 0)


def balance(n_layers: int, n_stages: int, room: Room) -> Split:
    """The split whose smallest room is largest; among those the one whose second smallest is, and so on.

    Dynamic programming over (stages, layers) placed: what makes the sorted rooms of a beginning larger also makes those
    of the whole larger, whatever follows. Ties put more layers on later stages.
    """
    best: dict[int, tuple[list[int], Split]] = {0: ([], ())}
    for stage in range(n_stages):
        behind = n_stages - 1 - stage
        ends = range(stage + 1, n_layers - behind + 1) if behind else [n_layers]
        best = {
            end: max(
                (
                    (sorted([*left, room(stage, first, end)]), (*split, end - first))
                    for first, (left, split) in best.items()
                    if first < end
                ),
                key=lambda placed: placed[0],
            )
            for end in ends
        }
    return best[n_layers][1]


def parse_split(text: str) -> Split | None:
    """`auto` is None; `23,25` says how many layers each stage has, `23` leaves the rest to the last of two.

    Raises ConfigError.
    """
    if text == "auto":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10_000 for part in parts):
        raise ConfigError(f"--layer-split {text}: expected auto, or the layers of each stage as in 23,25")
    return tuple(int(part) for part in parts)


def whole_split(given: Sequence[int], n_layers: int, n_stages: int) -> Split:
    """A split as the user gave it, completed and checked. Raises ConfigError."""
    written = "--layer-split " + ",".join(map(str, given))
    if len(given) == n_stages - 1 and sum(given) < n_layers:
        return (*given, n_layers - sum(given))
    if len(given) != n_stages:
        raise ConfigError(f"{written}: gives {len(given)} stages, there are {n_stages}")
    if sum(given) != n_layers:
        raise ConfigError(f"{written}: makes {sum(given)} layers, the model has {n_layers}")
    return tuple(given)

"""What is asked of an engine when the one before it did not load."""

from collections.abc import Sequence

import msgspec

from engine.config import EngineConfig
from engine.messages import Ready

OPTIONAL_PARTS = ("shadow", "graph buckets")
"""What an engine can do without, in the order in which it is left out; names of `EngineConfig.without`."""


def fallbacks(asked: EngineConfig, last: Ready | None, without: Sequence[str] = ()) -> list[EngineConfig]:
    """What to try, one after another: what was asked for, planned anew; the last plan that was good; then with less.

    The last good plan is split, context and KV type of the last engine. With less, the context is what was asked for
    again: if nobody asked for one it may come out smaller, and whoever loads checks that it is enough. None has the
    parts in `without`.
    """
    asked = msgspec.structs.replace(asked, without=with_dropped(asked.without, without))
    tries = [asked]
    split: tuple[int, ...] | None = asked.layer_split
    if last is not None:
        split = tuple(last.layer_split) or split
        tries.append(
            msgspec.structs.replace(asked, layer_split=split, max_context=last.max_context, kv_dtype=last.kv_dtype)
        )
    for count in range(1, len(OPTIONAL_PARTS) + 1):
        without = with_dropped(asked.without, OPTIONAL_PARTS[:count])
        tries.append(msgspec.structs.replace(asked, layer_split=split, without=without))
    return tries


def with_dropped(without: Sequence[str], parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for part in OPTIONAL_PARTS if part in without or part in parts)

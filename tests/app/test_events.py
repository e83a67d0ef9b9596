"""Events: their numbers, their memory over restarts, who waits for them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from app.events import KEPT, Events, rfc3339
from app.journal import Journal


def test_the_shape_of_an_event() -> None:
    event = Events(clock=lambda: 1.5).record(
        "trim", "for room", device=1, trend="growth", state="trim", rung="pools", returned_bytes=4
    )
    assert msgspec.json.decode(msgspec.json.encode(event)) == {
        "seq": 1,
        "time": "1970-01-01T00:00:01.500Z",
        "device": 1,
        "kind": "trim",
        "class": "growth",
        "state": "trim",
        "rung": "pools",
        "reason": "for room",
        "returned_bytes": 4,
    }
    bare = msgspec.json.decode(msgspec.json.encode(Events().record("service", "starts")))
    assert {name for name, value in bare.items() if value is None} == {
        "device", "class", "state", "rung", "returned_bytes"
    }  # fmt: skip


def test_numbers_go_on_over_restarts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    first = Events(journal)
    for number in range(3):
        first.record("state", f"number {number}")
    journal.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":4,"ti')
    journal = Journal(tmp_path / "events.jsonl")
    second = Events(journal)
    assert [event.reason for event in second.since()] == ["number 0", "number 1", "number 2"]
    assert second.record("state", "number 3").seq == 4
    journal.close()
    third = Events(Journal(tmp_path / "events.jsonl"))
    assert [event.seq for event in third.since()] == [1, 2, 3, 4]


def test_memory_is_bounded_and_numbers_are_not() -> None:
    events = Events()
    for _ in range(KEPT + 5):
        events.record("state", "again")
    assert len(events.since()) == KEPT
    assert events.last_seq == KEPT + 5
    assert [event.seq for event in events.since(KEPT + 3)] == [KEPT + 4, KEPT + 5]


async def test_everybody_who_waits_hears_of_an_event() -> None:
    events = Events()
    waits = [asyncio.create_task(events.news(60)) for _ in range(2)]
    await asyncio.sleep(0)
    events.record("mode", "on")
    assert await asyncio.gather(*waits) == [True, True]
    assert not await events.news(0.001)


@pytest.mark.parametrize(("unix", "text"), [(0, "1970-01-01T00:00:00.000Z"), (1.9996, "1970-01-01T00:00:01.999Z")])
def test_rfc3339(unix: float, text: str) -> None:
    assert rfc3339(unix) == text

"""What the watchdog decided and did, and why: the latest events in memory, all of them in a journal.

`seq` rises by one from event to event, also over restarts. Everything here belongs to the event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import msgspec

from app.journal import Journal

log = logging.getLogger(__name__)

KEPT = 1000
FILE_NAME = "events.jsonl"

Kind = Literal["ready", "state", "decision", "dry_run", "trim", "regrow", "hold", "reload", "mode", "service"]
"""What an event tells:

ready     an engine is ready: baseline and floors of a device
state     a device's state or class has changed, and nothing is done about it
decision  the watchdog does something, or has set a reload
dry_run   what it would do if it were not on dry run
trim      a rung was taken, by the watchdog or an operator, and what came of it
regrow    elastic memory was taken again
hold      new requests wait for memory, or no longer
reload    a replacement of the engine begins or is over
mode      the watchdog's mode was set
service   the service starts, drains
"""


class Event(msgspec.Struct, frozen=True):
    """One event, in the shape that /admin/events and the journal have. Bytes; null is unknown or does not apply."""

    seq: int
    time: str
    """RFC 3339, UTC."""
    device: int | None
    kind: Kind
    trend: str | None = msgspec.field(name="class")
    state: str | None
    rung: str | None
    reason: str
    returned_bytes: int | None


class Events:
    def __init__(self, journal: Journal | None = None, clock: Callable[[], float] = time.time) -> None:
        """Goes on after the journal's last event. Without a journal nothing outlives the service."""
        self._journal = journal
        self._clock = clock
        self._kept: deque[Event] = deque(_read(journal) if journal else (), maxlen=KEPT)
        self._news = asyncio.Event()
        self.ended = False
        """Nothing will happen any more: whoever waits for it may go."""

    @property
    def last_seq(self) -> int:
        return self._kept[-1].seq if self._kept else 0

    def record(
        self,
        kind: Kind,
        reason: str,
        *,
        device: int | None = None,
        trend: str | None = None,
        state: str | None = None,
        rung: str | None = None,
        returned_bytes: int | None = None,
    ) -> Event:
        event = Event(
            seq=self.last_seq + 1,
            time=rfc3339(self._clock()),
            device=device,
            kind=kind,
            trend=trend,
            state=state,
            rung=rung,
            reason=reason,
            returned_bytes=returned_bytes,
        )
        self._kept.append(event)
        if self._journal is not None:
            self._journal.append(msgspec.json.encode(event))
        self._news.set()
        self._news = asyncio.Event()
        return event

    def end(self) -> None:
        self.ended = True
        self._news.set()

    def close(self) -> None:
        """Write what is not in the journal yet. May block."""
        if self._journal is not None:
            self._journal.close()

    def since(self, seq: int = 0) -> list[Event]:
        """Those in memory after `seq`, oldest first."""
        return [event for event in self._kept if event.seq > seq]

    async def news(self, timeout_s: float) -> bool:
        """Wait for the next event; False if none came within `timeout_s`."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def rfc3339(unix: float) -> str:
    """UTC to the millisecond, as in 2026-12-01T08:30:00.125Z."""
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _read(journal: Journal) -> list[Event]:
    """What an earlier run has written, without what it could not finish writing."""
    events: list[Event] = []
    for line in journal.read(KEPT):
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError as error:
            log.warning("a line of the earlier events is left out: %s", error)
            continue
        if not events or event.seq > events[-1].seq:
            events.append(event)
    return events

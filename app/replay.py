"""Requests under which an engine was lost: until each has gone on in another, and which of them may be the cause.

A crash gives a strike to every choice that was at the engine; a token of its own since it came there clears what it
had. With two strikes it is a suspect. Suspects return in halves, those with most strikes first, while all others wait:
a half under which the engine dies again is halved again, one that goes on is cleared and the next half joins it. So
a poisonous request is alone in the engine after log2(n) more crashes, and only one that has been alone is refused.
"""

from collections.abc import Callable, Collection, Iterable

from app.record import Record

SUSPECT_STRIKES = 2


class Replay:
    def __init__(self) -> None:
        self._returning: set[Record] = set()
        """Interrupted, not ended, and without a token since."""
        self._suspects: set[Record] = set()
        """Those of them that have crashed twice: never in the engine with anything but other suspects."""
        self._when_over: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        """Whether any request has yet to go on."""
        return bool(self._returning)

    @property
    def suspects(self) -> Collection[Record]:
        return self._suspects

    def interrupt(self, at_engine: Collection[Record], *, crashed: bool) -> Record | None:
        """The engine that had these is gone. The one that is to blame, once that is certain."""
        self._when_over = None
        live = [record for record in at_engine if record.outcome is None]
        for record in live:
            record.strikes = (0 if record.went_on else record.strikes) + crashed
            record.resumed += 1
        self._returning.update(live)
        self._suspects = {record for record in self._returning if record.strikes >= SUSPECT_STRIKES}
        was_alone = len(at_engine) == 1 and len(live) == 1
        return live[0] if was_alone and live[0].strikes > SUSPECT_STRIKES else None

    def go_on(self, records: Iterable[Record]) -> None:
        """These have got a token, or have ended."""
        gone = self._returning.intersection(records)
        self._returning -= gone
        self._suspects -= gone
        self._tell()

    def tell_when_over(self, told: Callable[[], None]) -> None:
        """Call `told` once all have gone on, unless the next interruption comes before; at once if all have."""
        self._when_over = told
        self._tell()

    def next_suspects(self, at_engine: Collection[Record]) -> list[Record]:
        """Whom to try now: none while some are being tried, else half of those with the most strikes."""
        if not self._suspects.isdisjoint(at_engine):
            return []
        most = max(record.strikes for record in self._suspects)
        worst = sorted((r for r in self._suspects if r.strikes == most), key=lambda record: record.sequence)
        return worst[: (len(worst) + 1) // 2]

    def _tell(self) -> None:
        if not self._returning and self._when_over is not None:
            told, self._when_over = self._when_over, None
            told()

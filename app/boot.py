"""What one start of the service tells the next: starts that came to nothing, parts left out, reloads of late.

A service that its orchestrator starts again and again must not try the same thing for ever. After three starts in
which no engine stayed up the next one leaves out an optional part; when none is left to leave out it is a crash loop,
and the service says so and does not start. The memory is short: an hour for starts and reloads, and other settings,
another build of ours or a reboot of the machine begin anew.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from app.fallback import OPTIONAL_PARTS, with_dropped
from engine.config import EngineConfig
from engine.errors import EngineError

log = logging.getLogger(__name__)

BOOT_FILE = "boot.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HOUR_S = 3600.0
STARTS = 3
"""So many starts with the same parts may come to nothing within an hour."""


class CrashLoop(EngineError):
    """Every start of late has come to nothing, with and without the optional parts."""


class Attempt(msgspec.Struct):
    """One start that has not come to anything yet, or never will."""

    at: float
    without: list[str]
    end: str = "ended without a word: killed, or the machine went down"


class _Memory(msgspec.Struct):
    """The file. Times are Unix seconds."""

    fingerprint: str
    dropped: list[str] = []
    attempts: list[Attempt] = []
    reloads: list[float] = []


class Boot:
    """The memory of one service. Without a `folder` nothing outlives it."""

    def __init__(
        self, folder: Path | None = None, fingerprint: str = "", reloads_per_hour: int = 2, now: float | None = None
    ) -> None:
        self._path = None if folder is None else folder / BOOT_FILE
        self._reloads_per_hour = reloads_per_hour
        self._attempt: Attempt | None = None
        now = time.time() if now is None else now
        memory = self._read()
        if memory is None or memory.fingerprint != fingerprint:
            memory = _Memory(fingerprint, reloads=[] if memory is None else memory.reloads)
        memory.attempts = [attempt for attempt in memory.attempts if 0 <= now - attempt.at < HOUR_S]
        self._memory = memory

    @property
    def without(self) -> tuple[str, ...]:
        """Optional parts that the engine is started without."""
        return tuple(self._memory.dropped)

    def begin(self, now: float | None = None) -> None:
        """A start begins; until `proved` or `ended` it has come to nothing. Raises CrashLoop if it is one too many."""
        now = time.time() if now is None else now
        memory = self._memory
        alike = [attempt for attempt in memory.attempts if attempt.without == memory.dropped]
        if len(alike) >= STARTS:
            left = [part for part in OPTIONAL_PARTS if part not in memory.dropped]
            if not left:
                raise CrashLoop(self._table())
            log.error("%d starts came to nothing: this one is without %s", len(alike), left[0])
            memory.dropped = list(with_dropped(memory.dropped, left[:1]))
        self._attempt = Attempt(now, memory.dropped)
        memory.attempts.append(self._attempt)
        self._write()

    def failed(self, reason: str) -> None:
        """The start has come to nothing, and this is why."""
        if self._attempt is not None:
            self._attempt.end = reason
            self._write()

    def ended(self) -> None:
        """The service was told to end, or what it was given is wrong: that says nothing about the engine."""
        if self._attempt is not None:
            self._memory.attempts.remove(self._attempt)
            self._attempt = None
            self._write()

    def proved(self) -> None:
        """An engine of this start has served somebody, or has lived for long."""
        if self._attempt is not None:
            self._attempt = None
            self._memory.attempts.clear()
            self._write()

    def left_out(self, without: Sequence[str]) -> None:
        """The engine that serves now has come up without these."""
        if list(without) != self._memory.dropped:
            self._memory.dropped = list(without)
            self._write()

    def reloaded(self, now: float | None = None) -> None:
        """An automatic reload begins."""
        now = time.time() if now is None else now
        self._memory.reloads = [*self.reloads(now), now]
        self._write()

    def reloads(self, now: float | None = None) -> list[float]:
        """When the automatic reloads of the last hour began, also those under an earlier service."""
        now = time.time() if now is None else now
        return [at for at in self._memory.reloads if 0 <= now - at < HOUR_S]

    def budget_left(self, now: float | None = None) -> int:
        """How many automatic reloads may still begin within this hour."""
        return max(0, self._reloads_per_hour - len(self.reloads(now)))

    def _table(self) -> str:
        lines = [f"crash loop: no engine has stayed up in {len(self._memory.attempts)} starts within the last hour"]
        lines.append(f"{'started':<21}{'left out':<24}how it ended")
        for attempt in self._memory.attempts:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.at))
            lines.append(f"{at:<21}{', '.join(attempt.without) or 'nothing':<24}{attempt.end}")
        lines.append(f"mend what is said above; other settings, or removing {self._path}, let it try again at once")
        return "\n".join(lines)

    def _read(self) -> _Memory | None:
        if self._path is None or not self._path.exists():
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Memory)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read (%s): it is begun anew", self._path, error)
            return None

    def _write(self) -> None:
        """Whole or not at all. A state folder that cannot be written to does not stop the service."""
        if self._path is None:
            return
        draft = self._path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(self._memory))
            draft.rename(self._path)
        except OSError as error:
            log.error("%s: %s: the next start will not know of this one", self._path, error.strerror)


def fingerprint(config: EngineConfig, build: str, boot_id: Path = BOOT_ID) -> str:
    """Of everything that makes another try worth its while: settings, our build, the machine since it was started."""
    machine = boot_id.read_bytes() if boot_id.exists() else b""
    parts = (msgspec.msgpack.encode(config), build.encode(), machine)
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()

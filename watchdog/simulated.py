"""Cards that do not exist, as the watchdog sees them: a reader of the file that engine/memory/simulated_gpus.py writes.

The format is described there, once. Here it is read without a lock and without the engine. A row counts while its
process lives and `row_delay` longer; whoever finds the process dead first stores the time in the row, so that every
reader lets it vanish at the same moment. A reader that may not write goes by its own first sight.
"""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from watchdog.snapshot import MIB, Reading
from watchdog.source import Card, Holders, SourceError

MAGIC = int.from_bytes(b"ULLSIM01", "little")
WORD = 8
DEVICES_AT, DEVICE_WORDS, MOST_DEVICES = 64 // WORD, 2, 16
ROWS_AT, ROW_WORDS, MOST_ROWS = 320 // WORD, 8, 512
SIZE = (ROWS_AT + MOST_ROWS * ROW_WORDS) * WORD
PID, STARTED, DEVICE, HELD, DIED, OWNER = range(6)
"""Places of the fields in a row, in words of 8 bytes; the owner's name takes the rest of it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The fault `nvml=lost:10s[@1]`: nothing of `device` (None: of all) can be read for `seconds` from `armed` on."""

    seconds: float
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One row that counts."""

    pid: int
    device: int
    owner: str
    held: int


class SimulatedSource:
    """A Source. It is always right about who holds what, unlike NVML."""

    def __init__(self, path: Path, loss: Loss | None = None) -> None:
        """Raises SourceError when there are no simulated cards at this path."""
        self._map, self._writes = _mapped(path)
        self._words = memoryview(self._map).cast("Q")
        self._first_seen_dead: dict[tuple[int, int], int] = {}
        if self._words[0] != MAGIC:
            self.close()
            raise SourceError(f"{path}: holds no simulated cards")
        self.cards = tuple(
            Card(f"SIMULATED-{device}", f"simulated {self._card(device)[0] // MIB} MiB")
            for device in range(self._words[1])
        )
        self._loss = loss
        self._lost_until: float | None = None

    def arm(self, at: float) -> None:
        """The fault begins now, if there is one. Called once the cards have been read: it is a loss, not an absence."""
        if self._loss is not None and self._lost_until is None:
            self._lost_until = at + self._loss.seconds

    def read(self, device: int, at: float) -> Reading:
        if self._is_lost(device, at):
            raise SourceError("simulated: NVML is lost")
        total, reserved = self._card(device)
        if device >= self._words[1] or not 0 <= reserved <= total or total == 0:
            raise SourceError(f"simulated: card {device} is gone")
        held = min(total - reserved, sum(row.held for row in self.rows(device)))
        return Reading(at, total, free=total - reserved - held, used=held, reserved=reserved, source="simulated")

    def holders(self, device: int) -> Holders:
        held: dict[int, int | None] = {}
        for row in self.rows(device):
            held[row.pid] = (held.get(row.pid) or 0) + row.held
        return held

    def rows(self, device: int) -> list[Row]:
        """The rows of a device that count, of all processes."""
        return [
            Row(words[PID], device, _text(words), words[HELD])
            for at, words in self._taken()
            if words[DEVICE] == device and self._counts(at, words)
        ]

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def _is_lost(self, device: int, at: float) -> bool:
        if self._loss is None or self._lost_until is None or at >= self._lost_until:
            return False
        return self._loss.device in (None, device)

    def _card(self, device: int) -> tuple[int, int]:
        at = DEVICES_AT + device * DEVICE_WORDS
        return self._words[at], self._words[at + 1]

    def _taken(self) -> Iterator[tuple[int, list[int]]]:
        """(place in the file, words) of each row that is not empty."""
        pids = self._words[ROWS_AT::ROW_WORDS].tolist()
        for row, pid in enumerate(pids):
            if pid:
                at = ROWS_AT + row * ROW_WORDS
                yield at, self._words[at : at + ROW_WORDS].tolist()

    def _counts(self, at: int, words: list[int]) -> bool:
        process = (words[PID], words[STARTED])
        if _started(words[PID]) == words[STARTED]:
            return True
        died, now = words[DIED], time.monotonic_ns()
        if died == 0:
            died = self._first_seen_dead.setdefault(process, now)
            if self._writes and (self._words[at + PID], self._words[at + STARTED]) == process:
                self._words[at + DIED] = died
        return now - died < self._words[2]


def _mapped(path: Path) -> tuple[mmap.mmap, bool]:
    """(the file, whether it may be written)."""
    for flags, access in ((os.O_RDWR, mmap.ACCESS_WRITE), (os.O_RDONLY, mmap.ACCESS_READ)):
        try:
            file = os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                continue
            raise SourceError(f"{path}: {error.strerror}") from error
        try:
            if os.fstat(file).st_size != SIZE:
                raise SourceError(f"{path}: holds no simulated cards")
            return mmap.mmap(file, SIZE, access=access), access == mmap.ACCESS_WRITE
        finally:
            os.close(file)
    raise SourceError(f"{path}: may not be read")


def _started(pid: int) -> int | None:
    """When a living process began, in clock ticks since boot; None for one that is dead, reaped or not."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        stat = os.read(file, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(file)
    fields = stat.rpartition(b")")[2].split()  # the command before it may hold anything
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _text(words: list[int]) -> str:
    name = b"".join(word.to_bytes(WORD, "little") for word in words[OWNER:])
    return name.rstrip(b"\0").decode("ascii", "replace")

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

import numpy as np
import numpy.typing as npt

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
        words, self._writes = _mapped(path)
        self._header = words[:DEVICES_AT]
        self._devices = words[DEVICES_AT:ROWS_AT].reshape(MOST_DEVICES, DEVICE_WORDS)
        self._rows = words[ROWS_AT:].reshape(MOST_ROWS, ROW_WORDS)
        self._first_seen_dead: dict[tuple[int, int], int] = {}
        if self._header[0] != MAGIC:
            raise SourceError(f"{path}: holds no simulated cards")
        self.cards = tuple(
            Card(f"SIMULATED-{device}", f"simulated {self._card(device)[0] // MIB} MiB")
            for device in range(int(self._header[1]))
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
        if device >= self._header[1] or not 0 <= reserved <= total or total == 0:
            raise SourceError(f"simulated: card {device} is gone")
        held = min(total - reserved, sum(words[HELD] for words in self._counting(device)))
        return Reading(at, total, free=total - reserved - held, used=held, reserved=reserved, source="simulated")

    def holders(self, device: int) -> Holders:
        held: dict[int, int | None] = {}
        for words in self._counting(device):
            held[words[PID]] = (held.get(words[PID]) or 0) + words[HELD]
        return held

    def rows(self, device: int) -> list[Row]:
        """The rows of a device that count, of all processes."""
        return [Row(words[PID], device, _text(words), words[HELD]) for words in self._counting(device)]

    def settle(self) -> None:
        """Wait until the memory of the dead is gone whose death nobody has noted before: who looks only once cannot
        tell for how long they have been dead."""
        for device in range(len(self.cards)):
            for _ in self._counting(device):
                pass
        if self._first_seen_dead:
            time.sleep(int(self._header[2]) / 1e9)

    def close(self) -> None:
        """The mapping goes with the last reference to it."""

    def _is_lost(self, device: int, at: float) -> bool:
        if self._loss is None or self._lost_until is None or at >= self._lost_until:
            return False
        return self._loss.device in (None, device)

    def _card(self, device: int) -> tuple[int, int]:
        total, reserved = self._devices[device].tolist()
        return total, reserved

    def _counting(self, device: int) -> Iterator[list[int]]:
        """The words of each row of a device that counts."""
        rows = self._rows
        alive: dict[tuple[int, int], bool] = {}
        taken = np.flatnonzero((rows[:, PID] != 0) & (rows[:, DEVICE] == device))
        for row, words in zip(taken, rows[taken].tolist(), strict=True):
            process = (words[PID], words[STARTED])
            if process not in alive:
                alive[process] = _started(process[0]) == process[1]
            if alive[process] or self._still_counts(rows[row], words):
                yield words

    def _still_counts(self, row: npt.NDArray[np.uint64], words: list[int]) -> bool:
        """Whether the row of a dead process does; found dead for the first time, it is marked."""
        process = (words[PID], words[STARTED])
        died, now = words[DIED], time.monotonic_ns()
        if died == 0:
            died = self._first_seen_dead.setdefault(process, now)
            if self._writes and (row[PID], row[STARTED]) == process:
                row[DIED] = died
        return now - died < int(self._header[2])


def _mapped(path: Path) -> tuple[npt.NDArray[np.uint64], bool]:
    """(the file as words, whether they may be written)."""
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
            return np.frombuffer(mmap.mmap(file, SIZE, access=access), "<u8"), access == mmap.ACCESS_WRITE
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

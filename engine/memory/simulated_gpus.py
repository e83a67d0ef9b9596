"""Cards that do not exist: a memory-mapped file that says who holds how much of which, and refuses what does not fit.

Any number of processes hold rows in it, under their own process id; nobody has to tidy up after one that was killed.
Writers take turns by flock(2), which the kernel drops with its holder. Readers take no lock. The file is of one size,
for ever, and is never replaced, so a mapping of it stays right.

Format. Little-endian; every number is unsigned, of 8 bytes, and at a multiple of 8, so that each is read whole:

    0     header   magic `ULLSIM01` (bytes), devices (number), row_delay (nanoseconds)      64 bytes, rest zero
    64    devices  total, reserved (bytes)                                                  16 entries of 16 bytes
    320   rows     pid, started, device, size (bytes), died, owner (24 bytes, ASCII, NUL)   512 rows of 64 bytes

A row with pid 0 is empty. `started` is the process's start time in clock ticks since boot (field 22 of
/proc/PID/stat): with it a number that was given to a new process is not taken for the old one. A process is alive if
that field agrees and its state is neither Z nor X. The row of a dead one still counts until `row_delay` has passed
since `died`, the CLOCK_MONOTONIC nanoseconds at which somebody first found it dead; whoever finds it so and `died` 0,
reader or writer, stores the time there. (A reader that may not write goes by its own first sight.) Then it counts no
more. Free memory of a device = total - reserved - sizes of the rows that count, never below 0.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError, OutOfMemory

FILE_NAME = "simulated-gpus"
MAGIC = b"ULLSIM01"
MOST_DEVICES = 16
MOST_ROWS = 512
HEADER = np.dtype({"names": ["magic", "devices", "row_delay"], "formats": ["S8", "<u8", "<u8"], "itemsize": 64})
DEVICE = np.dtype([("total", "<u8"), ("reserved", "<u8")])
ROW = np.dtype(
    [("pid", "<u8"), ("started", "<u8"), ("device", "<u8"), ("size", "<u8"), ("died", "<u8"), ("owner", "S24")]
)
DEVICES_AT = HEADER.itemsize
ROWS_AT = DEVICES_AT + MOST_DEVICES * DEVICE.itemsize
SIZE = ROWS_AT + MOST_ROWS * ROW.itemsize


@dataclass(frozen=True, slots=True)
class SimulatedCard:
    """Bytes of one card; `reserved` is what its driver keeps for itself."""

    total: int
    reserved: int


@dataclass(frozen=True, slots=True)
class HeldRow:
    """One row that counts."""

    pid: int
    device: int
    owner: str
    size: int


class SimulatedGpus:
    """The file as one process writes it: its rows carry this process's id. It is a Card for the ledger."""

    def __init__(self, file: int) -> None:
        """Takes over an open descriptor of a file in the format above. Use `create` or `open`."""
        self._file = file
        self._map = mmap.mmap(file, SIZE)
        self._header: npt.NDArray[Any] = np.frombuffer(self._map, HEADER, 1)
        self._devices: npt.NDArray[Any] = np.frombuffer(self._map, DEVICE, MOST_DEVICES, DEVICES_AT)
        self._rows: npt.NDArray[Any] = np.frombuffer(self._map, ROW, MOST_ROWS, ROWS_AT)
        self._pid = os.getpid()
        self._started = started(self._pid)

    @classmethod
    def create(cls, path: Path, cards: Sequence[SimulatedCard], row_delay_s: float = 0.0) -> Self:
        """Make the cards, or set those of an earlier run anew; rows of processes that still live stay.

        Raises ConfigError for a path that cannot be written or is some other file.
        """
        if not 0 < len(cards) <= MOST_DEVICES:
            raise ConfigError(f"--simulate-gpus: {len(cards)} cards, expected 1 to {MOST_DEVICES}")
        gpus = cls(_open(path, os.O_CREAT))
        if bytes(gpus._header["magic"][0]) not in (MAGIC, b""):
            gpus.close()
            raise ConfigError(f"{path}: is some other file")
        with gpus._turn():
            gpus._header["devices"] = len(cards)
            gpus._header["row_delay"] = round(row_delay_s * 1e9)
            for entry, card in zip(gpus._devices, cards, strict=False):
                entry["total"], entry["reserved"] = card.total, card.reserved
            gpus._header["magic"] = MAGIC
        return gpus

    @classmethod
    def open(cls, path: Path) -> Self:
        """The cards that another process made. Raises ConfigError when there are none at this path."""
        gpus = cls(_open(path, 0))
        if bytes(gpus._header["magic"][0]) != MAGIC:
            gpus.close()
            raise ConfigError(f"{path}: holds no simulated cards")
        return gpus

    @property
    def cards(self) -> list[SimulatedCard]:
        entries = self._devices[: int(self._header["devices"][0])]
        return [SimulatedCard(int(entry["total"]), int(entry["reserved"])) for entry in entries]

    def free(self, device: int) -> int:
        """Bytes that an allocation could take now."""
        entry, rows = self._devices[device], self._rows
        held = rows["size"][self._counting() & (rows["device"] == device)].sum()
        return max(0, int(entry["total"]) - int(entry["reserved"]) - int(held))

    def rows(self) -> list[HeldRow]:
        """The rows that count, of all processes."""
        return [
            HeldRow(int(row["pid"]), int(row["device"]), row["owner"].decode(), int(row["size"]))
            for row in self._rows[self._counting()]
        ]

    def resize(self, device: int, owner: str, size: int) -> None:
        """This process holds `size` bytes as `owner` from now on. Raises OutOfMemory, and changes nothing then."""
        with self._turn():
            row = self._own_row(device, owner)
            held, free = int(self._rows["size"][row]), self.free(device)
            if size - held > free:
                raise OutOfMemory(device, owner, size - held, free)
            self._rows["size"][row] = size

    def take(self, device: int, owner: str, size: int) -> int:
        """Hold `size` bytes as `owner`, or as much of it as is free; bytes held then."""
        with self._turn():
            row = self._own_row(device, owner)
            size = min(size, int(self._rows["size"][row]) + self.free(device))
            self._rows["size"][row] = size
        return size

    def close(self) -> None:
        """Let go of the file. This process's rows count for as long as it lives."""
        os.close(self._file)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _own_row(self, device: int, owner: str) -> int:
        rows = self._rows
        mine = (rows["pid"] == self._pid) & (rows["started"] == self._started)
        found = np.flatnonzero(mine & (rows["device"] == device) & (rows["owner"] == owner.encode()))
        return int(found[0]) if len(found) else self._new_row(device, owner)

    def _new_row(self, device: int, owner: str) -> int:
        self._rows["pid"][~self._counting()] = 0
        empty = np.flatnonzero(self._rows["pid"] == 0)
        if not len(empty):
            raise OutOfMemory(device, owner, 0, self.free(device))
        row = int(empty[0])
        fields = {"size": 0, "died": 0, "device": device, "owner": owner.encode(), "started": self._started}
        for name, value in fields.items():
            self._rows[name][row] = value
        self._rows["pid"][row] = self._pid  # last: from here on readers see it
        return row

    def _counting(self) -> npt.NDArray[np.bool_]:
        """For each row, whether it counts; those whose process is found dead for the first time are marked."""
        rows, now = self._rows, time.monotonic_ns()
        counting: npt.NDArray[np.bool_] = rows["pid"] != 0
        for pid, start in set(zip(rows["pid"][counting].tolist(), rows["started"][counting].tolist(), strict=True)):
            if (pid, start) == (self._pid, self._started) or started(pid) == start:
                continue
            of_it = counting & (rows["pid"] == pid) & (rows["started"] == start)
            rows["died"][of_it & (rows["died"] == 0)] = now
            counting[of_it & (now - rows["died"] >= self._header["row_delay"][0])] = False
        return counting


def started(pid: int) -> int | None:
    """When a living process began, in clock ticks since boot; None for one that is dead, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()  # the command before it may hold anything
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _open(path: Path, flags: int) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    size = os.fstat(file).st_size
    if flags & os.O_CREAT and size == 0:
        os.ftruncate(file, SIZE)
    elif size != SIZE:
        os.close(file)
        raise ConfigError(f"{path}: holds no simulated cards")
    return file

"""Lines of JSON in a file of the state folder, begun anew once it is large; the one before it is kept.

A thread of its own writes, so that a slow disk holds nobody up. What it cannot write is lost to the file and to nothing
else: whoever keeps a journal has the latest lines in memory too.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

LARGE_BYTES = 8 << 20
MOST_WAITING = 10_000
"""Lines that may wait for the disk; beyond them lines are dropped."""


class Journal:
    def __init__(self, path: Path, large_bytes: int = LARGE_BYTES) -> None:
        """The file at `path`, made with the first line and readable by its owner alone."""
        self._path = path
        self._large_bytes = large_bytes
        self._writer = ThreadPoolExecutor(1, f"journal {path.name}")
        self._waiting = 0
        self._failing = False
        self._ends_whole = False
        """The file ends with a whole line. Whoever wrote to it last may have been killed in the middle of one."""

    def read(self, most: int) -> list[bytes]:
        """The last lines of an earlier run, oldest first. The last one may have been cut off by its death."""
        lines: list[bytes] = []
        for path in (self._path, older_than(self._path)):
            if len(lines) < most and path.exists():
                try:
                    lines[:0] = path.read_bytes().splitlines()
                except OSError as error:
                    log.warning("%s: %s: what it says is left out", path, error.strerror)
        return [line for line in lines[-most:] if line]

    def append(self, line: bytes) -> None:
        """Write one line, soon. Never blocks, never raises."""
        if self._waiting >= MOST_WAITING:
            self._complain("the disk is too slow")
            return
        self._waiting += 1
        self._writer.submit(self._write, line)

    def close(self) -> None:
        """Write what waits."""
        self._writer.shutdown()

    def _write(self, line: bytes) -> None:
        try:
            if self._path.exists() and self._path.stat().st_size >= self._large_bytes:
                self._path.rename(older_than(self._path))
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                before = b"" if self._ends_whole or _ends_with_newline(file) else b"\n"
                self._ends_whole = False
                os.write(file, before + line + b"\n")
                self._ends_whole = True
            finally:
                os.close(file)
            self._failing = False
        except OSError as error:
            self._complain(error.strerror or "cannot be written")
        finally:
            self._waiting -= 1

    def _complain(self, why: str) -> None:
        if not self._failing:
            self._failing = True
            log.error("%s: %s: some lines are missing from it", self._path, why)


def older_than(path: Path) -> Path:
    """The file before a journal's present one: `events.1.jsonl` for `events.jsonl`."""
    return path.with_suffix(f".1{path.suffix}")


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"

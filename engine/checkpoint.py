"""KV that outlives its engine: pieces of state in memory of the service's, each under its key and with a checksum.

Format. Everything is at its own offset, native byte order (both engines are of one build, on one machine):

    0      trailer   magic `ULLCARRY`, offset and length of the index, its CRC-32     32 bytes, written last
    4096   pieces    of all kinds, one after another
           index     msgpack of `Index`, after the last piece

Until the trailer is there nothing is, so an engine that dies while it writes leaves nothing behind. A piece is used
only if model, type, shape and arithmetic are the same and its checksum is right.
"""

import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from engine.kv_cache.pieces import Bytes, Pieces
from engine.kv_cache.state import StateKind
from engine.messages import Checkpointed
from engine.sequence import Sequence

MAGIC = b"ULLCARRY"
TRAILER = struct.Struct("<8sQQQ")
PIECES_AT = 4096
BATCH_BYTES = 16 << 20
CACHE_BYTES = 128 << 20
"""Of what is only cached no more is carried than this, or than live sequences have: they all wait while it is copied,
and a cache that has grown for days is many times what they have."""


class Section(msgspec.Struct, frozen=True):
    """The pieces of one kind: `keys` and `checksums` one each, in the order in which they lie."""

    shape: str
    piece_bytes: int
    keys: list[bytes]
    checksums: list[int]


class Index(msgspec.Struct, frozen=True):
    """`fingerprint` names model file, KV type and arithmetic."""

    fingerprint: str
    sections: list[Section]


@dataclass(frozen=True, slots=True)
class Restored:
    """Pieces that were taken over, and those that were there and could not be."""

    pieces: int = 0
    skipped: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Carrier:
    """Writes the state of one engine to `descriptor`, or takes over what another wrote there."""

    def __init__(self, descriptor: int, fingerprint: str, kinds: list[tuple[StateKind, Pieces]]) -> None:
        self._descriptor = descriptor
        self._fingerprint = fingerprint
        self._kinds = kinds

    def save(self, live: list[Sequence], budget_bytes: int) -> Checkpointed:
        """Copy the state of `live` sequences, then what is cached, as far as the budget goes.

        No step is launched. Where the host has no memory for it nothing is carried, which costs time and no token.
        """
        began = time.monotonic()
        chosen = self._choose(live, budget_bytes)
        size = sum(pieces.piece_bytes * len(places) for pieces, _, places in chosen)
        os.ftruncate(self._descriptor, 0)
        if size:
            try:
                # Now, and not when a page is touched, which would be the end of this process.
                os.posix_fallocate(self._descriptor, 0, PIECES_AT + size)
            except OSError as error:
                sys.stderr.write(f"no KV is carried over: {size} bytes: {error.strerror}\n")
                os.ftruncate(self._descriptor, 0)
                return Checkpointed(0, 0, time.monotonic() - began)
            self._write(chosen, PIECES_AT + size)
        return Checkpointed(sum(len(places) for *_, places in chosen), size, time.monotonic() - began)

    def restore(self) -> Restored:
        """Take over what fits, and give the memory back."""
        began = time.monotonic()
        index = self._index()
        taken = skipped = size = 0
        if index is not None:
            memory, at = self._mapped(mmap.ACCESS_READ), PIECES_AT
            for number, section in enumerate(index.sections):
                end = at + section.piece_bytes * len(section.keys)
                if self._can_read(index, number):
                    rows = memory[at:end].reshape(-1, section.piece_bytes)
                    adopted, wrong = _adopt(section, *self._kinds[number], rows)
                    taken, skipped, size = taken + adopted, skipped + wrong, size + adopted * section.piece_bytes
                else:
                    skipped += len(section.keys)
                at = end
        os.ftruncate(self._descriptor, 0)
        return Restored(taken, skipped, size, time.monotonic() - began)

    def _can_read(self, index: Index, number: int) -> bool:
        if index.fingerprint != self._fingerprint or len(index.sections) != len(self._kinds):
            return False
        section, (_, pieces) = index.sections[number], self._kinds[number]
        return (section.shape, section.piece_bytes) == (pieces.shape, pieces.piece_bytes)

    def _choose(self, live: list[Sequence], budget: int) -> list[tuple[Pieces, list[bytes], list[int]]]:
        """(storage, keys, places) of each kind, what is most worth keeping first."""
        chosen = []
        for kind, pieces in self._kinds:
            own, cached = kind.carried(live)
            carried = own + cached[: max(len(own), CACHE_BYTES // pieces.piece_bytes)]
            carried = carried[: budget // pieces.piece_bytes]
            budget -= len(carried) * pieces.piece_bytes
            chosen.append((pieces, [key for key, _ in carried], [place for _, place in carried]))
        return chosen

    def _write(self, chosen: list[tuple[Pieces, list[bytes], list[int]]], index_at: int) -> None:
        memory = self._mapped(mmap.ACCESS_WRITE)
        at, sections = PIECES_AT, []
        with ThreadPoolExecutor() as pool:
            for pieces, keys, places in chosen:
                end = at + pieces.piece_bytes * len(places)
                rows = memory[at:end].reshape(-1, pieces.piece_bytes)
                checksums: list[int] = []
                for part in _batches(len(places), pieces.piece_bytes):
                    pieces.read(places[part], rows[part])
                    checksums += pool.map(crc32, rows[part])
                sections.append(Section(pieces.shape, pieces.piece_bytes, keys, checksums))
                at = end
        index = msgspec.msgpack.encode(Index(self._fingerprint, sections))
        os.pwrite(self._descriptor, index, index_at)
        os.pwrite(self._descriptor, TRAILER.pack(MAGIC, index_at, len(index), crc32(index)), 0)

    def _index(self) -> Index | None:
        """None where nothing was carried, or its writer did not live to finish."""
        trailer = os.pread(self._descriptor, TRAILER.size, 0)
        if len(trailer) < TRAILER.size:
            return None
        magic, at, length, checksum = TRAILER.unpack(trailer)
        if magic != MAGIC:
            return None
        raw = os.pread(self._descriptor, length, at)
        if crc32(raw) != checksum:
            sys.stderr.write("no KV is taken over: the index of what was carried has a wrong checksum\n")
            return None
        return msgspec.msgpack.decode(raw, type=Index)

    def _mapped(self, access: int) -> Bytes:
        whole = mmap.mmap(self._descriptor, 0, access=access)
        view: npt.NDArray[np.uint8] = np.frombuffer(whole, np.uint8)
        return view


def _adopt(section: Section, kind: StateKind, pieces: Pieces, rows: Bytes) -> tuple[int, int]:
    """(pieces taken over, pieces whose checksum was wrong); ends where there is no room for more."""
    taken = wrong = 0
    with ThreadPoolExecutor() as pool:
        for part in _batches(len(rows), section.piece_bytes):
            right = np.fromiter(pool.map(crc32, rows[part]), np.int64) == section.checksums[part]
            wrong += int((~right).sum())
            places: list[int] = []
            for number in np.flatnonzero(right):
                place = kind.adopt(section.keys[part.start + number])
                if place is None:
                    break
                places.append(place)
            good = rows[part] if right.all() else rows[part][right]
            pieces.write(places, good[: len(places)])
            taken += len(places)
            if len(places) < len(good):
                break
    return taken, wrong


def _batches(count: int, piece_bytes: int) -> Iterator[slice]:
    step = max(1, BATCH_BYTES // piece_bytes)
    return (slice(start, min(count, start + step)) for start in range(0, count, step))

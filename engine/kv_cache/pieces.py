"""Blocks as plain bytes, whatever stages they are spread over: what one engine hands over to another."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.kv_cache.storage import KvStorage

Bytes = npt.NDArray[np.uint8]


class Pieces(Protocol):
    """The storage behind one kind of state, piece by piece."""

    shape: str
    """What a piece is made of; storages whose shapes differ cannot read each other's."""
    piece_bytes: int

    def read(self, places: Sequence[int], out: Bytes) -> None:
        """Copy the pieces at `places` to `out` [places, piece_bytes]."""

    def write(self, places: Sequence[int], data: Bytes) -> None:
        """Copy `data` [places, piece_bytes] to `places`, which nobody reads or writes meanwhile."""


class KvPieces:
    """A block is its values [layer][K | V][kv head][token][dim], then its scales [layer][K | V][kv head][token], of all
    layers in their order: how the layers are split over stages makes no difference.
    """

    def __init__(self, stages: Sequence[KvStorage]) -> None:
        self._stages = stages
        self._bounds = list(pairwise(accumulate((len(stage.data) for stage in stages), initial=0)))
        layers, first = self._bounds[-1][1], stages[0]
        _, halves, _, heads, tokens, dim = first.data.shape
        self._value_shape = (layers, halves, heads, tokens, dim)
        self._scale_shape = (layers, halves, heads, first.scales.shape[-1])
        self._value_bytes = int(np.prod(self._value_shape)) * first.data.itemsize
        self.piece_bytes = self._value_bytes + int(np.prod(self._scale_shape)) * first.scales.itemsize
        self.shape = f"{first.dtype} {self._value_shape}"

    def read(self, places: Sequence[int], out: Bytes) -> None:
        for place, row in zip(places, out, strict=True):
            for stage, values, scales in self._parts(row):
                values[:] = stage.data[:, :, place]
                scales[:] = stage.scales[:, :, place]

    def write(self, places: Sequence[int], data: Bytes) -> None:
        for place, row in zip(places, data, strict=True):
            for stage, values, scales in self._parts(row):
                stage.data[:, :, place] = values
                stage.scales[:, :, place] = scales

    def _parts(self, row: Bytes):  # type: ignore[no-untyped-def]
        """(stage, its values, its scales) as views of a row."""
        first = self._stages[0]
        values = row[: self._value_bytes].view(first.data.dtype).reshape(self._value_shape)
        scales = row[self._value_bytes :].view(first.scales.dtype).reshape(self._scale_shape)
        for stage, (start, end) in zip(self._stages, self._bounds, strict=True):
            yield stage, values[start:end], scales[start:end]

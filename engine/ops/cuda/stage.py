"""One stage: consecutive layers on one device, its stream, its buffers and its graphs."""

from dataclasses import dataclass, field
from typing import Any, Literal

import cupy as cp

from engine.model.layers import Block, Decoder
from engine.ops.cuda.backend import CudaOps, DeviceRows
from engine.ops.cuda.cache import Cache
from engine.ops.cuda.feed import Feed
from engine.ops.cuda.launch import Array, Kernels
from engine.ops.cuda.room import Room
from engine.ops.cuda.sample import Sampler
from engine.plan.graphs import GraphKeys

Kind = Literal["decode", "tail", "sample"]
KINDS: tuple[Kind, ...] = "decode", "tail", "sample"
"""As in GraphKeys."""


@dataclass(frozen=True, slots=True, eq=False)
class StageParts:
    """What a stage is made of. `layers`: first, and after the last. `cache.tables` is `room["tables"]`."""

    device: int
    kernels: Kernels
    stream: Any
    layers: tuple[int, int]
    cache: Cache
    room: Room


@dataclass(slots=True, eq=False)
class Graphs:
    """What is captured, by kind and rows."""

    planned: GraphKeys
    live: dict[tuple[Kind, int], Any] = field(default_factory=dict)

    def rows(self, kind: Kind) -> set[int]:
        """Row counts that a step may have: those captured, or before anything is captured those planned."""
        return {rows for live, rows in self.live or self.keys if live == kind}

    @property
    def keys(self) -> list[tuple[Kind, int]]:
        return [(kind, rows) for kind in KINDS for rows in getattr(self.planned, kind)]

    @property
    def missing(self) -> list[tuple[Kind, int]]:
        return [key for key in self.keys if key not in self.live]

    def halve(self) -> int:
        """Drop every second one, never the largest of a kind; how many."""
        before, kept = len(self.live), GraphKeys(*(tuple(sorted(self.rows(kind))) for kind in KINDS)).halved()
        self.live = {key: graph for key, graph in self.live.items() if key[1] in getattr(kept, key[0])}
        return before - len(self.live)


class Stage:
    """`first` and `last` are whether it embeds and whether it samples."""

    def __init__(self, decoder: Decoder, parts: StageParts, keys: GraphKeys, *, first: bool, last: bool) -> None:
        self.device, self.stream, self.room = parts.device, parts.stream, parts.room
        self.first, self.last = first, last
        self.graphs = Graphs(keys)
        self._decoder = decoder
        self._blocks: tuple[Block, ...] = decoder.blocks[slice(*parts.layers)]
        self.ops = CudaOps(parts.kernels, parts.stream, parts.room, parts.cache, parts.layers[0])
        self.tables = parts.cache.tables
        self.last_tokens = parts.room["last_tokens"]
        self._feed = Feed(parts.kernels) if first else None
        self.sampler = Sampler(parts.kernels, parts.room, self.last_tokens) if last else None
        self.done = cp.cuda.Event(disable_timing=True)

    @property
    def layers(self) -> int:
        return len(self._blocks)

    def x(self, m: int) -> Array:
        """The stream of rows, float32 [m, hidden]."""
        return self.room["x"][:m]

    def forward_inputs(self, m: int) -> Array:
        """int32 [3, m]: tokens, -1 for the last sampled; positions, -1 for padding; slots."""
        return self.room.flat("inputs", 3, m)

    def sample_inputs(self, m: int) -> Array:
        """int32 [3, m]: places in the stream; slots, -1 for padding; indices of the tokens drawn."""
        return self.room.flat("sample_inputs", 3, m)

    def forward(self, m: int, *, one_sequence: bool) -> None:
        """Queue the layers over the rows of the inputs."""
        kind: Kind = "tail" if one_sequence else "decode"
        if (graph := self.graphs.live.get((kind, m))) is not None:
            graph.launch(self.stream)
        else:
            self._forward(m, one_sequence)

    def sample(self, m: int) -> None:
        """Queue the head and a sample for `m` rows of the stream."""
        if (graph := self.graphs.live.get(("sample", m))) is not None:
            graph.launch(self.stream)
        else:
            self._sample(m)

    def logits(self, m: int) -> Array:
        """Queue the head for `m` rows of the stream; float32 [m, vocab]."""
        taken = self.ops.take(self.room["x"], self.sample_inputs(m)[0])
        return self.ops.product(self._decoder.norm(self.ops, taken), self._decoder.head, self.room["logits"][:m])

    def capture(self, kind: Kind, m: int) -> None:
        """Replace what is captured for so many rows. The kernels have run before."""
        self.stream.begin_capture()
        try:
            if kind == "sample":
                self._sample(m)
            else:
                self._forward(m, kind == "tail")
        finally:
            graph = self.stream.end_capture()
        self.graphs.live[kind, m] = graph

    def _forward(self, m: int, one_sequence: bool) -> None:
        tokens, positions, slots = self.forward_inputs(m)
        fed = self.room["inputs"][3, :m]
        if self._feed is not None:
            self._feed(tokens, slots, self.last_tokens, fed, self.stream)
        step = self.ops.begin(DeviceRows(fed, positions, slots, one_sequence), self._decoder.rope)
        x = self.ops.embed(self._decoder.embedding, step) if self.first else self.x(m)
        for block in self._blocks:
            x = block(self.ops, x, step)

    def _sample(self, m: int) -> None:
        assert self.sampler is not None
        _, slots, indices = self.sample_inputs(m)
        self.sampler(self.logits(m), slots, indices, self.stream)

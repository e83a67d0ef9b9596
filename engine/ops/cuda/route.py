"""Routing to experts and the join of their results: the wrapper of route.cu."""

import ctypes
from dataclasses import dataclass
from typing import Any, Self

from engine.ops.cuda.compile import Unit
from engine.ops.cuda.launch import Array, Kernels, Pointer, address
from engine.ops.cuda.linear import Groups
from engine.ops.cuda.room import Room
from engine.ops.cuda.split import item_rows

MOST_EXPERTS = 512
_WARPS, _GROUP_THREADS, _ADD_THREADS = 8, 1024, 256


class RouteArgs(ctypes.Structure):
    """`RouteArgs` of route.cu."""

    _fields_ = (
        ("logits", Pointer),
        ("positions", Pointer),
        ("chosen", Pointer),
        ("shares", Pointer),
        ("items", Pointer),
        ("item_count", Pointer),
        ("tokens", Pointer),
        ("pairs", Pointer),
        ("parts", Pointer),
        ("y", Pointer),
        ("m", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("used", ctypes.c_int32),
        ("normalise", ctypes.c_int32),
        ("rows_of_item", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


UNIT = Unit.of("route.cu", {"ARGS_BYTES": ctypes.sizeof(RouteArgs)})


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Room for the routing of `m` rows, which every layer uses again; int32 but the shares."""

    chosen: Array
    """[m, used]; -1 for padding"""
    shares: Array
    """float32 [m, used]"""
    items: Array
    item_count: Array
    tokens: Array
    """[m * used]: row of a place"""
    pairs: Array
    """[m * used]: row * used + j of a place"""
    rows_of_item: int

    @classmethod
    def of(cls, room: Room, m: int, used: int, experts: int) -> Self:
        """In the buffers of plan.scratch.route_buffers and ITEM_COUNT."""
        pairs, rows_of_item = m * used, item_rows(m, used, experts)
        most = min(pairs, experts + pairs // rows_of_item)
        return cls(
            room.flat("chosen", m, used), room.flat("shares", m, used), room.flat("items", most, 4),
            room["item_count"], room.flat("tokens", pairs), room.flat("pairs", pairs), rows_of_item,
        )  # fmt: skip

    @property
    def into(self) -> Groups:
        """For gate and up: rows of x are tokens, rows of y are places."""
        return Groups(self.items, self.item_count, self.rows_of_item, self.tokens, None)

    @property
    def out(self) -> Groups:
        """For down: rows of x are places, rows of y are pairs."""
        return Groups(self.items, self.item_count, self.rows_of_item, None, self.pairs)


class Route:
    def __init__(self, kernels: Kernels) -> None:
        loaded = kernels.load(UNIT)
        self._choose, self._group, self._add = (loaded[f"route_{name}"] for name in ("choose", "group", "add"))

    def __call__(self, logits: Array, positions: Array, normalise: bool, to: Routing, stream: Any) -> None:
        """Fill `to` from logits f32 [m, experts]; positions int32 [m], -1 for padding. Raises ValueError."""
        m, experts = (int(n) for n in logits.shape)
        if experts > MOST_EXPERTS:
            raise ValueError(f"{experts} experts; the routing kernel takes {MOST_EXPERTS}")
        args = self._args(to, positions, m)
        args.logits = address(logits, "float32", (m, experts), "logits")
        args.experts, args.normalise, args.rows_of_item = experts, normalise, to.rows_of_item
        self._choose.launch((-(-m // _WARPS), 1, 1), _WARPS * 32, args, stream)
        self._group.launch((1, 1, 1), _GROUP_THREADS, args, stream)

    def add(self, parts: Array, y: Array, positions: Array, routing: Routing, stream: Any) -> None:
        """y f32 [m, width] += the shares of parts f32 [m * used, width]. Raises ValueError."""
        m, width = (int(n) for n in y.shape)
        args = self._args(routing, positions, m)
        args.parts = address(parts, "float32", (m * args.used, width), "parts")
        args.y, args.width = address(y, "float32", (m, width), "y"), width
        if width % 4:
            raise ValueError(f"width {width} is not a multiple of 4")
        self._add.launch((-(-width // (4 * _ADD_THREADS)), m, 1), _ADD_THREADS, args, stream)

    @staticmethod
    def _args(routing: Routing, positions: Array, m: int) -> RouteArgs:
        used = int(routing.chosen.shape[1])
        return RouteArgs(
            positions=address(positions, "int32", (m,), "positions"),
            chosen=address(routing.chosen, "int32", (m, used), "chosen"),
            shares=address(routing.shares, "float32", (m, used), "shares"),
            items=address(routing.items, "int32", (None, 4), "items"),
            item_count=address(routing.item_count, "int32", (1,), "item_count"),
            tokens=address(routing.tokens, "int32", (m * used,), "tokens"),
            pairs=address(routing.pairs, "int32", (m * used,), "pairs"),
            m=m,
            used=used,
        )

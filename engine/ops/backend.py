"""What a model asks of a backend: one method per op, and a source of weights in the backend's own layout.

Models are written against these two protocols alone, so they read as diagrams of their networks and run on any backend:
the NumPy twin, the CPU kernels, a capture of CUDA graphs. Arrays are the backend's own (`Array`), float32 in their
values; `rows` is the number of rows of the forward. Q, K and V of a row lie side by side: `qkv` is
[rows, (heads + 2 * kv heads) * dim].
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = Any
"""An array of the backend's."""
Matrix = Any
"""A weight matrix, or a stack of experts', in the backend's layout; with its bias where it has one."""
Batch = Any
"""The rows of a forward: engine.ops.rows.Rows, or what a device has in their place."""
Step = Any
"""What all layers of one forward share, made by `begin`."""


class Heads(NamedTuple):
    """Shape of an attention layer; `heads` is a multiple of `kv_heads`."""

    heads: int
    kv_heads: int
    dim: int


class Rope(NamedTuple):
    """Rotary embedding of the first 2 * len(frequencies) elements of each head, by position * frequency radians."""

    frequencies: npt.NDArray[np.float64]
    magnitude: float
    """Factor on sine and cosine."""
    interleaved: bool
    """Pairs are neighbours (2i, 2i + 1); otherwise halves (i, i + len(frequencies))."""


class HeadNorm(NamedTuple):
    """RMS norm of every head of Q and K; the weights are [dim]."""

    q_weight: Array
    k_weight: Array
    eps: float


class Ops(Protocol):
    """The ops, in the order in which a layer meets them. What an op returns is good until its next call."""

    def begin(self, rows: Batch, rope: Rope) -> Step:
        """Prepare a forward over these rows."""

    def embed(self, table: Matrix, step: Step) -> Array:
        """Rows of the embedding: [rows, hidden]."""

    def rmsnorm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x²) + eps) * weight, row by row, as a new array."""

    def linear(self, x: Array, matrix: Matrix, onto: Array | None = None) -> Array:
        """x · matrix + bias as a new array; with `onto`, the product is added to it in place and it is returned."""

    def qkv(self, qkv: Array, heads: Heads, norm: HeadNorm | None, layer: int, step: Step) -> Array:
        """Q as `attention` takes it: the heads of Q and K normalised if there is a norm, then turned by their
        positions, and K and V written into the blocks of their sequences, in the storage's own type."""

    def attention(self, q: Array, heads: Heads, layer: int, step: Step) -> Array:
        """softmax(Q Kᵀ / sqrt(dim)) V over each row's own and earlier positions, as stored: [rows, heads * dim]."""

    def swiglu(self, x: Array, gate_up: Matrix) -> Array:
        """silu(gate · x) * up · x."""

    def route(self, logits: Array, used: int, normalise: bool) -> tuple[Array, Array]:
        """(experts [rows, used], shares [rows, used]): the best of a softmax over logits, best first."""

    def experts(self, x: Array, chosen: Array, shares: Array, gate_up: Matrix, down: Matrix, onto: Array) -> Array:
        """onto += the sum over a row's chosen experts of share * down · swiglu(x, gate_up), in place."""

    def take(self, x: Array, places: Array) -> Array:
        """The rows at `places`, as a new array."""


class Weights(Protocol):
    """Reads a model's tensors into the backend's layout. Raises ModelFileError for a damaged one."""

    def vector(self, name: str) -> Array:
        """A tensor [n] as float32."""

    def numbers(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor [n] as a NumPy array, for what is worked out before the first forward."""

    def matrix(self, *names: str, bias: tuple[str, ...] = ()) -> Matrix:
        """Matrices of as many columns, one below the other; `bias` names a vector for each, or none."""

    def gate_up(self, gate: str, up: str) -> Matrix:
        """The two matrices of `swiglu`, of as many rows, or two stacks of them [experts, rows, cols]."""

    def experts(self, name: str) -> Matrix:
        """A stack [experts, rows, cols]."""

    def as_head(self, table: Matrix) -> Matrix:
        """The embedding once more, as the last matrix of a model that ties them."""

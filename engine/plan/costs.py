"""What a card holds for an engine beside the arrays that the engine asks for. Measured, and the only place to change.

All on one H200, driver 580.159, CUDA 13.0, CuPy 14.2, free memory read by another process through NVML, 2026-12-01;
another card's own figures replace them field by field (`dataclasses.replace`).
"""

from dataclasses import dataclass

from engine.memory.arena import GRANULE

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes, unless it says nodes."""

    granule: int = GRANULE
    """cudaMalloc and virtual memory give multiples of 2 MiB (a request for 3 MiB took 4)."""
    driver_reserve: int = 615 * MIB
    """NVML's `reserved` with no process running; used where a card is planned for that is not there."""
    context: int = 527 * MIB
    """First use of the device by a process; back only when it exits."""
    modules: int = 24 * MIB
    """CuPy's first kernels took 12 (lazy loading); as much again for our own, until they have been measured."""
    cublas_workspace: int = 64 * MIB
    """First f16 GEMM: handle and workspace, which came back to the byte."""
    graph_node: int = 26 * MIB // (32 * 300)
    """32 graphs of 300 kernel nodes took 26 MiB."""
    nodes_per_layer: int = 12
    """Kernels of a layer's forward: norms, projections, rope, store, attention in two passes, feed-forward."""
    nodes_per_sample: int = 12
    """Kernels of one sample."""
    tensor_alignment: int = 256
    """cudaMalloc's own; each tensor begins at a multiple of it within the weights' arena."""

    def granules(self, size: int) -> int:
        """`size` rounded up to what a card gives."""
        return -(-size // self.granule) * self.granule

    def aligned(self, size: int) -> int:
        return -(-size // self.tensor_alignment) * self.tensor_alignment


COSTS = Costs()

"""How the blocks of a pool lie in memory that comes and goes by granules: pure arithmetic, for plan and storage alike.

K and V lie as [layer][K | V][block]: 2 * layers *runs* of equal length. Blocks come and go in *groups*: the smallest
number of consecutive blocks that is a whole number of granules in every run, or a multiple of it. So a group's granules
are its own, and what is left when it goes keeps its place.

Scales of int8 lie beside, as one run [block][layer][K | V][kv head][token]: they are a sixty-fourth of the values, and
as 2 * layers runs of their own each would round up to a granule. A granule of scales may serve several groups and goes
with the last of them.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

from engine.config import BLOCK_TOKENS
from engine.memory.arena import GRANULE, Span

ELEMENT_BYTES = {"f32": 4, "f16": 2, "int8": 1}
SCALE_BYTES = {"f32": 0, "f16": 0, "int8": 2}
"""Per head and token."""
MOST_GROUPS = 128


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The layers of one stage. Bytes throughout."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    granule: int = GRANULE
    block_tokens: int = BLOCK_TOKENS
    multiple: int = 1
    """Smallest groups in a group."""

    def coarse(self, n_blocks: int) -> Self:
        """The same with groups so large that `n_blocks` blocks are at most 128 of them.

        Each group is mapped run by run, which costs a driver tens of microseconds a piece: a pool of 130 GiB has 65,000
        granules, and nobody shrinks such a pool by less than a gigabyte.
        """
        smallest = replace(self, multiple=1)
        return replace(self, multiple=max(1, -(-smallest.groups(n_blocks) // MOST_GROUPS)))

    @property
    def runs(self) -> int:
        return 2 * self.layers

    @property
    def run_bytes(self) -> int:
        """One block in one run."""
        return self.block_tokens * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """The scales of one block."""
        return self.runs * self.block_tokens * self.kv_heads * SCALE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.runs * self.run_bytes + self.scale_bytes

    @property
    def group_blocks(self) -> int:
        return self.multiple * (self.granule // gcd(self.granule, self.run_bytes))

    @property
    def group_granules(self) -> int:
        """In each run."""
        return self.group_blocks * self.run_bytes // self.granule

    def groups(self, n_blocks: int) -> int:
        return -(-n_blocks // self.group_blocks)

    def pool_bytes(self, n_blocks: int) -> int:
        """What the first `n_blocks` blocks take; the last group need not be whole."""
        per_run = -(-n_blocks * self.run_bytes // self.granule)
        scales = -(-n_blocks * self.scale_bytes // self.granule)
        return (self.runs * per_run + scales) * self.granule

    def blocks_in(self, size: int) -> int:
        """The most blocks that take at most `size` bytes."""
        least, most = 0, max(0, size) // self.block_bytes
        while least < most:  # pool_bytes never falls
            middle = (least + most + 1) // 2
            if self.pool_bytes(middle) <= size:
                least = middle
            else:
                most = middle - 1
        return least

    # Where things are, in an arena of `address_granules(n_blocks)`.

    def address_granules(self, n_blocks: int) -> int:
        """Length of the range for values and scales; the values' runs are whole groups."""
        return self.scales_start(n_blocks) + -(-n_blocks * self.scale_bytes // self.granule)

    def scales_start(self, n_blocks: int) -> int:
        """The first granule after the values."""
        return self.runs * self.groups(n_blocks) * self.group_granules

    def value_spans(self, group: int, n_blocks: int) -> list[Span]:
        """Granules of one group of a pool of `n_blocks`, one span a run; the last group's may be shorter."""
        stride = self.groups(n_blocks) * self.group_granules
        start = group * self.group_granules
        blocks = min(self.group_blocks, n_blocks - group * self.group_blocks)
        count = -(-blocks * self.run_bytes // self.granule)
        return [(run * stride + start, count) for run in range(self.runs)]

    def scale_granules(self, group: int, n_blocks: int) -> range:
        """Granules that hold scales of one group, counted from the start of the range."""
        first_block = group * self.group_blocks
        last_block = min(n_blocks, first_block + self.group_blocks)
        first = first_block * self.scale_bytes // self.granule
        last = -(-last_block * self.scale_bytes // self.granule)
        start = self.scales_start(n_blocks)
        return range(start + first, start + last) if self.scale_bytes else range(0)

    def bytes_of(self, groups: Collection[int], n_blocks: int) -> int:
        """What these groups of a pool of `n_blocks` take together."""
        values = sum(count for group in groups for _, count in self.value_spans(group, n_blocks))
        scales = {granule for group in groups for granule in self.scale_granules(group, n_blocks)}
        return (values + len(scales)) * self.granule

"""Free blocks of a pool by groups: a group is what memory can be given back for, and it can go once nothing holds it.

Blocks are handed out from groups that are in use already, then from those that hold cached text only, and from empty
ones last, so that whole groups come free as sequences end.
"""

from collections.abc import Iterable

_IN_USE, _CACHED, _EMPTY = range(3)


class Groups:
    """Which blocks are free, and what the others of their group do. `group_blocks` consecutive blocks are a group."""

    def __init__(self, n_blocks: int, group_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._group_blocks = group_blocks
        self.total = -(-n_blocks // group_blocks)
        """Groups, absent ones included."""
        self._free = [list(reversed(self.members(group))) for group in range(self.total)]
        self._held = [0] * self.total
        self._idle = [0] * self.total
        self._absent: set[int] = set()
        # Groups with free blocks by what their others do, each in the order in which it came to be so.
        self._open: tuple[dict[int, None], ...] = ({}, {}, dict.fromkeys(range(self.total)))
        self.free = n_blocks
        """How many blocks are free."""

    @property
    def absent(self) -> list[int]:
        """Groups that are not in the pool, in ascending order."""
        return sorted(self._absent)

    def group(self, block: int) -> int:
        return block // self._group_blocks

    def size(self, group: int) -> int:
        """Blocks in a group; the last one may be short."""
        return min(self._group_blocks, self._n_blocks - group * self._group_blocks)

    def members(self, group: int) -> range:
        first = group * self._group_blocks
        return range(first, first + self.size(group))

    def take(self) -> int:
        """A free block, which the caller makes held or idle. One must be free."""
        group = next(iter(next(filter(None, self._open))))
        block = self._free[group].pop()
        self.free -= 1
        return block

    def put(self, block: int) -> None:
        """A block that is neither held nor idle any more."""
        self._free[self.group(block)].append(block)
        self.free += 1
        self._place(self.group(block))

    def count(self, block: int, *, held: int = 0, idle: int = 0) -> None:
        """So many more held and idle blocks in this block's group."""
        group = self.group(block)
        self._held[group] += held
        self._idle[group] += idle
        self._place(group)

    def _place(self, group: int) -> None:
        kind = _IN_USE if self._held[group] else _CACHED if self._idle[group] else _EMPTY
        for other, groups in enumerate(self._open):
            if other != kind or not self._free[group]:
                groups.pop(group, None)
            elif group not in groups:
                groups[group] = None

    def unheld(self, idle: Iterable[int]) -> list[int]:
        """Groups that nothing holds: first those without text, then by the latest use of any block in them.

        `idle` are the idle blocks, longest idle first.
        """
        latest = {self.group(block): place for place, block in enumerate(idle)}
        groups = (group for group, held in enumerate(self._held) if not held and group not in self._absent)
        # Of empty groups the last goes first, as blocks are handed out from the first on.
        return sorted(groups, key=lambda group: (latest.get(group, -1), -group))

    def remove(self, group: int) -> None:
        """The blocks of an unheld group, all free by now, leave."""
        assert len(self._free[group]) == self.size(group)
        self.free -= self.size(group)
        self._free[group] = []
        self._absent.add(group)
        self._place(group)

    def add(self, group: int) -> None:
        """They are back, and free."""
        self._absent.remove(group)
        self._free[group] = list(reversed(self.members(group)))
        self.free += self.size(group)
        self._place(group)

    def free_blocks(self) -> list[int]:
        """All free blocks, for an audit."""
        return [block for free in self._free for block in free]

"""What a sequence's tokens leave behind in the layers, by kind, and what may be done with it.

Attention layers leave paged KV, which can be cut after any token. Recurrent layers leave one fixed slot that moves on
with each token and can be put back only to where a snapshot was taken. The scheduler never knows which it deals with:
prefix match, preemption, carry-over and rollback ask the kind, and where a model mixes kinds, all must agree.
"""

from collections.abc import Callable
from typing import Protocol

from engine.kv_cache.blocks import BlockPool
from engine.sequence import Sequence


class SequenceState(Protocol):
    """What the scheduler asks. All lengths are tokens from the start of the sequence; 0 always works."""

    def fits(self, length: int) -> bool:
        """Whether one sequence of this length, alone, can be held at all."""

    def match(self, sequence: Sequence, limit: int) -> int:
        """Greatest length, at most `limit`, whose state is cached for the same tokens and can be taken up."""

    def admits(self, sequence: Sequence, matched: int, others: int) -> bool:
        """Whether all known tokens fit if `matched` of them are taken up, with a rest for `others` to grow by one."""

    def restore(self, sequence: Sequence, length: int) -> None:
        """Take up the cached state at a length that `match` gave."""

    def reserve(self, sequence: Sequence, length: int) -> bool:
        """Make room for `length` tokens; False when there is none."""

    def commit(self, sequence: Sequence, length: int) -> None:
        """The first `length` tokens are accepted and stored by the steps launched so far: they may be cached."""

    def withdraw(self, sequence: Sequence, length: int) -> bool:
        """Take back what was committed after `length`, never to be stored; False when others rely on it already."""

    def cut_point(self, sequence: Sequence, length: int) -> int:
        """Greatest length, at most `length`, to which the sequence's own state can be cut."""

    def cut(self, sequence: Sequence, length: int) -> None:
        """Cut the state to a length that `cut_point` gave; 0 gives everything back. No launched step names it."""


class StateKind(SequenceState, Protocol):
    """One kind, with the pieces of its storage that outlive sequences."""

    def carried(self) -> list[tuple[bytes, int]]:
        """(key, place in the storage) of what another engine could take over, most worth keeping first."""

    def adopt(self, key: bytes) -> int | None:
        """The place to write one carried piece to, from then on cached; None when there is no room for it."""


class PagedKV:
    """Keys and values in blocks of a pool; full blocks of accepted tokens are shared between sequences."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._tokens = pool.block_tokens

    def fits(self, length: int) -> bool:
        return self._blocks(length) <= self._pool.n_blocks

    def match(self, sequence: Sequence, limit: int) -> int:
        full = limit // self._tokens
        found = next((i for i in range(full) if self._pool.find(self._key(sequence, i)) is None), full)
        return found * self._tokens

    def admits(self, sequence: Sequence, matched: int, others: int) -> bool:
        shared = matched // self._tokens
        # Idle blocks count as available until they are taken up.
        woken = sum(not self._pool.holders(self._labelled(sequence, i)) for i in range(shared))
        return self._pool.available - woken >= self._blocks(sequence.known) - shared + others

    def restore(self, sequence: Sequence, length: int) -> None:
        sequence.cached_blocks = length // self._tokens
        sequence.blocks = [self._pool.share(self._key(sequence, i)) for i in range(sequence.cached_blocks)]

    def reserve(self, sequence: Sequence, length: int) -> bool:
        missing = self._blocks(length) - len(sequence.blocks)
        if missing > self._pool.available:
            return False
        for _ in range(missing):
            sequence.blocks.append(self._pool.allocate())
        return True

    def commit(self, sequence: Sequence, length: int) -> None:
        for i in range(sequence.cached_blocks, length // self._tokens):
            self._pool.label(sequence.blocks[i], self._key(sequence, i))
            sequence.cached_blocks = i + 1

    def withdraw(self, sequence: Sequence, length: int) -> bool:
        kept = min(length // self._tokens, sequence.cached_blocks)
        never_stored = sequence.blocks[kept : sequence.cached_blocks]
        if any(self._pool.holders(block) > 1 for block in never_stored):
            return False
        for block in never_stored:
            self._pool.forget(block)
        sequence.cached_blocks = kept
        return True

    def cut_point(self, sequence: Sequence, length: int) -> int:
        whole = length // self._tokens
        # A block that was committed is never written again, so it stays or goes whole.
        return whole * self._tokens if whole < sequence.cached_blocks else length

    def cut(self, sequence: Sequence, length: int) -> None:
        kept = self._blocks(length)
        given_back = sequence.blocks[kept:]
        # A new list: plans that were launched hold the old one.
        sequence.blocks = sequence.blocks[:kept]
        sequence.cached_blocks = min(sequence.cached_blocks, kept)
        # The end of a text goes idle first and is lost first; its beginning is what other texts share.
        for block in reversed(given_back):
            self._pool.release(block)

    def carried(self) -> list[tuple[bytes, int]]:
        return self._pool.labelled()

    def adopt(self, key: bytes) -> int | None:
        return self._pool.adopt(key)

    def _blocks(self, length: int) -> int:
        return -(-length // self._tokens)

    def _key(self, sequence: Sequence, index: int) -> bytes:
        keys = sequence.keys
        while len(keys) <= index:
            parent = keys[-1] if keys else self._pool.root_key(sequence.submit.cache_scope)
            start = len(keys) * self._tokens
            keys.append(self._pool.next_key(parent, sequence.tokens(start, start + self._tokens)))
        return keys[index]

    def _labelled(self, sequence: Sequence, index: int) -> int:
        block = self._pool.find(self._key(sequence, index))
        assert block is not None, "a matched block has lost its label"
        return block


class EveryKind:
    """The state of a model that mixes kinds: as one kind, with what all of them agree on."""

    def __init__(self, kinds: tuple[StateKind, ...]) -> None:
        self._kinds = kinds

    def fits(self, length: int) -> bool:
        return all(kind.fits(length) for kind in self._kinds)

    def match(self, sequence: Sequence, limit: int) -> int:
        return self._agreed([kind.match for kind in self._kinds], sequence, limit)

    def admits(self, sequence: Sequence, matched: int, others: int) -> bool:
        return all(kind.admits(sequence, matched, others) for kind in self._kinds)

    def restore(self, sequence: Sequence, length: int) -> None:
        for kind in self._kinds:
            kind.restore(sequence, length)

    def reserve(self, sequence: Sequence, length: int) -> bool:
        return all(kind.reserve(sequence, length) for kind in self._kinds)

    def commit(self, sequence: Sequence, length: int) -> None:
        for kind in self._kinds:
            kind.commit(sequence, length)

    def withdraw(self, sequence: Sequence, length: int) -> bool:
        return all(kind.withdraw(sequence, length) for kind in self._kinds)

    def cut_point(self, sequence: Sequence, length: int) -> int:
        return self._agreed([kind.cut_point for kind in self._kinds], sequence, length)

    def cut(self, sequence: Sequence, length: int) -> None:
        for kind in self._kinds:
            kind.cut(sequence, length)

    @staticmethod
    def _agreed(questions: list[Callable[[Sequence, int], int]], sequence: Sequence, length: int) -> int:
        while True:
            least = min(ask(sequence, length) for ask in questions)
            if least == length:
                return length
            length = least

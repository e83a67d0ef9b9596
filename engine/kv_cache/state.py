"""What a sequence's tokens leave behind in the layers, by kind, and what may be done with it.

Attention layers leave paged KV, which can be cut after any token. Recurrent layers leave one fixed slot that moves on
with each token and can be put back only to where a snapshot was taken. The scheduler never knows which it deals with:
prefix match, preemption, carry-over and rollback ask the kind, and where a model mixes kinds, all must agree.
"""

import struct
from collections.abc import Callable
from typing import Protocol

from engine.kv_cache.blocks import BlockPool
from engine.sequence import Sequence

_TAIL = struct.Struct("<16sQQ")
"""Of a block that is not full: its key, the sequence that may take it up, the tokens in it."""


Carried = list[tuple[bytes, int]]
"""(key, place in the storage)"""


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

    def carried(self, live: list[Sequence]) -> tuple[Carried, Carried]:
        """What another engine could take over: the state of `live` sequences, and what else is cached; in each the
        most worth keeping first. No launched step names any of them."""

    def adopt(self, key: bytes) -> int | None:
        """The place to write one carried piece to, from then on cached; None when there is no room for it."""


class PagedKV:
    """Keys and values in blocks of a pool; full blocks of accepted tokens are shared between sequences.

    A block that is not full is its sequence's own; it has a key only on its way from one engine to another.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._tokens = pool.block_tokens
        self._tails: dict[int, tuple[bytes, int]] = {}
        """Carried blocks that are not full, by the sequence that may take them up: key, and tokens in it."""

    def fits(self, length: int) -> bool:
        return self._blocks(length) <= self._pool.n_blocks

    def match(self, sequence: Sequence, limit: int) -> int:
        full = limit // self._tokens
        found = next((i for i in range(full) if self._pool.find(self._key(sequence, i)) is None), full)
        return found * self._tokens + self._tail(sequence, found, limit)

    def admits(self, sequence: Sequence, matched: int, others: int) -> bool:
        shared = matched // self._tokens
        # Idle blocks count as available until they are taken up.
        woken = sum(not self._pool.holders(self._labelled(sequence, i)) for i in range(shared))
        return self._pool.available - woken >= self._blocks(sequence.known) - shared + others

    def restore(self, sequence: Sequence, length: int) -> None:
        sequence.cached_blocks = length // self._tokens
        sequence.blocks = [self._pool.share(self._key(sequence, i)) for i in range(sequence.cached_blocks)]
        if length % self._tokens:
            key, _ = self._tails.pop(sequence.submit.sequence)
            sequence.blocks.append(self._pool.claim(key))

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

    def carried(self, live: list[Sequence]) -> tuple[Carried, Carried]:
        own: dict[bytes, int] = {}
        for sequence in live:
            full, rest = divmod(sequence.stored, self._tokens)
            for i in range(full):
                own.setdefault(self._key(sequence, i), sequence.blocks[i])
            if rest:
                tail = _TAIL.pack(self._tail_key(sequence, full, rest), sequence.submit.sequence, rest)
                own[tail] = sequence.blocks[full]
        return list(own.items()), [(key, block) for key, block in self._pool.labelled() if key not in own]

    def adopt(self, key: bytes) -> int | None:
        if len(key) != _TAIL.size:
            return self._pool.adopt(key)
        digest, owner, tokens = _TAIL.unpack(key)
        block = self._pool.adopt(digest)
        if block is not None:
            self._tails[owner] = digest, tokens
        return block

    def _tail(self, sequence: Sequence, full: int, limit: int) -> int:
        """Tokens in the carried block that goes on after `full` blocks of this sequence; 0 if there is none."""
        key, tokens = self._tails.get(sequence.submit.sequence, (b"", 0))
        if not tokens or full * self._tokens + tokens > limit or self._pool.find(key) is None:
            return 0
        return tokens if key == self._tail_key(sequence, full, tokens) else 0

    def _blocks(self, length: int) -> int:
        return -(-length // self._tokens)

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        """What block `index` of a sequence follows on."""
        if index:
            return self._key(sequence, index - 1)
        root = self._pool.root_key(sequence.submit.cache_scope)
        return root if sequence.submit.cache_prompt else self._pool.private_key(root, sequence.submit.sequence)

    def _key(self, sequence: Sequence, index: int) -> bytes:
        keys = sequence.keys
        while len(keys) <= index:
            start = len(keys) * self._tokens
            parent = self._parent(sequence, len(keys))
            keys.append(self._pool.next_key(parent, sequence.tokens(start, start + self._tokens)))
        return keys[index]

    def _tail_key(self, sequence: Sequence, full: int, tokens: int) -> bytes:
        start = full * self._tokens
        text = sequence.tokens(start, start + tokens)
        return self._pool.tail_key(self._parent(sequence, full), text, sequence.submit.sequence)

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

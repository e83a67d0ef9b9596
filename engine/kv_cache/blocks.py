"""Accounting of KV blocks: who holds which, which hold text worth finding again, which are free. Ints only.

A block is free, in use (by one or more sequences) or idle: held by nobody, but labelled with the key of the text whose
KV it holds. Idle blocks are the prefix cache; the one idle for longest is taken when no block is free.

A label is the end of a hash chain over everything that the KV depends on, so equal keys mean equal KV. A labelled block
is never written again; only its label is ever shared. Nothing here touches the storage, on whatever device it is.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from engine.config import BLOCK_TOKENS


class BlockPool:
    """`n_blocks` blocks of `block_tokens` tokens. `fingerprint` names model, KV type and arithmetic version."""

    def __init__(self, n_blocks: int, fingerprint: str = "", block_tokens: int = BLOCK_TOKENS) -> None:
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._free = list(reversed(range(n_blocks)))
        self._holders = [0] * n_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self.n_blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks held by nobody that still hold text."""
        return len(self._idle)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def allocate(self) -> int:
        """A block for one writer. The caller has checked `available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._unlabel(block)
        self._holders[block] = 1
        return block

    def release(self, block: int) -> None:
        """One holder fewer; the last one leaves it idle if it is labelled, else free."""
        assert self._holders[block] > 0, f"block {block} is held by nobody"
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._key_of:
            self._idle[block] = None
        else:
            self._free.append(block)

    def root_key(self, scope: str) -> bytes:
        """Where the chains of one cache scope begin."""
        fingerprint, name = (part.encode("utf-8", "surrogatepass") for part in (self._fingerprint, scope))
        return _digest(len(fingerprint).to_bytes(8, "little") + fingerprint + name)

    def next_key(self, parent: bytes, tokens: list[int]) -> bytes:
        """Key of one full block after the text that `parent` stands for."""
        assert len(tokens) == self.block_tokens
        return _digest(parent + array("i", tokens).tobytes())

    def find(self, key: bytes) -> int | None:
        """The block labelled `key`, in use or idle."""
        return self._block_of.get(key)

    def share(self, key: bytes) -> int:
        """One holder more for the block labelled `key`, which must exist."""
        block = self._block_of[key]
        if not self._holders[block]:
            del self._idle[block]
        self._holders[block] += 1
        return block

    def label(self, block: int, key: bytes) -> None:
        """Say what a held block holds. Of two blocks with the same text only the first is labelled."""
        assert self._holders[block] > 0
        assert block not in self._key_of
        if key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, block: int) -> None:
        """Take back the label, if any, of a block with one holder: its text was never stored."""
        assert self._holders[block] == 1
        if block in self._key_of:
            self._unlabel(block)

    def _unlabel(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]

    def labelled(self) -> list[tuple[bytes, int]]:
        """(key, block) of all labelled blocks, those most worth keeping first: in use, then the latest idle."""
        in_use = [(key, block) for key, block in self._block_of.items() if self._holders[block]]
        return in_use + [(self._key_of[block], block) for block in reversed(self._idle)]

    def adopt(self, key: bytes) -> int | None:
        """A free block made idle under `key`, for text stored elsewhere before; None when none is free or it is here.

        Each adopted block is taken again before those adopted earlier, so adopt what is most worth keeping first.
        """
        if key in self._block_of or not self._free:
            return None
        block = self._free.pop()
        self._key_of[block] = key
        self._block_of[key] = block
        self._idle[block] = None
        self._idle.move_to_end(block, last=False)
        return block

    def audit(self, held: Iterable[list[int]]) -> None:
        """Hold the books against the sequences' block lists; AssertionError where a block is lost or held twice."""
        counts = Counter(block for blocks in held for block in blocks)
        assert {block: n for block, n in enumerate(self._holders) if n} == counts, "holders are miscounted"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(idle) + len(counts) == self.n_blocks, "a block is lost or in two places"
        assert len(free | idle | counts.keys()) == self.n_blocks, "a block is in two places"
        assert idle <= self._key_of.keys(), "an idle block has no label"
        assert not free & self._key_of.keys(), "a free block has a label"
        assert self._block_of == {key: block for block, key in self._key_of.items()}, "labels and blocks disagree"


def _digest(data: bytes) -> bytes:
    # 128 bits of a real hash: a forged collision would show one user another's text.
    return blake2b(data, digest_size=16).digest()

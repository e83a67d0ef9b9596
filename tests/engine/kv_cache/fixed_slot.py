"""The other kind of state, as recurrent layers would have it: one slot that moves on with every token.

`FixedSlot` keeps the books: at which lengths of which texts a snapshot was taken. `RecurrentPipeline` has the slots and
the snapshots, and holds each slot against the KV entry of the token before, so that a slot put back to the wrong place
is an AssertionError. Copies are queued with the steps, as on a device's stream.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.sequence import StepPlan
from tests.engine.scripted import ScriptedPipeline, digest


@dataclass
class RecurrentPipeline(ScriptedPipeline):
    states: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, int] = field(default_factory=dict)
    wanted: dict[tuple[int, int], int] = field(default_factory=dict)
    """(slot, length): the snapshot to take when the slot gets there."""

    @property
    def in_flight(self):
        return sum(not isinstance(item, tuple) for item in self.queue)

    def load(self, slot, snapshot, length):
        self.queue.append((slot, snapshot, length))
        if self.eager:
            self.copy(*self.queue.pop())

    def loading(self, snapshot):
        return any(isinstance(item, tuple) and item[1] == snapshot for item in self.queue)

    def copy(self, slot, snapshot, length):
        self.states[slot] = 0 if snapshot is None else self.snapshots[snapshot]
        self.lengths[slot] = length

    def drop(self, slot):
        for item in () if self.eager else self.queue:
            if isinstance(item, StepPlan):
                self.dropped.add((item.step, slot))

    def collect(self):
        while isinstance(self.queue[0], tuple):
            self.copy(*self.queue.popleft())
        return super().collect()

    def store(self, slot, blocks, start, tokens):
        super().store(slot, blocks, start, tokens)
        assert self.lengths[slot] == start
        assert self.states[slot] == (self.entry(blocks, start - 1) if start else 0)
        for position, token in enumerate(tokens, start):
            self.states[slot] = digest(self.states[slot], position, token)
        self.lengths[slot] += len(tokens)
        self.save(slot)

    def save(self, slot):
        snapshot = self.wanted.pop((slot, self.lengths[slot]), None)
        if snapshot is not None:
            self.snapshots[snapshot] = self.states[slot]


class FixedSlot:
    """Snapshots at multiples of `every` tokens, where a step happens to end there; the longest unused goes first."""

    def __init__(self, pipeline: RecurrentPipeline, every: int, n_snapshots: int):
        self.pipeline = pipeline
        self.every = every
        self.n_snapshots = n_snapshots
        self.taken: OrderedDict[tuple, int] = OrderedDict()

    def fits(self, length):
        return True

    def match(self, sequence, limit):
        lengths = range(limit // self.every * self.every, 0, -self.every)
        return next((length for length in lengths if self.key(sequence, length) in self.taken), 0)

    def admits(self, sequence, matched, others):
        return True

    def restore(self, sequence, length):
        key = self.key(sequence, length)
        if length:
            self.taken.move_to_end(key)
        self.pipeline.load(sequence.slot, self.taken[key] if length else None, length)

    def reserve(self, sequence, length):
        return True

    def commit(self, sequence, length):
        key = self.key(sequence, length)
        # Later on the slot has moved past this length.
        if length % self.every or length != sequence.computed or key in self.taken:
            return
        if len(self.taken) < self.n_snapshots:
            snapshot = len(self.taken)
        else:
            oldest = next(iter(self.taken))
            if self.in_use(self.taken[oldest]):
                return
            snapshot = self.taken.pop(oldest)
        self.taken[key] = snapshot
        self.pipeline.wanted[sequence.slot, length] = snapshot
        if sequence.stored == length:  # it is there already
            self.pipeline.save(sequence.slot)

    def withdraw(self, sequence, length):
        mine = {at: snapshot for (slot, at), snapshot in self.pipeline.wanted.items() if slot == sequence.slot}
        if any(self.pipeline.loading(snapshot) for snapshot in mine.values()):
            return False
        for at, snapshot in mine.items():
            assert at > length
            del self.pipeline.wanted[sequence.slot, at]
            key = self.key(sequence, at)
            assert self.taken[key] == snapshot
            # The place stays counted, under a key that nothing matches.
            self.taken[("void", snapshot)] = self.taken.pop(key)
        return True

    def in_use(self, snapshot):
        return self.pipeline.loading(snapshot) or snapshot in self.pipeline.wanted.values()

    def cut_point(self, sequence, length):
        return length if length == sequence.computed else self.match(sequence, length)

    def cut(self, sequence, length):
        if length != sequence.computed:
            snapshot = self.taken[self.key(sequence, length)] if length else None
            self.pipeline.load(sequence.slot, snapshot, length)

    def carried(self):
        return [(key, snapshot) for key, snapshot in reversed(self.taken.items()) if key[0] != "void"]

    def adopt(self, key):
        if key in self.taken or len(self.taken) == self.n_snapshots:
            return None
        self.taken[key] = len(self.taken)
        self.taken.move_to_end(key, last=False)
        return self.taken[key]

    def key(self, sequence, length):
        return sequence.submit.cache_scope, tuple(sequence.tokens(0, length))

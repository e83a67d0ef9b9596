"""Both kinds of state through the same scheduler: the scripted pipelines fail on any state put back wrongly."""

from collections import defaultdict

import pytest

from engine.kv_cache.blocks import BlockPool
from engine.kv_cache.state import EveryKind, PagedKV
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.engine_in_process import Engine
from tests.engine.kv_cache.fixed_slot import FixedSlot, RecurrentPipeline
from tests.engine.scripted import ScriptedPipeline, expected_tokens, submit

BLOCK = 4


def sequence_of(tokens, max_tokens=50):
    return Sequence(submit(0, tokens), len(tokens) + max_tokens)


@pytest.fixture(params=["lazy", "eager"])
def mixed(request):
    """An engine for a model that mixes kinds: blocks of 4 tokens, snapshots at multiples of 6, chunks of 6."""
    return mixed_engine(request.param == "eager")


def mixed_engine(eager=False, **rest):
    pipeline = RecurrentPipeline(BLOCK, eager)
    kind = FixedSlot(pipeline, every=6, n_snapshots=20)
    chunks = {"prefill_chunk": 6, "prefill_chunk_idle": 6, "prefill_chunk_fixed": True}
    return Engine(block_tokens=BLOCK, pipeline=pipeline, other_kinds=(kind,), **chunks, **rest)


def check(engine, *submits):
    for one in submits:
        expected, reason = expected_tokens(one)
        assert engine.tokens[one.sequence] == expected[len(one.generated_ids) :]
        assert engine.ends[one.sequence] == [reason]
    assert engine.pool.used == 0


# Paged KV alone.


def test_paged_matches_whole_blocks_and_leaves_one_token_to_compute():
    pool = BlockPool(8, block_tokens=BLOCK)
    paged, first = PagedKV(pool), sequence_of(range(10))
    paged.reserve(first, 10)
    paged.commit(first, 10)
    assert paged.match(sequence_of(range(10)), 9) == 8
    assert paged.match(sequence_of(range(8)), 7) == 4
    assert paged.match(sequence_of([0, 1, 2, 3, 4, 5, 6, 9, 8]), 8) == 4
    assert paged.match(sequence_of([9, *range(1, 10)]), 9) == 0


def test_paged_cuts_anywhere_but_never_into_a_block_that_is_shared():
    pool = BlockPool(8, block_tokens=BLOCK)
    paged, sequence = PagedKV(pool), sequence_of(range(20))
    paged.reserve(sequence, 18)
    paged.commit(sequence, 9)
    assert [paged.cut_point(sequence, length) for length in (18, 13, 9, 8, 7, 3)] == [18, 13, 9, 8, 4, 0]
    paged.cut(sequence, 9)
    assert (len(sequence.blocks), sequence.cached_blocks, pool.used) == (3, 2, 3)
    paged.cut(sequence, 4)
    assert (len(sequence.blocks), sequence.cached_blocks, pool.used, pool.cached) == (1, 1, 1, 1)
    paged.cut(sequence, 0)
    assert (pool.used, pool.cached) == (0, 2)
    pool.audit([])


def test_paged_withdraws_what_nobody_else_holds():
    pool = BlockPool(8, block_tokens=BLOCK)
    paged, first, second = PagedKV(pool), sequence_of(range(16)), sequence_of(range(16))
    paged.reserve(first, 16)
    paged.commit(first, 16)
    assert paged.withdraw(first, 9)
    assert paged.match(second, 15) == 8
    paged.restore(second, 8)
    assert paged.withdraw(first, 8)
    assert not paged.withdraw(first, 5)
    assert paged.match(second, 15) == 8


def test_admission_counts_idle_blocks_once():
    pool = BlockPool(6, block_tokens=BLOCK)
    paged, first = PagedKV(pool), sequence_of(range(16))
    paged.reserve(first, 16)
    paged.commit(first, 16)
    paged.cut(first, 0)
    # 2 free and 4 idle blocks; 6 are needed, of which 4 are those idle ones.
    assert paged.admits(sequence_of(range(23)), 16, 0)
    assert not paged.admits(sequence_of(range(23)), 16, 1)
    assert not paged.admits(sequence_of(range(25)), 16, 0)
    assert not paged.admits(sequence_of(range(50, 74)), 0, 1)


# Kinds that must agree.


def test_kinds_agree_on_the_greatest_common_length():
    class Multiples:
        def __init__(self, of):
            self.of = of

        def match(self, sequence, limit):
            return limit // self.of * self.of

        cut_point = match

    state = EveryKind((Multiples(4), Multiples(6), Multiples(1)))
    assert [state.match(None, limit) for limit in (40, 36, 35, 11)] == [36, 36, 24, 0]
    assert [state.cut_point(None, limit) for limit in (40, 23)] == [36, 12]


def test_prefix_match_goes_back_to_the_last_snapshot_that_blocks_share(mixed):
    first, same, longer = submit(1, range(30)), submit(2, range(30)), submit(3, [*range(29), 40, 41])
    mixed.submit(first)
    mixed.run()
    mixed.submit(same, longer)
    mixed.run()
    check(mixed, first, same, longer)
    # Of 28 tokens there are full blocks, at 24 there is a snapshot.
    assert mixed.cached[2] == [24]
    assert mixed.cached[3] == [24]


def test_prefix_match_in_flight(mixed):
    submits = [submit(choice, range(30), seed=choice) for choice in range(3)]
    mixed.submit(*submits)
    mixed.run()
    check(mixed, *submits)
    assert [mixed.cached[choice] for choice in range(3)] == [[0], [24], [24]]


def test_preemption_replays_from_a_snapshot():
    engine = mixed_engine(n_blocks=18)
    submits = [submit(i, [i, *range(1, 17)], max_tokens=most) for i, most in enumerate((12, 25, 30))]
    engine.submit(*submits)
    engine.run()
    check(engine, *submits)
    assert engine.steps[-1].stats.preemptions_total == 2
    # The youngest, twice; its blocks reach further, the snapshots were taken while the prompt was read.
    assert [engine.cached[i] for i in range(3)] == [[0], [0], [0, 12, 12]]


class Stepped:
    """A scheduler and a pipeline with nothing in flight between two steps, as a rollback needs it."""

    def __init__(self, kinds, n_blocks):
        self.pool = BlockPool(n_blocks, block_tokens=BLOCK)
        self.pipeline = RecurrentPipeline(BLOCK) if kinds == "mixed" else ScriptedPipeline(BLOCK)
        others = (FixedSlot(self.pipeline, every=6, n_snapshots=20),) if kinds == "mixed" else ()
        self.scheduler = Scheduler(self.pool, 2, 1000, 6, 6, True, others)
        self.tokens = defaultdict(list)

    def step(self):
        sequence = self.scheduler.admit()
        if sequence is not None:
            self.pipeline.admit(sequence.slot, sequence.submit, sequence.generated)
        self.pipeline.launch(self.scheduler.schedule())
        for token in self.scheduler.apply(self.pipeline.collect()):
            self.tokens[token.sequence].append(token.token)
        self.pool.audit(sequence.blocks for sequence in self.scheduler.holding())

    def until(self, sequence, count):
        while len(self.tokens[sequence]) < count:
            self.step()

    def rollback(self, sequence, length):
        self.scheduler.rollback(sequence, length)
        self.pipeline.admit(sequence.slot, sequence.submit, sequence.generated)


@pytest.mark.parametrize("length", [0, 1, 11, 12, 13, 23, 24, 25, 29])
@pytest.mark.parametrize("kinds", ["paged", "mixed"])
def test_rollback_recomputes_from_where_all_kinds_can_be_cut(kinds, length):
    engine = Stepped(kinds, 32)
    one = submit(1, range(27), max_tokens=12)
    engine.scheduler.add(one)
    engine.until(1, 5)
    [sequence] = engine.scheduler.holding()
    stored = sequence.computed
    engine.rollback(sequence, length)
    # Blocks up to 28 are shared, snapshots at 6, 12, 18, 24 and 30.
    expected = {"paged": length if length >= 28 else length // 4 * 4, "mixed": min(length // 12 * 12, 24)}
    assert sequence.computed == expected[kinds] < stored
    engine.until(1, 12)
    assert engine.tokens[1] == expected_tokens(one)[0]
    assert engine.scheduler.idle


@pytest.mark.parametrize("n_blocks", range(9, 20))
@pytest.mark.parametrize("kinds", ["paged", "mixed"])
def test_rollback_beside_another_sequence_however_little_room_there_is(kinds, n_blocks):
    engine = Stepped(kinds, n_blocks)
    one, two = submit(1, range(13), max_tokens=20), submit(2, range(20, 25), max_tokens=20)
    engine.scheduler.add(one)
    engine.scheduler.add(two)
    for count in (6, 12, 18):
        engine.until(1, count)
        engine.rollback(engine.scheduler.holding()[0], 7)
    engine.until(1, 20)
    engine.until(2, 20)
    for each in (one, two):
        assert engine.tokens[each.sequence] == expected_tokens(each)[0]
    assert engine.scheduler.idle


def test_carry_over_to_another_engine_goes_by_key():
    old, new = mixed_engine(), mixed_engine()
    texts = [submit(i, [i, *range(1, 30)], max_tokens=20) for i in range(3)]
    old.submit(*texts)
    old.turn(20)
    sent = [list(old.tokens[i]) for i in range(3)]
    assert all(sent)
    old.run()
    for before, after in zip(kinds_of(old), kinds_of(new), strict=True):
        carried = before.carried()
        assert carried
        places = [(place, after.adopt(key)) for key, place in carried]
        assert all(to is not None for _, to in places)
        assert after.adopt(carried[0][0]) is None
        for place, to in places:
            copy_piece(before, old.pipeline, place, new.pipeline, to)
    new.audit()
    resumed = [submit(i, text.prompt_ids, sent[i], max_tokens=20) for i, text in enumerate(texts)]
    new.submit(*resumed)
    new.run()
    check(new, *resumed)
    assert [new.cached[i] for i in range(3)] == [[24], [24], [24]]


def kinds_of(engine):
    return engine.scheduler._state._kinds


def copy_piece(kind, old, place, new, to):
    if isinstance(kind, PagedKV):
        for offset in range(BLOCK):
            new.storage[to, offset] = old.storage[place, offset]
    else:
        new.snapshots[to] = old.snapshots[place]


def test_carry_over_takes_the_best_first_and_stops_when_full():
    old, new = BlockPool(8, block_tokens=BLOCK), BlockPool(2, block_tokens=BLOCK)
    paged, idle, held = PagedKV(old), sequence_of(range(8)), sequence_of(range(50, 58))
    for sequence in (idle, held):
        paged.reserve(sequence, 8)
        paged.commit(sequence, 8)
    paged.cut(idle, 0)
    adopted = [new.adopt(key) for key, _ in paged.carried()]
    assert [place is not None for place in adopted] == [True, True, False, False]
    other = PagedKV(new)
    assert other.match(sequence_of(range(50, 58)), 8) == 8
    # What was adopted first is taken again last.
    new.release(new.allocate())
    assert other.match(sequence_of(range(50, 58)), 8) == 4

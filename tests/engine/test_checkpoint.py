"""State that goes from one engine to the next: nothing is computed twice, and nothing wrong is ever used."""

import os

import msgspec
import pytest

from engine import checkpoint
from engine.checkpoint import PIECES_AT, TRAILER
from engine.errors import HandshakeError
from engine.messages import Checkpoint, Checkpointed, Hello, Stop, Trim
from tests.engine.engine_in_process import Engine
from tests.engine.kv_cache.fixed_slot import FixedSlot, RecurrentPipeline
from tests.engine.scripted import expected_tokens, submit

BLOCK = 4
ENDLESS = 1 << 40
PIECE = 8 * BLOCK


@pytest.fixture
def carry():
    descriptor = os.memfd_create("carry")
    yield descriptor
    os.close(descriptor)


def stop_at(engine, turns, budget=ENDLESS) -> Checkpointed:
    """Some turns of life, then its checkpoint."""
    engine.turn(turns)
    engine.box.incoming.append(Checkpoint(budget))
    engine.turn()
    [done] = [answer for answer in engine.answers if isinstance(answer, Checkpointed)]
    return done


def resumed(engine, submits):
    """Those that had not ended, as the service submits them again."""
    return [
        msgspec.structs.replace(each, generated_ids=[*each.generated_ids, *engine.tokens[each.sequence]])
        for each in submits
        if not engine.ends[each.sequence]
    ]


def go_on(carry, submits, old, **settings):
    """The next engine, which has ended all of them; what it restored."""
    new = Engine(carry=carry, **settings)
    restored = new.carrier.restore()
    new.audit()
    new.submit(*resumed(old, submits))
    new.run()
    for each in submits:
        assert old.tokens[each.sequence] + new.tokens[each.sequence] == expected_tokens(each)[0]
    return new, restored


def read_again(engine):
    return sum(step.stats.prefill_tokens for step in engine.steps)


TEXTS = [
    submit(1, range(13), max_tokens=30),
    submit(2, range(13), max_tokens=30),
    submit(3, range(5), max_tokens=30, cache_prompt=False),
    submit(4, range(40, 48), max_tokens=30, cache_scope="other"),
]


@pytest.mark.parametrize("turns", range(1, 20))
@pytest.mark.parametrize("eager", [False, True])
def test_whatever_the_moment_only_new_tokens_are_computed(carry, turns, eager):
    """Sequences with the same text too, and one that shares with nobody: each goes on in the middle of its block."""
    old = Engine(carry=carry, eager=eager)
    old.submit(*TEXTS)
    done = stop_at(old, turns)
    stored = {s.submit.sequence: s.stored for s in old.scheduler.running}
    live = resumed(old, TEXTS)
    to_read = sum(len(s.prompt_ids) + len(s.generated_ids) - stored.get(s.sequence, 0) for s in live)
    shared = 12  # one that had not read them itself finds the whole blocks of another
    new, restored = go_on(carry, TEXTS, old)
    assert restored.pieces == done.blocks
    assert restored.skipped == 0
    assert to_read - shared <= read_again(new) <= to_read
    if len(stored) == 4 and not any(s.reading for s in old.scheduler.running):
        assert read_again(new) == 4, "one token each: the one that had been told and not yet computed on"
    assert os.fstat(carry).st_size == 0, "the memory is given back"


def test_a_checkpoint_ends_the_work_and_only_stop_is_heard(carry):
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    stop_at(old, 8)
    said = len(old.steps)
    old.submit(submit(9, range(5)))
    old.cancel(1)
    old.box.incoming.append(Trim(1, "pools"))
    assert old.loop.step()
    assert old.loop.turn_began is not None
    old.box.incoming.append(Stop())
    assert not old.loop.step()
    old.read()
    assert len(old.steps) == said
    assert old.pipeline.in_flight == 0


def test_the_next_engine_reads_what_was_not_carried(carry):
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    done = stop_at(old, 12, budget=3 * PIECE + 1)
    assert (done.blocks, done.bytes) == (3, 3 * PIECE)
    new, restored = go_on(carry, TEXTS, old)
    assert restored.pieces == 3
    assert read_again(new) > 4


def test_live_sequences_come_before_what_is_only_cached(carry):
    old = Engine(carry=carry)
    past = submit(8, range(20, 40), max_tokens=2)
    old.submit(past)
    old.run()
    old.submit(TEXTS[0])
    done = stop_at(old, 6, budget=5 * PIECE)
    assert old.scheduler.running[0].stored in range(17, 21)
    new, restored = go_on(carry, TEXTS[:1], old)
    assert restored.pieces == done.blocks == 5
    assert read_again(new) == 1


def test_the_cache_is_carried_too(carry):
    old = Engine(carry=carry)
    old.submit(submit(8, range(20, 40), max_tokens=2))
    old.run()
    stop_at(old, 0)
    new = Engine(carry=carry)
    new.carrier.restore()
    again = submit(9, range(20, 40), max_tokens=4)
    new.submit(again)
    new.run()
    assert new.cached[9] == [16]
    assert new.tokens[9] == expected_tokens(again)[0]


def test_the_end_of_a_text_is_for_that_text_alone(carry):
    """Whatever else comes under the number of its sequence: the same blocks before it, and other tokens in the last."""
    old = Engine(carry=carry)
    old.submit(submit(1, range(14), max_tokens=30))
    stop_at(old, 1)
    assert old.scheduler.running[0].stored % BLOCK
    new = Engine(carry=carry)
    new.carrier.restore()
    other = submit(1, [*range(12), 40, 41, 42], max_tokens=30)
    new.submit(other)
    new.run()
    assert new.tokens[1] == expected_tokens(other)[0]


@pytest.mark.parametrize("least", [0, 3])
def test_no_more_of_the_cache_is_carried_than_live_sequences_have(carry, monkeypatch, least):
    """Or than a little, where they have less: everybody waits while it is copied."""
    monkeypatch.setattr(checkpoint, "CACHE_BYTES", least * PIECE)
    old = Engine(carry=carry)
    old.submit(submit(8, range(7, 47), max_tokens=2))
    old.run()
    assert old.pool.cached == 10
    live = submit(9, range(7), max_tokens=30)
    old.submit(live)
    done = stop_at(old, 1)
    held = -(-old.scheduler.running[0].stored // BLOCK)
    assert done.blocks == held + max(held, least)
    go_on(carry, [live], old)


def test_a_smaller_engine_takes_what_it_has_room_for(carry):
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    done = stop_at(old, 12)
    _, restored = go_on(carry, TEXTS, old, n_blocks=12)
    assert restored.pieces == 12 < done.blocks


def test_no_budget_carries_nothing(carry):
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    assert stop_at(old, 12, budget=0).blocks == 0
    _, restored = go_on(carry, TEXTS, old)
    assert (restored.pieces, restored.skipped) == (0, 0)


def test_an_engine_without_memory_to_carry_in_still_rests():
    old = Engine()
    old.submit(*TEXTS)
    assert stop_at(old, 5) == Checkpointed(0, 0, 0.0)


def test_a_piece_whose_bytes_have_changed_is_not_used(carry):
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    done = stop_at(old, 12)
    for piece in (0, 5):
        at = PIECES_AT + piece * PIECE + 3
        [byte] = os.pread(carry, 1, at)
        os.pwrite(carry, bytes([byte ^ 0x10]), at)
    new, restored = go_on(carry, TEXTS, old)
    assert (restored.pieces, restored.skipped) == (done.blocks - 2, 2)
    assert read_again(new) > 4


@pytest.mark.parametrize("other", [{"block_tokens": 8}, {"fingerprint": "another model"}])
def test_state_of_another_engine_is_counted_and_left(carry, other):
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    done = stop_at(old, 12)
    new, restored = go_on(carry, TEXTS, old, **other)
    assert (restored.pieces, restored.skipped) == (0, done.blocks)
    assert read_again(new) > 4


@pytest.mark.parametrize("spoil", ["no trailer", "half a trailer", "wrong index"])
def test_what_was_not_written_to_its_end_is_not_there(carry, spoil, capfd):
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    stop_at(old, 12)
    if spoil == "no trailer":
        os.pwrite(carry, bytes(TRAILER.size), 0)
    elif spoil == "half a trailer":
        os.ftruncate(carry, TRAILER.size - 1)
    else:
        _, at, length, _ = TRAILER.unpack(os.pread(carry, TRAILER.size, 0))
        os.pwrite(carry, b"\0", at + length - 1)
    _, restored = go_on(carry, TEXTS, old)
    assert (restored.pieces, restored.skipped) == (0, 0)
    assert ("wrong checksum" in capfd.readouterr().err) == (spoil == "wrong index")


def test_a_host_without_memory_carries_nothing(carry, monkeypatch, capfd):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    old = Engine(carry=carry)
    old.submit(*TEXTS)
    assert stop_at(old, 12).blocks == 0
    assert capfd.readouterr().err.startswith("no KV is carried over: ")
    _, restored = go_on(carry, TEXTS, old)
    assert restored.pieces == 0


@pytest.mark.parametrize("turns", range(2, 24, 3))
def test_kinds_that_go_back_to_snapshots_agree_on_where_to_go_on(carry, turns):
    def mixed():
        pipeline = RecurrentPipeline(BLOCK)
        kind = FixedSlot(pipeline, every=6, n_snapshots=20)
        chunks = {"prefill_chunk": 6, "prefill_chunk_idle": 6, "prefill_chunk_fixed": True}
        return {"pipeline": pipeline, "other_kinds": (kind,), **chunks}

    old = Engine(carry=carry, **mixed())
    old.submit(*TEXTS[:2])
    stop_at(old, turns)
    new, restored = go_on(carry, TEXTS[:2], old, **mixed())
    assert restored.pieces > 0
    assert any(new.cached[sequence] != [0] for sequence in (1, 2)) or turns < 8


def test_a_hello_is_out_of_turn_before_a_checkpoint(carry):
    engine = Engine(carry=carry)
    engine.box.incoming.append(Hello("build", 1, 1, None, 3))
    with pytest.raises(HandshakeError):
        engine.loop.step()

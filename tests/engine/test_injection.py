import os
import time

import pytest

from engine import injection
from engine.errors import OutOfMemory
from engine.faults import parse_faults
from engine.injection import FaultyOutbox, FaultyPipeline, Happened
from engine.memory.simulated_gpus import FILE_NAME
from engine.messages import LoadProgress, Step, StepStats, Token
from engine.sequence import DecodeRow, PrefillChunk, StepPlan
from tests.engine.cards import MIB, simulated
from tests.engine.scripted import ScriptedPipeline, submit

STATS = StepStats(*[0] * 10, seconds=0.0)


class Died(BaseException):
    pass


@pytest.fixture(autouse=True)
def _deaths_are_seen(monkeypatch):
    def die():
        raise Died

    monkeypatch.setattr(injection, "die", die)


@pytest.fixture
def carry():
    descriptor = os.memfd_create("carry")
    yield descriptor
    os.close(descriptor)


class Sent(list):
    send = list.append


def steps(*sizes):
    return [Step(n, [Token(1, 5)] * size, [], [], STATS) for n, size in enumerate(sizes)]


def dies_after(outbox, messages):
    """How many messages it lived to send."""
    for count, message in enumerate(messages):
        try:
            outbox.send(message)
        except Died:
            return count + 1
    return None


@pytest.mark.parametrize(
    ("spec", "lives"), [("crash=after:5tokens", [3, None, None]), ("crash=after:5tokens:every", [3, 3, 3])]
)
def test_it_dies_once_or_always_right_after_the_message_with_the_token(spec, lives, carry):
    faults = parse_faults(spec, 0)
    for life in lives:
        sent = Sent()
        messages = [LoadProgress("x", 0, 1), *steps(2, 4, 1)]
        assert dies_after(FaultyOutbox(sent, faults, Happened(carry)), messages) == life
        assert sent == messages[: life or 4], "the tokens are told first"


def test_faults_that_have_happened_are_known_however_the_memory_is_used(carry):
    one = Happened(carry)
    one.add(3)
    os.ftruncate(carry, 1 << 16)
    os.pwrite(carry, b"pieces", 4096)
    os.ftruncate(carry, 0)
    other = Happened(os.dup(carry))
    assert [number in other for number in range(5)] == [False, False, False, True, False]
    other.add(0)
    assert [number in one for number in range(5)] == [True, False, False, True, False]
    alone = Happened(None)
    alone.add(1)
    assert 1 in alone
    assert 0 not in alone


def test_a_hang_of_some_seconds_ends():
    outbox = FaultyOutbox(Sent(), parse_faults("hang=after:2tokens:0.2", 0), Happened(None))
    began = time.monotonic()
    outbox.send(steps(2)[0])
    assert time.monotonic() - began >= 0.2


def faulty(spec, carry=None, cards=None):
    return FaultyPipeline(ScriptedPipeline(4), parse_faults(spec, 2), Happened(carry), cards)


def start(pipeline, slot, one):
    pipeline.admit(slot, one, one.generated_ids)
    return StepPlan(1, [], PrefillChunk(slot, one.prompt_ids, 0, [slot], True, 0))


def test_poison_acts_when_its_request_is_launched():
    pipeline = faulty("poison=user:X")
    pipeline.launch(start(pipeline, 0, submit(1, [1, 2])))
    plan = start(pipeline, 1, submit(2, [3, 4], poison=True))
    with pytest.raises(Died):
        pipeline.launch(plan)


def test_memory_is_short_whenever_the_request_of_that_number_runs(carry):
    pipeline = faulty("oom=request:2", carry)
    pipeline.launch(start(pipeline, 0, submit(7, [1])))
    pipeline.collect()
    resumed = submit(9, [1], [2])
    pipeline.launch(start(pipeline, 2, resumed))
    pipeline.collect()
    pipeline.admit(0, submit(7, [1]), [])
    plan = start(pipeline, 1, submit(8, [1]))
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            pipeline.launch(plan)
    with pytest.raises(OutOfMemory):
        pipeline.launch(StepPlan(2, [DecodeRow(1, 1, [1], 1)], None))
    assert pipeline.in_flight == 0
    following = faulty("oom=request:2", carry)
    for n in range(3):
        following.launch(start(following, n, submit(n, [1])))
        following.collect()


def test_leaks_add_up_to_what_the_card_has_and_spare_those_that_resume(tmp_path):
    gpus = simulated(tmp_path, 700, 700)
    room = gpus.free(1)
    pipeline = faulty("leak=30MiB/request@1", cards=str(tmp_path / FILE_NAME))
    for n in range(4):
        start(pipeline, n, submit(n, [1]))
        assert room - gpus.free(1) == min(room, (n + 1) * 30 * MIB)
    assert gpus.free(1) == 0
    start(pipeline, 0, submit(9, [1], [2]))
    [row] = gpus.rows()
    assert (row.owner, row.size) == ("leak", room)

"""The loop: what it launches before it collects, when it sleeps, what it says and how it stops."""

import time

import pytest

from engine.errors import HandshakeError
from engine.messages import Hello, Step, Stop
from engine.messages import Submit as SubmitMessage
from tests.engine.engine_in_process import Engine
from tests.engine.scripted import BAD_TOKEN, ScriptedPipeline, expected_tokens, submit


class Watched(ScriptedPipeline):
    """Notes the order of calls."""

    def launch(self, plan):
        self.calls.append(("launch", plan.step))
        super().launch(plan)

    def collect(self):
        result = super().collect()
        self.calls.append(("collect", result.step))
        return result


@pytest.fixture
def watched():
    pipeline = Watched(4)
    pipeline.calls = []
    return Engine(pipeline=pipeline)


def test_the_next_step_is_launched_before_the_last_is_collected(watched):
    watched.submit(submit(1, range(5), max_tokens=4))
    watched.run()
    assert watched.pipeline.calls == [
        ("launch", 1),
        *[(verb, step) for n in (1, 2, 3) for verb, step in (("launch", n + 1), ("collect", n))],
        ("collect", 4),
    ]


def test_every_step_is_one_message_with_all_tokens(watched):
    watched.submit(*[submit(i, [i, 1, 2], max_tokens=6) for i in range(3)])
    watched.run()
    collected = [step for step in watched.steps if step.stats.decode_rows or step.stats.prefill_tokens]
    assert [step.step for step in collected] == list(range(1, len(collected) + 1))
    assert max(len(step.tokens) for step in collected) == 3
    assert all(step.stats.seconds >= 0 for step in watched.steps)
    assert [step.stats.kv_blocks for step in watched.steps] == [64] * len(watched.steps)


def test_log_probabilities_pass_through(watched):
    one = submit(1, range(5), max_tokens=3)
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    sampling = {name: getattr(one.sampling, name) for name in one.sampling.__struct_fields__}
    watched.submit(SubmitMessage(**{**fields, "sampling": type(one.sampling)(**{**sampling, "logprobs": 0})}))
    watched.run()
    assert [token.logprob for step in watched.steps for token in step.tokens] == [-1.0] * 3


def test_it_sleeps_only_when_there_is_nothing_to_do(watched):
    timeouts = []
    poll = watched.box.poll

    def noted(timeout):
        timeouts.append((timeout, watched.loop.turn_began is None))
        return poll(timeout)

    watched.box.poll = noted
    for sequence in (1, 2):
        watched.submit(submit(sequence, range(5), max_tokens=3))
        watched.run()
    assert timeouts[0] == (None, True)
    assert timeouts.count((None, True)) == 2
    assert set(timeouts) == {(None, True), (0, False)}
    began = watched.loop.turn_began
    assert began is not None
    assert began <= time.monotonic()


def test_a_late_arrival_joins_the_batch(watched):
    one, two = submit(1, range(5), max_tokens=20), submit(2, range(9), max_tokens=20)
    watched.submit(one)
    watched.turn(6)
    watched.submit(two)
    watched.run()
    for each in (one, two):
        assert watched.tokens[each.sequence] == expected_tokens(each)[0]
    assert max(len(step.tokens) for step in watched.steps) == 2


def test_a_sequence_that_the_model_refuses_fails_alone(watched):
    one, two = submit(1, [3, BAD_TOKEN]), submit(2, range(5))
    watched.submit(one, two)
    watched.run()
    assert watched.ends == {1: ["bad_request"], 2: ["length"]}
    assert watched.released == [1, 2]


def test_stop_drops_what_was_not_begun_and_drains(watched):
    watched.submit(submit(1, range(5), max_tokens=50), submit(2, range(9), max_tokens=50))
    watched.turn(5)
    computed = watched.pipeline.computed_rows
    watched.box.incoming.append(Stop())
    watched.loop.run()
    watched.read()
    assert watched.pipeline.in_flight == 0
    assert watched.pipeline.computed_rows == computed
    assert watched.pool.used == 0
    assert sorted(watched.released) == [1, 2]


def test_stop_ends_an_idle_loop(watched):
    watched.box.incoming.append(Stop())
    watched.loop.run()
    assert watched.pipeline.calls == []


def test_a_message_out_of_turn_breaks_the_connection(watched):
    watched.box.incoming.append(Hello("build", 1, 1, None, 3))
    with pytest.raises(HandshakeError, match="Hello"):
        watched.loop.step()


def test_turns_that_change_nothing_say_nothing(watched):
    watched.cancel(5)
    watched.box.incoming.append(Stop())
    watched.loop.run()
    assert not [message for message in watched.box.outgoing if isinstance(message, Step)]

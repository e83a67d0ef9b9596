"""Out of memory in a step: trim, retry, preempt the newest, retry; only one that is alone fails."""

import pytest

from engine.errors import OutOfMemory
from engine.messages import Submit
from tests.engine.engine_in_process import Engine
from tests.engine.scripted import ScriptedPipeline, expected_tokens, submit
from tests.engine.tiny_cards import GROUP_BLOCKS, TinyCards


class Tight(ScriptedPipeline):
    """Runs out of memory where `refuses` says so of (submits in the step, tokens of its prompt chunk)."""

    def __init__(self, refuses, **rest):
        super().__init__(4, **rest)
        self.refuses = refuses
        self.who: dict[int, Submit] = {}
        self.refused = 0

    def admit(self, slot, submit, generated):
        super().admit(slot, submit, generated)
        self.who[slot] = submit

    def launch(self, plan):
        slots = [row.slot for row in plan.decode] + ([plan.prefill.slot] if plan.prefill else [])
        if self.refuses([self.who[slot] for slot in slots], len(plan.prefill.tokens) if plan.prefill else 0):
            self.refused += 1
            raise OutOfMemory(1, "scratch", 4096, 0)
        super().launch(plan)


def run(refuses, *submits, eager=False, **settings):
    engine = Engine(pipeline=Tight(refuses, eager=eager), **settings)
    engine.submit(*submits)
    engine.run()
    for each in submits:
        expected, reason = expected_tokens(each)
        if engine.ends[each.sequence] != ["oom_alone"]:
            assert engine.tokens[each.sequence] == expected
            assert engine.ends[each.sequence] == [reason]
        else:
            assert engine.tokens[each.sequence] == expected[: len(engine.tokens[each.sequence])]
    assert engine.pool.used == 0
    assert sorted(engine.released) == sorted(each.sequence for each in submits)
    return engine


TEXTS = [submit(n, range(n, n + 3 + 5 * n), max_tokens=12) for n in range(4)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_as_many_run_as_there_is_memory_for(most, eager):
    """The newest wait and are replayed; nobody fails, and nobody is tried again before another has ended."""
    engine = run(lambda there, _: len(there) > most, *TEXTS, eager=eager)
    assert all(ends == ["length"] for ends in engine.ends.values())
    assert max(step.stats.running for step in engine.steps) <= most + 1
    assert 0 < engine.pipeline.refused <= 2 * len(TEXTS)
    assert engine.steps[-1].stats.preemptions_total == engine.pipeline.refused


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("culprit", range(4))
def test_one_that_never_fits_fails_once_it_is_alone(culprit, eager):
    engine = run(lambda there, _: any(each.sequence == culprit for each in there), *TEXTS, eager=eager)
    assert engine.ends[culprit] == ["oom_alone"]
    assert [ends for sequence, ends in engine.ends.items() if sequence != culprit] == [["length"]] * 3
    assert [step.stats.running for step in engine.steps if culprit in step.released] == [0]


def test_a_chunk_that_does_not_fit_fails_though_its_prompt_was_cached_before_it_was_read():
    """The blocks that it was about to fill are nobody's."""
    texts = [submit(1, range(30), max_tokens=4), submit(2, range(30), max_tokens=4)]
    engine = run(lambda there, tokens: tokens > 20, *texts, prefill_chunk_idle=100)
    assert engine.ends == {1: ["oom_alone"], 2: ["oom_alone"]}
    assert engine.pool.cached == 0


def test_what_can_be_trimmed_goes_first():
    cards = TinyCards()
    elastic = {"group_blocks": GROUP_BLOCKS, "minimum": 8}
    enough = {"at": 0}

    def refuses(there, _):
        return len(there) > 1 and cards.free(1) < enough["at"]

    engine = Engine(64, pipeline=Tight(refuses), elastic=elastic, cards=cards)
    enough["at"] = cards.free(1) + 5 * 4096
    engine.submit(*TEXTS)
    engine.run()
    assert engine.steps[-1].stats.preemptions_total == 0
    assert [cards.missing(device) for device in (0, 1)] == [0, 4 * 4096]
    assert engine.pool.n_blocks == 64 - GROUP_BLOCKS
    assert [answer.devices[1]["cuda_graphs"] for answer in engine.answers][-1] == 0
    assert all(engine.tokens[each.sequence] == expected_tokens(each)[0] for each in TEXTS)


def test_preempting_makes_more_to_trim():
    """Blocks of the preempted go with the cache, so that the older ones have room on the card."""
    cards = TinyCards()
    wanted = {"at": 0}
    engine = Engine(
        16,
        pipeline=Tight(lambda there, _: len(there) > 1 and cards.free(1) < wanted["at"]),
        elastic={"group_blocks": GROUP_BLOCKS, "minimum": 4},
        cards=cards,
        max_context=16,
    )
    wanted["at"] = cards.free(1) + (2 + 2 + 3 * 2) * 4096
    texts = [submit(n, [n] * 8, max_tokens=8) for n in range(4)]
    engine.submit(*texts)
    engine.run()
    assert engine.steps[-1].stats.preemptions_total > 0
    assert all(engine.tokens[each.sequence] == expected_tokens(each)[0] for each in texts)
    assert engine.pool.n_blocks < 16

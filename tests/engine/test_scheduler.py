"""The scheduler's rules one by one, through the loop and a scripted pipeline."""

import pytest

from tests.engine.engine_in_process import Engine
from tests.engine.scripted import BAD_ROW, BAD_TOKEN, expected_tokens, submit

# Blocks have 4 tokens unless a test says otherwise.


def check(engine, *submits, max_context=1000):
    for one in submits:
        expected, reason = expected_tokens(one, max_context)
        assert engine.tokens[one.sequence] == expected[len(one.generated_ids) :]
        assert engine.ends[one.sequence] == [reason]
        assert engine.released.count(one.sequence) == 1
    assert engine.pool.used == 0
    assert engine.scheduler.holding() == []


def run(engine, *submits, **rest):
    engine.submit(*submits)
    engine.run()
    check(engine, *submits, **rest)


# How a sequence ends.


def test_one_sequence_from_prompt_to_limit():
    engine = Engine()
    run(engine, submit(1, range(10), max_tokens=7))
    assert [step.stats.decode_rows for step in engine.steps] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [step.stats.prefill_tokens for step in engine.steps] == [0, 10, 0, 0, 0, 0, 0, 0]
    assert [len(step.tokens) for step in engine.steps] == [0, 1, 1, 1, 1, 1, 1, 1]


def test_one_token_needs_no_decode():
    engine = Engine()
    run(engine, submit(1, range(10), max_tokens=1))
    assert engine.pipeline.computed_rows == 10


def test_stop_id_ends_it_and_is_reported():
    one = submit(1, range(10), max_tokens=50)
    stop = expected_tokens(one)[0][6]
    one = submit(1, range(10), max_tokens=50, stop_ids=(60, stop))
    engine = Engine()
    run(engine, one)
    assert engine.ends[1] == ["stop"]
    assert engine.tokens[1][-1] == stop


def test_context_ends_it_with_length():
    engine = Engine(max_context=16)
    run(engine, submit(1, range(10), max_tokens=50), max_context=16)
    assert len(engine.tokens[1]) == 6


def test_the_last_block_of_the_pool_is_enough():
    # 5 blocks hold 20 tokens; of 13 + 8 tokens the last is never computed on.
    engine = Engine(n_blocks=5)
    run(engine, submit(1, range(13), max_tokens=8))


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (submit(1, range(13), max_tokens=9), "does_not_fit"),
        (submit(1, []), "bad_request"),
        (submit(1, [1, -1]), "bad_request"),
        (submit(1, [1, 2**31]), "bad_request"),
        (submit(1, [1], [2**40]), "bad_request"),
        (submit(1, range(30), max_tokens=9), "bad_request"),
        (submit(1, range(5), [7, 7, 7], max_tokens=3), "bad_request"),
        (submit(1, [1, BAD_TOKEN]), "bad_request"),
        (submit(1, [1, BAD_ROW]), "bad_row"),
    ],
)
def test_a_sequence_that_cannot_be_served_fails_alone(one, code):
    engine = Engine(n_blocks=5, max_context=30)
    other = submit(2, range(6), max_tokens=5)
    engine.submit(one, other)
    engine.run()
    check(engine, other)
    assert engine.ends[1] == [code]
    assert engine.tokens[1] == []


# Prefix cache.


def test_full_blocks_of_an_earlier_prompt_are_taken_from_the_cache():
    engine = Engine()
    run(engine, submit(1, range(20)))
    run(engine, submit(2, [*range(17), 40, 41, 42]))
    assert engine.cached == {1: [0], 2: [16]}
    stats = engine.steps[-1].stats
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (40, 16)


def test_generated_text_is_cached_too():
    engine = Engine()
    one = submit(1, range(6), max_tokens=12)
    run(engine, one)
    run(engine, submit(2, [*range(6), *engine.tokens[1], 40, 41]))
    # 17 tokens were computed on: the last one was not.
    assert engine.cached[2] == [16]


def test_a_full_hit_gives_up_its_last_block():
    engine = Engine()
    run(engine, submit(1, range(16)))
    run(engine, submit(2, range(16), max_tokens=3))
    assert engine.cached[2] == [12]


def test_choices_of_one_prompt_share_its_blocks_while_it_is_being_read():
    engine = Engine(max_batch=8)
    choices = [submit(i, range(18), max_tokens=20, seed=i) for i in range(4)]
    engine.submit(*choices)
    engine.turn(6)
    assert engine.cached == {0: [0], 1: [16], 2: [16], 3: [16]}
    # 4 shared blocks, and for each its own: the prompt's rest, its tokens so far and one ahead.
    assert engine.pool.used <= 4 + 4 * 2
    engine.run()
    check(engine, *choices)


def test_scopes_do_not_see_each_other():
    engine = Engine()
    run(engine, submit(1, range(20), cache_scope="a"))
    run(engine, submit(2, range(20), cache_scope="b"), submit(3, range(20), cache_scope="a"))
    assert engine.cached == {1: [0], 2: [0], 3: [16]}


def test_a_sequence_may_neither_use_nor_feed_the_cache():
    engine = Engine()
    run(engine, submit(1, range(20), cache_prompt=False))
    assert engine.pool.cached == 0
    run(engine, submit(2, range(20)))
    run(engine, submit(3, range(20), cache_prompt=False))
    assert engine.cached == {1: [0], 2: [0], 3: [0]}
    assert engine.steps[-1].stats.prefix_queries_total == 20


def test_the_prompt_unused_for_longest_is_forgotten_first_from_its_end():
    engine = Engine(n_blocks=12)
    first, second = submit(1, range(16), max_tokens=1), submit(2, range(20, 36), max_tokens=1)
    run(engine, first)
    run(engine, second)
    assert engine.pool.cached == 8
    # 6 of 12 blocks: the 4 free ones, and the end of the first prompt.
    run(engine, submit(3, [45] * 23, max_tokens=1))
    run(engine, submit(4, first.prompt_ids, max_tokens=1))
    run(engine, submit(5, second.prompt_ids, max_tokens=1))
    assert engine.cached[4] == [8]
    assert engine.cached[5] == [12]


def test_the_token_after_the_end_is_neither_sent_nor_cached():
    one = submit(1, range(6), max_tokens=50)
    tokens = expected_tokens(one)[0]
    # Prompt and output up to the stop id fill 4 blocks, and the row behind it would compute the last of these.
    stop = tokens[9]
    assert stop not in tokens[:9]
    for eager in (False, True):
        engine = Engine(eager=eager)
        run(engine, submit(1, range(6), max_tokens=50, stop_ids=(stop,)))
        run(engine, submit(2, [*range(6), *tokens[:10], 1, 2]))
        assert engine.cached[2] == [12]


# Chunks.


def chunks(engine):
    return [step.stats.prefill_tokens for step in engine.steps if step.stats.prefill_tokens]


def test_a_lone_prompt_is_read_in_large_chunks():
    engine = Engine(prefill_chunk=8, prefill_chunk_idle=32)
    run(engine, submit(1, range(40), max_tokens=1))
    assert chunks(engine) == [32, 8]


def test_chunks_are_small_while_others_decode_who_go_on_at_every_step():
    engine = Engine(prefill_chunk=8, prefill_chunk_idle=32)
    one, two = submit(1, range(10), max_tokens=30), submit(2, range(40), max_tokens=2)
    engine.submit(one)
    engine.turn(3)
    engine.submit(two)
    engine.run()
    check(engine, one, two)
    reading = [step.stats for step in engine.steps if step.stats.prefill_tokens][1:]
    # 8 tokens are in the cache.
    assert [stats.prefill_tokens for stats in reading] == [8, 8, 8, 8]
    assert {stats.decode_rows for stats in reading} == {1}


def test_fixed_chunks_end_at_multiples_whoever_else_runs():
    engine = Engine(prefill_chunk=16, prefill_chunk_idle=64, prefill_chunk_fixed=True)
    run(engine, submit(1, range(45), max_tokens=1))
    assert chunks(engine) == [16, 16, 13]
    run(engine, submit(2, [*range(20), *[40] * 20], max_tokens=1))
    assert chunks(engine)[3:] == [12, 8]


def test_one_prompt_is_read_at_a_time_in_order_of_arrival():
    engine = Engine(prefill_chunk=8, prefill_chunk_idle=8)
    prompts = [submit(i, [i] * 20, max_tokens=4) for i in range(4)]
    engine.submit(*prompts)
    engine.run()
    check(engine, *prompts)
    starts = [sequence for step in engine.steps for sequence, _ in step.admitted]
    assert starts == [0, 1, 2, 3]


# Room.


def test_a_prompt_waits_until_its_blocks_and_one_for_each_running_are_free():
    engine = Engine(n_blocks=13)
    one = submit(1, range(22), max_tokens=18)
    engine.submit(one)
    while engine.pool.used < 7:
        engine.turn()
    # 6 blocks are free: 5 for a prompt of 20 tokens and one to grow by, none for a 21st token.
    small, large = submit(2, [40] * 20, max_tokens=2), submit(3, [41] * 21, max_tokens=2)
    engine.submit(large)
    engine.turn(2)
    assert engine.steps[-1].stats.waiting == 1
    assert engine.cached[3] == []
    engine.cancel(3)
    engine.submit(small)
    engine.turn()
    assert engine.cached[2] == [0]
    engine.run()
    check(engine, one, small)


def test_more_sequences_than_slots_wait_their_turn():
    engine = Engine(max_batch=2)
    submits = [submit(i, [i, 1, 2], max_tokens=5) for i in range(7)]
    engine.submit(*submits)
    engine.run()
    check(engine, *submits)
    assert max(step.stats.running for step in engine.steps) == 2


@pytest.mark.parametrize("eager", [False, True])
def test_the_youngest_is_preempted_and_resumed_with_the_same_text(eager):
    engine = Engine(n_blocks=12, eager=eager)
    submits = [submit(i, [i] * 6, max_tokens=26) for i in range(3)]
    engine.submit(*submits)
    engine.run()
    check(engine, *submits)
    preemptions = engine.steps[-1].stats.preemptions_total
    assert preemptions > 0
    assert engine.cached[0] == [0], "the oldest is never preempted"
    assert sum(len(engine.cached[i]) - 1 for i in range(3)) == preemptions
    finished = [token.sequence for step in engine.steps for token in step.tokens if token.finish]
    assert finished == [0, 1, 2]


def test_a_preempted_sequence_comes_before_those_that_never_ran():
    engine = Engine(n_blocks=12, max_batch=3)
    submits = [submit(i, [i] * 6, max_tokens=26) for i in range(5)]
    engine.submit(*submits)
    engine.run()
    check(engine, *submits)
    starts = [sequence for step in engine.steps for sequence, _ in step.admitted]
    assert len(starts) > 5
    firsts = [starts.index(sequence) for sequence in range(5)]
    assert firsts == sorted(firsts)
    last_resumption = max(at for at, sequence in enumerate(starts) if sequence == 2)
    assert last_resumption < starts.index(3)


def test_output_does_not_depend_on_pool_batch_or_chunk():
    submits = [submit(i, [i % 3, *range(9 + i)], max_tokens=20, seed=i) for i in range(6)]
    seen = set()
    for n_blocks in (10, 17, 80):
        for max_batch in (1, 3, 6):
            for chunk in (3, 64):
                engine = Engine(n_blocks, max_batch=max_batch, prefill_chunk=chunk, prefill_chunk_idle=2 * chunk)
                engine.submit(*submits)
                engine.run()
                check(engine, *submits)
                seen.add(engine.steps[-1].stats.preemptions_total > 0)
    assert seen == {False, True}


def test_a_sequence_resumed_by_another_engine_goes_on_as_if_nothing_had_happened():
    whole = expected_tokens(submit(1, range(10), max_tokens=20))[0]
    for sent in (1, 2, 9, 19):
        engine = Engine()
        run(engine, submit(1, range(10), whole[:sent], max_tokens=20))
        assert whole[:sent] + engine.tokens[1] == whole


# Cancelling.


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("at", range(1, 14))
def test_cancel_gives_blocks_back_within_two_turns(at, eager):
    engine = Engine(prefill_chunk=8, prefill_chunk_idle=8, eager=eager)
    staying, leaving = submit(1, [40] * 6, max_tokens=40), submit(2, range(30), max_tokens=40)
    engine.submit(staying, leaving)
    engine.turn(at)
    engine.cancel(2)
    engine.turn(2)
    assert engine.released == [2]
    # The other one's tokens, the one in flight and one ahead.
    assert engine.pool.used <= -(-(6 + len(engine.tokens[1]) + 1) // 4)
    engine.run()
    check(engine, staying)
    assert engine.ends[2] == []


def test_cancel_of_a_waiting_sequence_and_of_one_unknown():
    engine = Engine(max_batch=1)
    one, two = submit(1, range(10)), submit(2, range(5))
    engine.submit(one, two)
    engine.turn(2)
    engine.cancel(2, 77)
    engine.turn()
    assert engine.released == [2]
    engine.run()
    check(engine, one)


def test_a_step_whose_only_row_has_ended_is_not_computed():
    one = submit(1, range(10), max_tokens=50)
    first, second, stop = expected_tokens(one)[0][:3]
    assert stop not in (first, second)
    engine = Engine()
    run(engine, submit(1, range(10), max_tokens=50, stop_ids=(stop,)))
    assert engine.pipeline.computed_rows == 10 + 2


def test_a_cancelled_prompt_is_not_read_on():
    engine = Engine(prefill_chunk=8, prefill_chunk_idle=8)
    engine.submit(submit(1, range(40)))
    engine.turn(2)
    assert engine.pipeline.computed_rows == 8
    engine.cancel(1)
    engine.run()
    assert engine.pipeline.computed_rows == 8
    # What was never stored is not in the cache.
    run(engine, submit(2, range(40)))
    assert engine.cached[2] == [8]


def test_a_cancelled_prompt_is_read_on_if_another_has_taken_its_blocks():
    engine = Engine()
    one, two = submit(1, range(18)), submit(2, range(18), seed=5)
    engine.submit(one, two)
    engine.turn()
    # The first prompt's only chunk is launched and not begun when it is cancelled, and the second has its blocks.
    engine.scheduler.admit()
    engine.pipeline.admit(1, two, [])
    engine.cancel(1)
    engine.run()
    check(engine, two)
    assert engine.cached[2] == [16]

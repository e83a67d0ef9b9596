"""The step contract on a tiny model: order, dropped rows, failures, and tokens that depend on nothing else."""

import numpy as np
import pytest

from engine.messages import Sampling, Submit
from engine.ops.cpu.pipeline import SLICE_ROWS, slices
from engine.ops.rows import Span
from engine.sequence import DecodeRow, PrefillChunk, StepPlan
from tests.golden.cases import golden_cases
from tests.golden.running import greedy, load

MODEL = str(golden_cases(["qwen3"])[0].model)


@pytest.fixture
def pipeline():
    return load(MODEL, "f32", 64)


def submit(slot: int, prompt: list[int], **sampling) -> Submit:
    return Submit(slot, prompt, [], Sampling(**sampling), 100, ())


def prefill(pipeline, slot, prompt, blocks, start=0, completes=True, **sampling):
    pipeline.admit(slot, submit(slot, prompt, **sampling), [])
    pipeline.launch(StepPlan(0, [], PrefillChunk(slot, prompt[start:], start, blocks, completes, 0)))
    return pipeline.collect()


def test_collect_without_a_launched_step(pipeline):
    with pytest.raises(RuntimeError, match="no step is in flight"):
        pipeline.collect()


def test_two_steps_in_flight_come_back_in_order(pipeline):
    prefill(pipeline, 0, [1, 2, 3], [0], temperature=0)
    pipeline.launch(StepPlan(1, [DecodeRow(0, 3, [0], 1)], None))
    pipeline.launch(StepPlan(2, [DecodeRow(0, 4, [0], 2)], None))
    assert pipeline.in_flight == 2
    with pytest.raises(AssertionError):
        pipeline.launch(StepPlan(3, [], None))
    assert pipeline.collect().step == 1
    assert pipeline.collect().step == 2
    assert pipeline.in_flight == 0


def test_a_chunk_that_does_not_complete_samples_nothing(pipeline):
    prompt = list(range(90))
    pipeline.admit(0, submit(0, prompt, temperature=0), [])
    pipeline.launch(StepPlan(0, [], PrefillChunk(0, prompt[:70], 0, [4, 2], completes=False, generated_index=0)))
    assert pipeline.collect().sampled == []
    pipeline.launch(StepPlan(1, [], PrefillChunk(0, prompt[70:], 70, [4, 2], completes=True, generated_index=0)))
    cut = pipeline.collect().sampled
    assert [sampled.token for sampled in cut] == greedy(pipeline, [prompt], 1)[0]


def test_tokens_do_not_depend_on_the_batch(pipeline):
    prompts = [list(range(start, start + 3 + 11 * start)) for start in range(8)]
    together = greedy(pipeline, prompts, 12)
    assert together == [greedy(pipeline, [prompt], 12)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in together}) > 1


def test_decode_beside_a_prefill_of_several_slices(pipeline):
    """A long chunk is computed in slices; the decode rows before it and its own last row come out as if alone."""
    long = [int(token) for token in np.random.default_rng(0).integers(0, 600, 2 * SLICE_ROWS + 40)]
    alone = [greedy(pipeline, [[5, 6, 7]], 2)[0], greedy(pipeline, [long], 1)[0]]
    prefill(pipeline, 0, [5, 6, 7], [0], temperature=0)
    pipeline.admit(1, submit(1, long, temperature=0), [])
    chunk = PrefillChunk(1, long, 0, list(range(10, 20)), completes=True, generated_index=0)
    pipeline.launch(StepPlan(1, [DecodeRow(0, 3, [0], 1)], chunk))
    result = pipeline.collect()
    assert [(sampled.slot, sampled.token) for sampled in result.sampled] == [(0, alone[0][1]), (1, alone[1][0])]


def test_slices_keep_order_and_say_where_a_span_ends():
    spans = [Span([1], 9, [0]), Span(range(SLICE_ROWS + 5), 0, [1]), Span([2], 3, [2])]
    parts = list(slices(spans))
    assert [sum(len(span.tokens) for _, span, _ in part) for part in parts] == [SLICE_ROWS, 7]
    assert [(number, span.start, len(span.tokens), last) for part in parts for number, span, last in part] == [
        (0, 9, 1, True),
        (1, 0, SLICE_ROWS - 1, False),
        (1, SLICE_ROWS - 1, 6, True),
        (2, 3, 1, True),
    ]
    assert list(slices([])) == []


def test_dropped_rows_are_left_out(pipeline):
    for slot in (0, 1):
        prefill(pipeline, slot, [slot, 2, 3], [slot], temperature=0)
    pipeline.launch(StepPlan(1, [DecodeRow(slot, 3, [slot], 1) for slot in (0, 1)], None))
    pipeline.drop(0)
    assert [sampled.slot for sampled in pipeline.collect().sampled] == [1]
    pipeline.launch(StepPlan(2, [DecodeRow(0, 3, [0], 1)], None))
    pipeline.drop(0)
    assert pipeline.collect().sampled == []


def test_admitting_a_slot_drops_the_rows_of_who_had_it(pipeline):
    prefill(pipeline, 0, [1, 2, 3], [0], temperature=0)
    pipeline.launch(StepPlan(1, [DecodeRow(0, 3, [0], 1)], None))
    pipeline.admit(0, submit(9, [4, 5]), [])
    assert pipeline.collect().sampled == []


def test_ids_outside_the_vocabulary_are_refused_alone(pipeline):
    for prompt, generated in (([0, 640], []), ([-1], []), ([1], [99999])):
        with pytest.raises(ValueError, match="outside the vocabulary of 640"):
            pipeline.admit(0, submit(0, prompt), generated)


def test_logits_that_are_not_finite_fail_their_row_alone(pipeline):
    for slot in (0, 1):
        prefill(pipeline, slot, [slot, 2, 3], [slot], temperature=0)
    pipeline.ops.kv.data[:, :, 0] = np.nan
    pipeline.launch(StepPlan(1, [DecodeRow(slot, 3, [slot], 1) for slot in (0, 1)], None))
    result = pipeline.collect()
    assert [sampled.slot for sampled in result.sampled] == [1]
    assert [slot for slot, _ in result.failed] == [0]
    # Whoever gets the block next is not touched by what lies in it.
    (after,) = prefill(pipeline, 2, [1, 2, 3], [0], temperature=0).sampled
    assert [after.token] == greedy(load(MODEL, "f32", 1), [[1, 2, 3]], 1)[0]


def test_penalties_and_logprobs_follow_the_slot(pipeline):
    result = prefill(pipeline, 3, [1, 2, 3], [0], temperature=0, logprobs=2, frequency_penalty=2.0)
    (first,) = result.sampled
    assert first.slot == 3
    assert first.logprob == first.top[0][1]
    assert len(first.top) == 2
    pipeline.admit(3, submit(3, [1, 2, 3], temperature=0, frequency_penalty=100.0), [])
    pipeline.launch(StepPlan(0, [], PrefillChunk(3, [1, 2, 3], 0, [0], completes=True, generated_index=0)))
    tokens = [pipeline.collect().sampled[0].token]
    for index in range(1, 30):
        pipeline.launch(StepPlan(index, [DecodeRow(3, 2 + index, [0], index)], None))
        tokens.append(pipeline.collect().sampled[0].token)
    assert len(set(tokens)) == 30


def test_resuming_after_generated_tokens_goes_on_as_if_never_interrupted(pipeline):
    whole = greedy(pipeline, [[8, 9]], 10)[0]
    known = [8, 9, *whole[:6]]
    pipeline.admit(2, submit(2, [8, 9], temperature=0), whole[:6])
    pipeline.launch(StepPlan(0, [], PrefillChunk(2, known, 0, [7], completes=True, generated_index=6)))
    tokens = [pipeline.collect().sampled[0].token]
    for index in range(7, 10):
        pipeline.launch(StepPlan(index, [DecodeRow(2, 1 + index, [7], index)], None))
        tokens.append(pipeline.collect().sampled[0].token)
    assert tokens == whole[6:]

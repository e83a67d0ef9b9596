"""A step's plan as forwards: nothing lost, nothing twice, in the order of the plan."""

import numpy as np

from engine.ops.cuda.forwards import FROM_DEVICE, PADDING, forwards
from engine.plan.scratch import GROUP_ROWS
from engine.sequence import DecodeRow, PrefillChunk, StepPlan


def plan(rows: int, chunk: PrefillChunk | None = None) -> StepPlan:
    return StepPlan(3, [DecodeRow(slot, 100 + slot, [slot], 7 + slot) for slot in range(rows)], chunk)


def test_decode_rows_go_in_groups_and_read_what_the_device_drew():
    made = list(forwards(plan(GROUP_ROWS + 5)))
    assert [len(forward.tokens) for forward in made] == [GROUP_ROWS, 5]
    assert not any(forward.one_sequence for forward in made)
    assert {token for forward in made for token in forward.tokens} == {FROM_DEVICE}
    sampled = [(slot, index) for forward in made for _, slot, index in forward.sampled]
    assert sampled == [(slot, 7 + slot) for slot in range(GROUP_ROWS + 5)]
    assert [place for place, _, _ in made[1].sampled] == [0, 1, 2, 3, 4]


def test_a_chunk_is_sampled_at_its_last_row_when_it_completes():
    for completes in (False, True):
        chunk = PrefillChunk(4, [11, 12, 13], 64, [0, 9], completes, 0)
        decode, prefill = forwards(plan(2, chunk))
        assert len(decode.tokens) == 2
        assert prefill.one_sequence
        assert list(prefill.positions) == [64, 65, 66]
        assert prefill.sampled == ([(2, 4, 0)] if completes else [])


def test_padding_is_marked_as_such():
    [forward] = forwards(plan(3))
    inputs, sample = np.full((3, 8), 99, np.int32), np.full((3, 4), 99, np.int32)
    forward.write(inputs)
    forward.write_sampled(sample)
    assert inputs[:, :3].tolist() == [[FROM_DEVICE] * 3, [100, 101, 102], [0, 1, 2]]
    assert set(inputs[1, 3:]) == {PADDING}
    assert set(inputs[0, 3:]) == {0}
    assert sample.tolist() == [[0, 1, 2, 0], [0, 1, 2, PADDING], [7, 8, 9, 0]]

"""From one stage to the next: rows of the stream forward, drawn tokens back."""

from typing import Any

import cupy as cp

from engine.ops.cuda.stage import Stage


def hand_over(before: Stage, after: Stage, m: int) -> None:
    """Queue the copy of `m` rows; `before` goes on to other rows only when they are copied."""
    _copy(before, before.x(m), after, after.x(m))


def return_tokens(last: Stage, first: Stage) -> None:
    """Queue the copy of every slot's last token, which the first stage's next forward waits for."""
    _copy(last, last.last_tokens, first, first.last_tokens)


def _copy(source: Stage, values: Any, target: Stage, place: Any) -> None:
    """On the target's stream, after all that is queued on the source's, and before what is queued there next."""
    runtime, stream = cp.cuda.runtime, target.stream
    runtime.setDevice(source.device)
    source.done.record(source.stream)
    runtime.setDevice(target.device)
    stream.wait_event(source.done)
    if source.device == target.device:
        runtime.memcpyAsync(place.data.ptr, values.data.ptr, values.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
    else:
        devices = target.device, source.device
        runtime.memcpyPeerAsync(place.data.ptr, devices[0], values.data.ptr, devices[1], values.nbytes, stream.ptr)
    target.done.record(stream)
    runtime.setDevice(source.device)
    source.stream.wait_event(target.done)

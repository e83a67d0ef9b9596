"""How rows of work are shared out over threads; who computes a row changes nothing in it."""

from engine.ops.cpu.compiled import inner

PARALLEL_ROWS = 16
"""Fewer rows than this of a cheap op are not worth waking a thread for."""


@inner
def share(rows, thread, threads, unit):  # type: ignore[no-untyped-def]
    """First row of a thread's share, a multiple of `unit`: only the last share has a remainder."""
    return rows if thread == threads else rows // unit * thread // threads * unit


def threads_for(rows: int, threads: int) -> int:
    """Threads for a cheap op over `rows` rows."""
    return threads if rows >= PARALLEL_ROWS else 1

"""The step contract: what the loop asks of a backend.

A step is a forward and a sample. `launch(n + 1)` may be called before `collect()` of step n: decode rows take their
token from the pipeline's own `last token` of their slot, which the sample of step n writes, so the host need not have
read it. `collect()` hands back launched steps in order. At most two steps are in flight. `admit` and every change of
memory happen only between steps; `admit(slot, …)` sets the slot's sampler state (penalty counts over both id lists).
"""

from typing import Protocol

from engine.messages import Submit
from engine.sequence import StepPlan, StepResult


class Pipeline(Protocol):
    """One backend with one model loaded."""

    def admit(self, slot: int, submit: Submit, generated: list[int]) -> None:
        """Set the sampler state of `slot` for a sequence that starts, or resumes after `generated`.

        Raises ValueError, one line, for a sequence that this model cannot serve (a token id outside its vocabulary);
        the sequence then fails alone.
        """

    def launch(self, plan: StepPlan) -> None:
        """Queue one step; returns before it is done where the device allows.

        Raises OutOfMemory where the device has not enough for it: then nothing of it is queued, and it may be launched
        again, or never, whole or with fewer rows.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises RuntimeError when none is in flight."""

    def drop(self, slot: int) -> None:
        """The rows of `slot` in launched steps are of no use any more: their sequence has ended.

        A step that has not begun may leave them out, of its work and of its result; doing nothing is right too.
        """

    @property
    def in_flight(self) -> int:
        """Launched steps not yet collected (0 to 2)."""

"""Faults carried out: around a pipeline and around what is said to the service, so that nothing else knows of them."""

import faulthandler
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.errors import OutOfMemory
from engine.faults import Crash, Fault, Foreign, Hang, Leak, MemoryShort
from engine.loop import Outbox
from engine.memory.simulated_gpus import SimulatedGpus
from engine.messages import Step, Submit, ToService
from engine.pipeline import Pipeline
from engine.sequence import StepPlan, StepResult

LEAK_OWNER = "leak"
"""Its row on a simulated card; no owner of the ledger."""


class Happened:
    """Which faults, by their place in the list, have happened and do not happen again in any engine of a service.

    All of them inherit one open file, the carry memory, and so share its offset, which nobody reads or writes by: it
    survives the death of an engine at any moment, as nothing of its own would. A bit of it stands for a fault.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._mine = 0

    def __contains__(self, number: int) -> bool:
        return bool(self._bits() >> number & 1)

    def add(self, number: int) -> None:
        self._mine |= 1 << number
        if self._descriptor is not None:
            os.lseek(self._descriptor, self._bits(), os.SEEK_SET)

    def _bits(self) -> int:
        shared = 0 if self._descriptor is None else os.lseek(self._descriptor, 0, os.SEEK_CUR)
        return shared | self._mine


class FaultyPipeline:
    """engine.pipeline.Pipeline with faults of requests; counts those that start here with nothing generated yet."""

    def __init__(self, pipeline: Pipeline, faults: Sequence[Fault], happened: Happened, cards: str | None) -> None:
        """`cards` is the file of the simulated cards, without which there are no faults of cards."""
        self._pipeline = pipeline
        self._faults = faults
        self._happened = happened
        self._cards = cards
        self._gpus = None if cards is None else SimulatedGpus.open(Path(cards))
        self._foreign: list[subprocess.Popen[bytes]] = []
        self._slots: dict[int, Submit] = {}
        self._started: set[int] = set()
        self._short: set[int] = set()
        self._leaked: dict[int, int] = {}

    def admit(self, slot: int, submit: Submit, generated: list[int]) -> None:
        self._pipeline.admit(slot, submit, generated)
        self._slots[slot] = submit
        if not submit.generated_ids and submit.sequence not in self._started:
            self._started.add(submit.sequence)
            self._start(submit)

    def _start(self, submit: Submit) -> None:
        for number, fault in enumerate(self._faults):
            match fault:
                case Leak():
                    self._leak(fault)
                case MemoryShort() if fault.request == len(self._started) and number not in self._happened:
                    self._happened.add(number)
                    self._short.add(submit.sequence)
                case Foreign() if number not in self._happened:
                    self._happened.add(number)
                    self._start_foreign(fault)

    def _leak(self, fault: Leak) -> None:
        assert self._gpus is not None
        wanted = self._leaked.get(fault.device, 0) + fault.size
        self._leaked[fault.device] = self._gpus.take(fault.device, LEAK_OWNER, wanted)

    def _start_foreign(self, fault: Foreign) -> None:
        assert self._cards is not None
        order = (self._cards, *map(str, (fault.device, fault.size, os.getppid())))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.foreign", *order],
            # Nothing of ours is open in it: it lives longer than this engine.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._foreign.append(process)

    def launch(self, plan: StepPlan) -> None:
        for submit in self._named(plan):
            if submit.poison:
                die()
            if submit.sequence in self._short:
                raise OutOfMemory(0, "scratch", 1 << 21, 0)
        self._pipeline.launch(plan)

    def _named(self, plan: StepPlan) -> Iterator[Submit]:
        slots = [row.slot for row in plan.decode]
        if plan.prefill is not None:
            slots.append(plan.prefill.slot)
        return (self._slots[slot] for slot in slots)

    def collect(self) -> StepResult:
        return self._pipeline.collect()

    def drop(self, slot: int) -> None:
        self._pipeline.drop(slot)

    @property
    def in_flight(self) -> int:
        return self._pipeline.in_flight


class FaultyOutbox:
    """Counts the tokens that the service is told, and crashes or hangs right after the one that a fault names."""

    def __init__(self, outbox: Outbox, faults: Sequence[Fault], happened: Happened) -> None:
        self._outbox = outbox
        self._happened = happened
        self._due: list[tuple[int, Crash | Hang]] = [
            (number, fault)
            for number, fault in enumerate(faults)
            if isinstance(fault, Crash | Hang) and (fault.every or number not in happened)
        ]
        self._tokens = 0

    def send(self, message: ToService) -> None:
        self._outbox.send(message)
        if not isinstance(message, Step):
            return
        self._tokens += len(message.tokens)
        for number, fault in [(number, fault) for number, fault in self._due if fault.tokens <= self._tokens]:
            self._due.remove((number, fault))
            self._happened.add(number)
            if isinstance(fault, Hang):
                threading.Event().wait(fault.seconds)
            else:
                die()


def die() -> None:
    """As by a failed assertion in a driver."""
    faulthandler.disable()
    os.abort()

"""A service on simulated cards with a scripted engine that holds memory there, gives it back and loses it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.devices import Devices
from app.service import Service
from engine.config import EngineConfig
from engine.fake import FakeEngine
from engine.memory.simulated_gpus import SimulatedCard, SimulatedGpus
from engine.messages import DeviceReady, Ledger, Ready, RungResult, Submit
from tests.app.running import ADMIN_KEY, Running, says, service
from watchdog.simulated import Loss, SimulatedSource

MIB = 1 << 20
TOTAL = 4096 * MIB
FIXED = {"context": 500 * MIB, "weights": 1500 * MIB, "cublas_workspace": 64 * MIB, "pool_cached": 0}
KV, ELASTIC = 1500 * MIB, 1200 * MIB
"""Bytes of keys and values on each card, and how many of them may go."""
FREE = TOTAL - sum(FIXED.values()) - KV
KEY = {"authorization": f"Bearer {ADMIN_KEY}"}


class Machine:
    """Two cards in a file. What the test holds on them under other names is the engine's own too, but for `other`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gpus = SimulatedGpus.create(path, [SimulatedCard(TOTAL, 0)] * 2)
        self.leaked = [0, 0]

    def leak(self, device: int, size: int) -> None:
        self.leaked[device] += size
        self.gpus.take(device, "leak", self.leaked[device])

    def release(self) -> None:
        """The engine's process has ended."""
        self.leaked = [0, 0]
        for device in range(2):
            for owner in (*FIXED, "kv_cache", "leak"):
                self.gpus.resize(device, owner, 0)


@dataclass
class CardEngine(FakeEngine):
    """Loses `leak` bytes of card 1 at each request that starts, outside its ledger."""

    machine: Machine | None = None
    leak: int = 0
    held: list[dict[str, int]] = field(default_factory=list)

    async def load(self, config: EngineConfig, restore: bool) -> Ready:
        assert self.machine is not None
        self.pid = os.getpid()
        self.held = [{**FIXED, "kv_cache": KV} for _ in range(2)]
        for device, held in enumerate(self.held):
            for owner, size in held.items():
                self.machine.gpus.resize(device, owner, size)
        self.devices = [
            DeviceReady(
                device, f"SIMULATED-{device}", "card", [device], TOTAL, 512 * MIB, dict(held), ELASTIC, ELASTIC, 0
            )
            for device, held in enumerate(self.held)
        ]
        return await super().load(config, restore)

    def submit(self, submit: Submit) -> None:
        super().submit(submit)
        if self.leak and self.machine is not None and not submit.generated_ids:
            self.machine.leak(1, self.leak)

    async def trim(self, rung: str, device: int | None = None, keep_bytes: int | None = None) -> list[RungResult]:
        await super().trim(rung, device, keep_bytes)
        if rung == "elastic":
            return self._resize(KV - ELASTIC + (keep_bytes or 0), device)
        owner = {"pools": "pool_cached", "cublas_workspace": "cublas_workspace"}.get(rung)
        results = []
        for each in range(2) if device is None else [device]:
            size = self.held[each].get(owner, 0) if owner else 0
            if owner and size:
                self._hold(each, owner, 0)
            results.append(RungResult(rung, each, "ok" if size else "noop", size, 0.001))
        self.events.on_ledger(Ledger([dict(held) for held in self.held]))
        return results

    async def grow(self, device: int | None = None, bytes: int | None = None) -> list[RungResult]:
        await super().grow(device, bytes)
        assert device is not None
        assert bytes is not None
        return self._resize(min(KV, self.held[device]["kv_cache"] + bytes), device)

    def _resize(self, size: int, device: int | None) -> list[RungResult]:
        """Keys and values shrink and grow on both cards at once."""
        before = self.held[0]["kv_cache"]
        for each in range(2):
            self._hold(each, "kv_cache", size)
        self.events.on_ledger(Ledger([dict(held) for held in self.held]))
        result = "ok" if before != size else "noop"
        return [RungResult("elastic", each, result, before - size, 0.001) for each in range(2)]

    def _hold(self, device: int, owner: str, size: int) -> None:
        assert self.machine is not None
        self.held[device][owner] = size
        self.machine.gpus.resize(device, owner, size)

    def _end(self, reason: str) -> None:
        if self._serving and self.machine is not None and not self._ended.done():
            self.machine.release()
        super()._end(reason)


OTHER = """
import sys, time
from pathlib import Path
from engine.memory.simulated_gpus import SimulatedGpus
path, device, size = sys.argv[1:]
gpus = SimulatedGpus.open(Path(path))
gpus.take(int(device), "other", int(size))
print("held", flush=True)
while True:
    time.sleep(0.02)
    gpus.take(int(device), "other", int(size))
"""


@contextmanager
def other_process(machine: Machine, device: int, size: int) -> Iterator[None]:
    """Somebody else takes so much of a card within the block, the rest as it gets free."""
    command = [sys.executable, "-c", OTHER, str(machine.path), str(device), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            yield
        finally:
            child.kill()


QUICK = {"watchdog_confirm": 1, "trim_cooldown": 0.2, "reload_window": 0.0}


@contextmanager
def on_cards(
    folder: Path,
    *,
    leak: int = 0,
    settings: dict[str, Any] | None = None,
    loss: Loss | None = None,
    text: str = "Hi.",
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[Running, Machine]]:
    machine = Machine(folder / "cards")
    source = SimulatedSource(folder / "cards", loss)
    with service(
        says(text),
        engine={"machine": machine, "leak": leak, **(engine or {})},
        engine_type=CardEngine,
        settings={**QUICK, **(settings or {})},
        devices=Devices(source, "simulated", source.arm),
        journals=folder,
        **options,
    ) as running:
        running.wait_until(lambda inside: all(d.floors is not None for d in inside.pressure.status().devices))
        yield running, machine


def reasons(running: Running, kind: str) -> Sequence[str]:
    return running.call(lambda inside: reasons_of(inside, kind))


def reasons_of(inside: Service, kind: str) -> Sequence[str]:
    return [event.reason for event in inside.events.since() if event.kind == kind]

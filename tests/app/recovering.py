"""A scheduler and a supervisor over fake engines, each of which may have faults of its own."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from app.generation import Generation
from app.observer import NoObserver
from app.record import ChoiceRequest, Record
from app.recovery import Backoff, EngineSupervisor, Patience
from app.scheduler import Limits, RequestScheduler
from engine.client import EngineEvents
from engine.config import EngineConfig
from engine.fake import Carry, FakeEngine
from engine.messages import LoadProgress, Sampling, Step

TOKEN_BYTES = [bytes([97 + n]) for n in range(26)]
SCRIPT = [n % 26 for n in range(400)]
TEXT = b"".join(TOKEN_BYTES[token] for token in SCRIPT).decode()
CONFIG = EngineConfig(model_path="fake", max_context=4096)
QUICK = Patience(Backoff(first_s=0.0), hang_s=0.05, tick_s=0.01, start_s=0.2, stop_s=0.05, reap_s=0.05, settle_s=0.2)


class Diary(NoObserver):
    """What was said of engines and reloads, in order."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.phases: list[str] = []
        self.recomputed_tokens = 0
        self.held_s: list[float] = []
        self.outcomes: list[str | None] = []

    def held(self, seconds: float) -> None:
        self.held_s.append(seconds)

    def finished(self, record: Record) -> None:
        self.outcomes.append(record.outcome)

    def interrupted(self, queued: int, at_engine: Sequence[Record]) -> None:
        self.said.append(("interrupted", queued, len(at_engine)))

    def recomputed(self, tokens: int) -> None:
        self.recomputed_tokens += tokens

    def engine_restarted(self, reason: str) -> None:
        self.said.append(("restarted", reason))

    def reload_begun(self, reason: str) -> None:
        self.said.append(("begun", reason))

    def reload_phase(self, phase: str, seconds: float) -> None:
        assert seconds >= 0
        self.phases.append(phase)

    def reload_returned(self, device: int, bytes: int) -> None:
        self.said.append(("returned", device, bytes))

    def reload_ended(self, reason: str, result: str) -> None:
        self.said.append(("ended", reason, result))

    def of(self, kind: str) -> list[Any]:
        """What was said of one kind of event."""
        found = [item[1:] for item in self.said if item[0] == kind]
        return [item[0] if len(item) == 1 else item for item in found]


class FaultyEngine(FakeEngine):
    """Calls `on_stage(stage)` when it gets to a stage."""

    on_stage: Callable[[str], None] = staticmethod(lambda stage: None)

    async def _pass(self, stage: Any) -> None:
        if stage is not None:
            self.on_stage(stage)
        await super()._pass(stage)


class Bench:
    """`by_generation` has options of single engines, `options` those of all."""

    def __init__(
        self,
        by_generation: dict[int, dict[str, Any]] | None = None,
        *,
        patience: Patience = QUICK,
        limits: Limits | None = None,
        config: EngineConfig = CONFIG,
        parts: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._by_generation = by_generation or {}
        self._options = {"script": SCRIPT, "max_batch": 4, **options}
        self._carry = Carry()
        self.engines: list[FaultyEngine] = []
        self.diary = Diary()
        self.scheduler = RequestScheduler(TOKEN_BYTES, limits or Limits(), self.diary)
        self.supervisor = EngineSupervisor(
            self._make, config, self.scheduler, self.diary, patience=patience, carry=self, **(parts or {})
        )
        self.on_step: Callable[[FakeEngine, Step], None] = lambda engine, step: None
        self.on_stage: Callable[[FakeEngine, str], None] = lambda engine, stage: None
        self.cleared = 0

    # The carry memory.

    def budget_bytes(self) -> int:
        return 1 << 20

    def clear(self) -> None:
        self.cleared += 1

    # The engines.

    def _make(self, generation: int, events: EngineEvents) -> FaultyEngine:
        options = self._options | self._by_generation.get(generation, {})
        engine = FaultyEngine(generation=generation, events=events, carry=self._carry, **options)
        engine.on_stage = lambda stage: self.on_stage(engine, stage)
        deliver, progress = events.on_step, events.on_progress

        def on_step(step: Step) -> None:
            deliver(step)
            self.on_step(engine, step)

        def on_progress(told: LoadProgress) -> None:
            progress(told)
            self.on_stage(engine, told.phase)

        events.on_step = on_step  # type: ignore[method-assign]
        events.on_progress = on_progress  # type: ignore[method-assign]
        self.engines.append(engine)
        return engine

    @property
    def generations(self) -> list[int]:
        return [engine.generation for engine in self.engines]

    # The requests.

    def admit(self, tokens: int = 100, prompt: Sequence[int] = (1,), n: int = 1) -> Generation:
        return self.scheduler.admit(
            "r", [ChoiceRequest(list(prompt), Sampling(choice=k), tokens, ()) for k in range(n)]
        )

    def at_step(self, deeds: dict[tuple[int, int], Callable[[FakeEngine], object]]) -> None:
        """What happens after a step of a generation."""

        def happen(engine: FakeEngine, step: Step) -> None:
            deed = deeds.get((engine.generation, step.step))
            if deed is not None:
                deed(engine)

        self.on_step = happen

    def reload_at(self, *steps: tuple[int, int]) -> None:
        self.at_step({step: lambda engine: self.supervisor.reload("operator") for step in steps})

    def die_at(self, *steps: tuple[int, int]) -> None:
        self.at_step({step: lambda engine: engine.die("told to") for step in steps})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  # turns of the loop are what is waited for
                await asyncio.sleep(0)

    async def until_quiet(self) -> None:
        await self.until(lambda: not self.supervisor.reloading)

    async def finish(self) -> None:
        """Stop, and nothing is left."""
        await self.supervisor.stop(1)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert self.scheduler.inflight_bytes == 0


async def text(generation: Generation) -> str:
    async with generation:
        return "".join([event.text async for events in generation.events() for event in events])

"""One device under the policy, by hand: views in MiB, outcomes told at once."""

from dataclasses import replace

from watchdog.actions import Action, Cap, Outcome, Regrow, Reload, Rung, Trim
from watchdog.config import WatchdogConfig
from watchdog.floors import Floors, floors_of
from watchdog.policy import decide, start, told
from watchdog.snapshot import GIB, MIB, Elastic, Holdings
from watchdog.state import Decision, EnginePhase, PolicyState, View
from watchdog.trend import Forecast, TrendClass

FLOORS = floors_of(4 * GIB, 512 * MIB)
"""warn 307, trim 230, reload 128 MiB; E = 512 MiB."""
OK, WARN, TRIM, RELOAD = 1000, 280, 200, 100
TRIMS = [Rung.POOLS, Rung.STACK_LIMIT, Rung.CUBLAS_WORKSPACE, Rung.GRAPH_CACHE]
GROWTH, FIRST_USE, FLAT = TrendClass.GROWTH, TrendClass.FIRST_USE, TrendClass.FLAT
FILL, FOREIGN, UNKNOWN = TrendClass.FILL, TrendClass.FOREIGN, TrendClass.UNKNOWN


class Bench:
    """One device, a sample a second; rungs return nothing unless `returns` says so."""

    def __init__(
        self, floors: Floors = FLOORS, elastic: Elastic | None = None, config: WatchdogConfig | None = None
    ) -> None:
        self.state: PolicyState = start(1)
        self.config = config or WatchdogConfig()
        self.floors = floors
        self.elastic = elastic or Elastic()
        self.at = 0.0
        self.actions: list[Action] = []
        self.returns: dict[Rung, int] = {}
        self.generation = 1
        self.released = 0
        self.last: Decision | None = None

    def sample(
        self,
        idle: int | None,
        kind: TrendClass = FLAT,
        *,
        free: int | None = None,
        blind: bool = False,
        forecast: Forecast | None = None,
        bps: float | None = None,
        foreign: int | None = 0,
        idle_for: float | None = None,
        owner: str | None = None,
        engine: EnginePhase = "serving",
        tell: bool = True,
    ) -> Decision:
        self.at += 1.0
        raw = None if blind else (idle if free is None else free)
        view = View(
            at=self.at,
            device=0,
            floors=self.floors,
            holdings=self.holdings(),
            free=None if raw is None else raw * MIB,
            idle_free=None if idle is None else idle * MIB + self.released,
            kind=kind,
            bytes_per_second=bps,
            forecast=forecast,
            fill_owner=owner,
            foreign=None if foreign is None else foreign * MIB,
            idle_for=idle_for,
            engine=engine,
        )
        self.state, decision = decide(self.state, view, self.config)
        self.last = decision
        if decision.action is not None:
            self.actions.append(decision.action)
            if tell and not decision.dry_run and not isinstance(decision.action, Reload):
                self.tell(decision.action)
        return decision

    def tell(self, action: Trim | Cap | Regrow) -> None:
        returned = 0
        if isinstance(action, Trim):
            returned = action.wanted or self.returns.get(action.rung, 0)
            self.released += returned
        self.state = told(self.state, Outcome(action, self.at, "ok" if returned else "noop", returned), self.holdings())

    def holdings(self) -> Holdings:
        elastic = replace(self.elastic, held=max(0, self.elastic.held - self.released))
        return Holdings(self.generation, self.released, elastic, ledger={"pool_cached": 8 * MIB})

    def run(self, count: int, idle: int, kind: TrendClass = FLAT, **more: object) -> list[Decision]:
        return [self.sample(idle, kind, **more) for _ in range(count)]  # type: ignore[arg-type]

    @property
    def rungs(self) -> list[Rung]:
        return [action.rung for action in self.actions if isinstance(action, Trim)]

    @property
    def reloads(self) -> list[Reload]:
        return [action for action in self.actions if isinstance(action, Reload)]


def near(seconds: float, requests: float = 10.0) -> Forecast:
    return Forecast(requests, seconds)

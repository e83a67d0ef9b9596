"""Random histories of one device, with and without growth, and their replay through the pure watchdog.

A trace says how much has been lost after each request, by whom, and how the readings look in between: noise of 0.5 to
8 MiB, dips inside requests (to 90 % of B in half of the traces, as deep as 90 % of B in the other half), 1 to 32
streams, own bytes known or not. B is log-uniform from 150 MiB to 60 GiB, R is 512 MiB. The replay answers the
watchdog as an engine would: elastic memory comes back when asked for, empty rungs return nothing.

A trace that would need more than `MOST` requests to its reload floor begins `MOST` before it, with the rest already
lost: the trend knows only 64 requests, so nothing else differs.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from watchdog.actions import Cap, Outcome, Regrow, Reload, Rung, Trim
from watchdog.config import WatchdogConfig
from watchdog.floors import Floors, floors_of
from watchdog.policy import told
from watchdog.snapshot import GIB, MIB, CappedOwner, Elastic, Holdings, Reading, Work
from watchdog.state import Decision
from watchdog.watch import Watch, at_ready, step, with_policy

TOTAL = 256 * GIB
RESERVE = 512 * MIB
MOST = 256
LEDGER = {"context": 300 * MIB, "cublas_workspace": 32 * MIB, "cuda_graphs": 60 * MIB}
FEW = 32
"""Traces that reach the floor in fewer requests are reported apart."""

Shape = Literal["linear", "stepped", "bursts"]


@dataclass(frozen=True)
class Trace:
    """Bytes per device; index k of a series holds after k requests."""

    name: str
    baseline: int
    begun: int
    """Lost before the trace begins."""
    lost: list[float]
    foreign: list[float]
    fill: list[float]
    fill_cap: float
    """0: the fill has no owner in the ledger."""
    elastic: Elastic
    streams: int
    request_s: float
    samples: int
    noise: float
    dip: float
    dip_share: float
    known: bool
    pool: int
    """What the pools rung returns, once."""
    seed: int

    @property
    def floors(self) -> Floors:
        return floors_of(self.baseline, RESERVE)

    def idle(self, k: int) -> float:
        return self.baseline - self.begun - self.lost[k] - self.foreign[k] - self.fill[k]

    @property
    def requests(self) -> int:
        return len(self.lost) - 1

    @property
    def crossing(self) -> int | None:
        """The first request after which the idle floor is under the reload floor."""
        floor = self.floors.reload
        return next((k for k in range(self.requests + 1) if self.idle(k) < floor), None)


@dataclass
class Replayed:
    """What the watchdog did. `acted` is the request at which it first acted while raw free was above the floor."""

    trace: Trace
    acted: int | None = None
    act: str = ""
    reloads: int = 0
    samples: int = 0
    decisions: list[Decision] = field(default_factory=list)

    @property
    def lead(self) -> int | None:
        crossing = self.trace.crossing
        return None if self.acted is None or crossing is None else crossing - self.acted


def growing(seed: int) -> Trace:
    """A device that loses 0.5 to 8 MiB a request for good."""
    rng = random.Random(seed)
    baseline = _baseline(rng)
    slope = _log_uniform(rng, 0.5, 8.0) * MIB
    room = baseline - floors_of(baseline, RESERVE).reload
    needed = math.ceil(room / slope)
    begun = max(0, int(room - MOST * slope))
    needed = min(needed, MOST)
    count = needed * 5 // 4 + 16
    shape: Shape = rng.choice(("linear", "stepped", "bursts"))
    lost = _growth(rng, shape, slope, count)
    foreign = [0.0] * (count + 1)
    known = rng.random() < 0.75
    if rng.random() < 0.25:  # a neighbour comes in the first half and perhaps goes, with less than a third of the room
        _neighbour(rng, foreign, (room - begun) * rng.uniform(0.05, 0.3), latest=needed // 2)
    if rng.random() < 0.25:  # a first-use step beside the growth
        _step(rng, lost, (room - begun) * rng.uniform(0.05, 0.3), rng.randint(1, max(1, needed // 3)))
    return _trace(rng, seed, f"growth/{shape}", baseline, begun, lost, foreign, [0.0] * (count + 1), 0.0, known)


def quiet(seed: int) -> Trace:
    """A device that steps, fills up to a cap, or has neighbours, but does not grow."""
    rng = random.Random(-1 - seed)
    baseline = _baseline(rng)
    floors = floors_of(baseline, RESERVE)
    count = rng.randint(100, 220)
    none = [0.0] * (count + 1)
    lost, foreign, fill, cap = none[:], none[:], none[:], 0.0
    known = rng.random() < 0.75
    kind = rng.choice(("flat", "steps", "owned fill", "fill", "neighbours"))
    above_reload = max(0.0, baseline - floors.reload - 40 * MIB)
    above_trim = max(0.0, baseline - floors.trim - 40 * MIB)
    if kind == "steps":
        for share in (0.6, 0.4)[: rng.randint(1, 2)]:
            _step(rng, lost, above_reload * share * rng.uniform(0.1, 1.0), rng.randint(1, count))
    elif kind == "owned fill":
        cap = above_trim * rng.uniform(0.1, 1.0)
        fill = _filling(rng, cap, count, linear=rng.random() < 0.5)
        _step(rng, lost, (above_trim - cap) * rng.uniform(0.0, 0.5), rng.randint(1, count))
    elif kind == "fill":
        fill = _filling(rng, min(above_trim, 0.24 * (baseline - floors.reload)) * rng.uniform(0.1, 1.0), count)
    elif kind == "neighbours" and known:
        for _ in range(rng.randint(1, 4)):
            _neighbour(rng, foreign, (baseline - 48 * MIB) / 4 * rng.uniform(0.1, 1.0), latest=count)
    elif kind == "neighbours":
        for _ in range(rng.randint(1, 2)):
            _neighbour(rng, foreign, above_reload / 2 * rng.uniform(0.1, 1.0), latest=count)
    return _trace(rng, seed, f"quiet/{kind}", baseline, 0, lost, foreign, fill, cap, known)


def replay(trace: Trace, *, stop_at_act: bool, config: WatchdogConfig | None = None, keep: bool = False) -> Replayed:
    """Feed the trace to a fresh watchdog and carry out what it decides."""
    return _Replay(trace, config or WatchdogConfig(), keep).run(stop_at_act)


class _Replay:
    def __init__(self, trace: Trace, config: WatchdogConfig, keep: bool) -> None:
        self.trace = trace
        self.config = config
        self.keep = keep
        self.rng = random.Random(trace.seed * 7919)
        self.result = Replayed(trace)
        self.floors = trace.floors
        self.released = 0
        self.pool = trace.pool
        self.at = 0.0
        self.generation = 1
        self.returned = 0.0
        """Loss that reloads have brought back."""
        self.held = Holdings(0)
        self.held_key: tuple[int, ...] = ()
        self.watch = self._ready(0, None)

    def run(self, stop_at_act: bool) -> Replayed:
        trace, rng = self.trace, self.rng
        crossing = trace.crossing
        gap = trace.request_s / trace.streams / trace.samples
        for done in range(trace.requests + 1):
            if stop_at_act and (self.result.acted is not None or done == crossing):
                break
            for sample in range(trace.samples):
                self.at += gap * rng.uniform(0.5, 1.5)
                between = sample == 0 and trace.streams == 1
                dipped = not between and rng.random() < trace.dip_share
                boundary = not dipped or rng.random() < 0.1
                self._sample(done, dipped, boundary, running=0 if between else trace.streams)
        return self.result

    def _sample(self, done: int, dipped: bool, boundary: bool, running: int) -> None:
        reading = self._reading(done, dipped)
        work = Work(running, done, done * 2000, boundary, self.at if running == 0 else None)
        self.watch, decision = step(self.watch, 0, self.at, reading, work, self._holdings(done), self.config)
        self.result.samples += 1
        if self.keep:
            self.result.decisions.append(decision)
        # An act is carried out at a step boundary, the pipeline drained: no dip is in the raw figure then.
        raw = reading.free if decision.action is None else self._reading(done, dipped=False).free
        acts = self._carry_out(decision, done)
        if (acts or decision.due is not None) and self.result.acted is None and raw > self.floors.reload:
            self.result.acted = done
            self.result.act = acts or "reload set"

    def _carry_out(self, decision: Decision, done: int) -> str:
        """What the decision came to, in a word, if it was an act in the sense of the figures."""
        action = decision.action
        if action is None or decision.dry_run:
            return ""
        if isinstance(action, Reload):
            self._reload(done)
            return "reload"
        returned = self._return(action)
        outcome = Outcome(action, self.at, "ok" if returned else "noop", returned)
        self.watch = with_policy(self.watch, told(self.watch.policy, outcome, self._holdings(done)))
        return str(action.rung) if isinstance(action, Trim) and returned else ""

    def _return(self, action: Trim | Cap | Regrow) -> int:
        if isinstance(action, Regrow):
            self.released -= action.wanted
            return 0
        if isinstance(action, Cap):
            return 0
        returned = 0
        if action.rung is Rung.ELASTIC:
            assert action.wanted is not None
            returned = action.wanted
        elif action.rung is Rung.POOLS:
            returned, self.pool = self.pool, 0
        self.released += returned
        return returned

    def _reload(self, done: int) -> None:
        self.result.reloads += 1
        self.released, self.pool, self.generation = 0, self.trace.pool, self.generation + 1
        self.returned = self.trace.begun + self.trace.lost[done] + self.trace.fill[done]
        self.watch = self._ready(done, self.watch)

    def _ready(self, done: int, before: Watch | None) -> Watch:
        return at_ready((self._reading(done, dipped=False),), (self.floors,), (self._holdings(done),), before)

    def _reading(self, done: int, dipped: bool) -> Reading:
        trace = self.trace
        free = trace.idle(done) + self.released + self.returned + self.rng.gauss(0.0, trace.noise)
        if dipped:
            free -= trace.dip * self.rng.uniform(0.2, 1.0)
        held = int(min(max(free, 0.0), TOTAL))
        own = TOTAL - held - int(trace.foreign[done]) if trace.known else None
        return Reading(self.at, TOTAL, held, own=own, source="simulated")

    def _holdings(self, done: int) -> Holdings:
        trace = self.trace
        key = (done if trace.fill_cap else 0, self.released, self.pool, self.generation)
        if key == self.held_key:
            return self.held
        plan = trace.elastic
        elastic = Elastic(plan.plan, plan.held - max(0, self.released - trace.pool + self.pool), plan.minimum)
        capped = ()
        if trace.fill_cap:
            capped = (CappedOwner("pool_cached", int(trace.fill[done]), int(trace.fill_cap)),)
        self.held_key = key
        self.held = Holdings(self.generation, self.released, elastic, capped, LEDGER | {"pool_cached": self.pool})
        return self.held


def _trace(
    rng: random.Random,
    seed: int,
    name: str,
    baseline: int,
    begun: int,
    lost: list[float],
    foreign: list[float],
    fill: list[float],
    cap: float,
    known: bool,
) -> Trace:
    plan = int(_log_uniform(rng, 64, 64 * 1024)) * MIB if rng.random() < 0.6 else 0
    deep = rng.random() < 0.5
    return Trace(
        name=name,
        baseline=baseline,
        begun=begun,
        lost=lost,
        foreign=foreign,
        fill=fill,
        fill_cap=cap,
        elastic=Elastic(plan, plan, plan // rng.randint(4, 10)),
        streams=rng.choice((1, 1, 2, 4, 8, 16, 32)),
        request_s=_log_uniform(rng, 2.0, 90.0),
        samples=rng.randint(2, 3),
        noise=rng.uniform(0.5, 8.0) * MIB,
        dip=baseline * (_log_uniform(rng, 0.01, 0.9) if deep else _log_uniform(rng, 0.01, 0.1)),
        dip_share=rng.uniform(0.1, 0.5),
        known=known,
        pool=rng.randint(4, 64) * MIB if rng.random() < 0.15 else 0,
        seed=seed,
    )


def _baseline(rng: random.Random) -> int:
    return int(_log_uniform(rng, 150, 60 * 1024)) * MIB


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _growth(rng: random.Random, shape: Shape, slope: float, count: int) -> list[float]:
    """Cumulated loss: a little with each request, all of it every few, or in the active part of a cycle."""
    if shape == "linear":
        each = [slope * rng.uniform(0.5, 1.5) for _ in range(count)]
    elif shape == "stepped":
        plateau = rng.randint(2, 12)
        each = [slope * plateau * rng.uniform(0.7, 1.3) if k % plateau == plateau - 1 else 0.0 for k in range(count)]
    else:
        cycle, share = rng.randint(8, 24), rng.uniform(0.25, 0.6)
        active = max(1, round(cycle * share))
        phase = rng.randrange(cycle)
        each = [slope * cycle / active * ((k + phase) % cycle < active) for k in range(count)]
    lost = [0.0]
    for loss in each:
        lost.append(lost[-1] + loss)
    return lost


def _step(rng: random.Random, series: list[float], height: float, after: int) -> None:
    for k in range(after, len(series)):
        series[k] += height


def _neighbour(rng: random.Random, foreign: list[float], height: float, latest: int) -> None:
    """Comes at some request and, half the time, leaves again."""
    comes = rng.randint(1, max(1, latest))
    leaves = rng.randrange(comes, len(foreign)) if rng.random() < 0.5 else len(foreign)
    for k in range(comes, leaves):
        foreign[k] += height


def _filling(rng: random.Random, cap: float, count: int, *, linear: bool = False) -> list[float]:
    begins, length = rng.randint(0, count // 2), rng.uniform(3.0, 40.0)
    if linear:
        return [cap * min(1.0, max(0, k - begins) / (3.0 * length)) for k in range(count + 1)]
    return [cap * (1.0 - math.exp(-max(0, k - begins) / length)) for k in range(count + 1)]

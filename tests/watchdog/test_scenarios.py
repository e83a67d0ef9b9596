"""Whole days and bad minutes, replayed through the pure core: sample, decide, carry out, tell."""

from dataclasses import dataclass, field

import pytest

from watchdog.actions import Outcome, Regrow, Reload, Rung, Trim
from watchdog.config import WatchdogConfig
from watchdog.floors import floors_of
from watchdog.policy import told
from watchdog.snapshot import GIB, MIB, Elastic, Holdings, Reading, Work
from watchdog.state import Decision, State, View
from watchdog.trend import TrendClass
from watchdog.watch import Watch, at_ready, step, view, with_policy

TOTAL = 144 * GIB
CONFIG = WatchdogConfig()


@dataclass
class Card:
    """A device, and the engine's share of it; all figures in bytes."""

    baseline: int = 512 * MIB
    plan: int = 0
    minimum: int = GIB
    leaked: int = 0
    foreign: int = 0
    shrunk: int = 0
    blind: bool = False
    decisions: list[Decision] = field(default_factory=list)

    @property
    def free(self) -> int:
        return max(0, self.baseline - self.leaked - self.foreign + self.shrunk)


class Bench:
    """Cards under one engine, sampled once a second; `rate` requests a second, `streams` at once."""

    def __init__(
        self, cards: list[Card], *, streams: int = 4, rate: float = 1.0, leak: int = 0, leaks_on: int = 0
    ) -> None:
        self.cards = cards
        self.streams = streams
        self.rate = rate
        self.leak = leak
        self.leaks_on = leaks_on
        self.at = 0.0
        self.finished = 0.0
        self.generation = 1
        self.reloads: list[float] = []
        self.watch = self._ready(None)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.at += 1.0
            before = int(self.finished)
            self.finished += self.rate
            self.cards[self.leaks_on].leaked += self.leak * (int(self.finished) - before)
            for device, card in enumerate(self.cards):
                self._sample(device, card)

    def view(self, device: int) -> View:
        card = self.cards[device]
        own, holdings = self.watch.devices[device], self._holdings(card)
        return view(own, device, self.at, self._reading(card), self._work(), holdings)

    def _sample(self, device: int, card: Card) -> None:
        reading = None if card.blind else self._reading(card)
        self.watch, decision = step(self.watch, device, self.at, reading, self._work(), self._holdings(card), CONFIG)
        card.decisions.append(decision)
        action = decision.action
        if isinstance(action, Reload):
            self._reload()
        elif action is not None:
            returned = 0
            if isinstance(action, Regrow):
                card.shrunk -= action.wanted
            elif isinstance(action, Trim) and action.rung is Rung.ELASTIC:
                returned = action.wanted or 0
                card.shrunk += returned
            outcome = Outcome(action, self.at, "ok" if returned else "noop", returned)
            self.watch = with_policy(self.watch, told(self.watch.policy, outcome, self._holdings(card)))

    def _reload(self) -> None:
        self.reloads.append(self.at)
        self.at += 5.0
        self.finished = 0.0
        self.generation += 1
        for card in self.cards:
            card.leaked = card.shrunk = 0
        self.watch = self._ready(self.watch)

    def _ready(self, before: Watch | None) -> Watch:
        floors = tuple(floors_of(card.baseline, 512 * MIB) for card in self.cards)
        readings = tuple(self._reading(card) for card in self.cards)
        return at_ready(readings, floors, tuple(self._holdings(card) for card in self.cards), before)

    def _reading(self, card: Card) -> Reading:
        return Reading(self.at, TOTAL, card.free, own=TOTAL - card.free - card.foreign, source="simulated")

    def _work(self) -> Work:
        finished = int(self.finished)
        return Work(self.streams, finished, finished * 1000, boundary=True, idle_since=None if self.streams else 0.0)

    def _holdings(self, card: Card) -> Holdings:
        elastic = Elastic(card.plan, card.plan - card.shrunk, min(card.minimum, card.plan))
        return Holdings(self.generation, card.shrunk, elastic)


@pytest.mark.parametrize("streams", [4, 32])
def test_a_big_card_with_a_leak_is_bridged_for_hours(streams: int) -> None:
    """144 GB, 130 GiB of elastic KV, 6 MiB a request, a request a second: half of the KV lasts three hours."""
    card = Card(plan=130 * GIB)
    bench = Bench([card], streams=streams, leak=6 * MIB)
    lowest = card.free
    for _ in range(int(6.5 * 60)):
        bench.run(60)
        lowest = min(lowest, card.free)
    first, *later = bench.reloads
    assert first > 2.5 * 3600
    assert len(later) == 1
    assert later[0] - first > 2.5 * 3600
    assert lowest > 64 * MIB
    shrinks = [decision.action for decision in card.decisions if isinstance(decision.action, Trim)]
    sizes = [trim.wanted for trim in shrinks if trim.rung is Rung.ELASTIC and trim.wanted is not None]
    assert 36 <= len(sizes) <= 56, "ten minutes at a time"
    assert max(sizes) < 600 * 6 * MIB + 512 * MIB


def test_the_same_leak_without_elastic_memory_is_degraded_and_not_reloaded_every_minute() -> None:
    card = Card()
    bench = Bench([card], leak=6 * MIB)
    bench.run(3000)
    assert len(bench.reloads) == 2
    assert card.decisions[-1].state is State.DEGRADED
    assert card.decisions[-1].hold, "nothing is free"


def test_a_neighbour_takes_900_mib_and_leaves_again() -> None:
    card = Card(baseline=GIB, plan=8 * GIB)
    bench = Bench([card])
    bench.run(120)
    assert card.decisions[-1].state is State.OK
    card.foreign = 900 * MIB
    bench.run(120)
    states = [decision.state for decision in card.decisions[120:]]
    assert State.WATCH in states, "warned"
    assert bench.view(0).kind is TrendClass.FOREIGN
    trims = [decision.action for decision in card.decisions if isinstance(decision.action, Trim)]
    assert [trim.rung for trim in trims] == [Rung.ELASTIC], "shrunk once, and nothing else touched"
    assert card.free > bench.watch.devices[0].floors.warn
    bench.run(600)
    assert bench.reloads == []
    card.foreign = 0
    bench.run(200)
    assert card.shrunk == 0, "regrown"
    assert card.free == GIB
    assert card.decisions[-1].state is State.OK
    assert bench.reloads == []


def test_a_neighbour_is_seen_while_the_engine_is_idle() -> None:
    card = Card(baseline=GIB, plan=8 * GIB)
    bench = Bench([card], streams=0, rate=0.0)
    bench.run(20)
    card.foreign = 900 * MIB
    bench.run(20)
    assert bench.view(0).kind is TrendClass.FOREIGN
    assert card.shrunk > 0
    assert bench.reloads == []


def test_a_neighbour_without_elastic_room_leads_to_degraded_and_no_reload() -> None:
    card = Card(baseline=GIB)
    bench = Bench([card])
    bench.run(60)
    card.foreign = 1000 * MIB
    bench.run(600)
    assert bench.reloads == []
    assert card.decisions[-1].state is State.DEGRADED
    assert card.decisions[-1].hold
    card.foreign = 0
    bench.run(30)
    assert card.decisions[-1].state is State.OK
    assert not card.decisions[-1].hold


def test_readings_lost_for_ten_seconds_on_one_of_two_devices() -> None:
    cards = [Card(), Card()]
    bench = Bench(cards)
    bench.run(60)
    cards[1].blind = True
    bench.run(10)
    lost = cards[1].decisions[60:]
    assert {decision.state for decision in lost} == {State.BLIND}
    assert all(decision.action is None for decision in lost)
    assert {decision.state for decision in cards[0].decisions} == {State.OK}, "devices are independent"
    cards[1].blind = False
    bench.run(10)
    assert {decision.state for decision in cards[1].decisions[70:]} == {State.OK}


def test_a_leak_goes_on_unseen_and_is_acted_on_after_three_readings() -> None:
    card = Card()
    bench = Bench([card], leak=2 * MIB)
    bench.run(30)
    card.blind = True
    bench.run(180)
    assert bench.reloads == []
    card.blind = False
    bench.run(15)
    assert len(bench.reloads) == 1


def test_growth_on_the_later_of_two_devices_with_32_streams_never_idle() -> None:
    cards = [Card(baseline=2 * GIB), Card(baseline=512 * MIB)]
    bench = Bench(cards, streams=32, rate=0.5, leak=3 * MIB, leaks_on=1)
    bench.run(110)
    assert bench.view(1).kind is TrendClass.GROWTH
    assert bench.view(0).kind is TrendClass.FLAT
    near = bench.view(1).forecast
    assert near is not None
    left = (cards[1].free - 128 * MIB) / (3 * MIB)
    assert near.requests == pytest.approx(left, rel=0.15)
    assert near.seconds == pytest.approx(2 * left, rel=0.15)
    bench.run(400)
    assert len(bench.reloads) >= 1
    assert all(decision.action is None for decision in cards[0].decisions), "the first device asks for nothing"


def test_an_operator_may_run_without_automatic_reloads() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.watchdog.test_scenarios.CONFIG", WatchdogConfig(reload_per_hour=0))
        card = Card()
        bench = Bench([card], leak=3 * MIB)
        bench.run(400)
    assert bench.reloads == []
    assert card.decisions[-1].state is State.DEGRADED

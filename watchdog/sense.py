"""What one sample says, confirmed: levels with hysteresis, and the counts of samples that agree."""

from dataclasses import replace

from watchdog.config import WatchdogConfig
from watchdog.floors import Floors, Level
from watchdog.ladder import end
from watchdog.snapshot import MIB
from watchdog.state import DeviceState, View
from watchdog.trend import TrendClass

OURS = (TrendClass.GROWTH, TrendClass.FILL)
"""Losses that a reload brings back and that go on until then."""


def margin(view: View) -> int:
    return margin_of(view.floors)


def margin_of(floors: Floors) -> int:
    """The least change of idle free memory that is worth an act: 10 % of E, at least 16 MiB."""
    return max(16 * MIB, floors.extent // 10)


def sense(state: DeviceState, view: View, config: WatchdogConfig) -> DeviceState:
    """The device's state with this sample counted; the same object when nothing has changed."""
    level, worse, seen = _level(state, view, config)
    near = view.forecast is not None and view.forecast.seconds <= config.reload_horizon_s
    soon = min(state.soon + 1, config.confirm) if near else 0
    raw_low = view.free is not None and view.free < view.floors.warn and not view.floors.tight
    low = min(state.low + 1, config.confirm) if raw_low else 0
    excess = min(state.excess + 1, config.confirm) if _has_excess(view) else 0
    now = (level, worse, seen, soon, low, excess)
    if now == (state.level, state.worse, state.seen, state.soon, state.low, state.excess):
        return state
    if level < state.level or (level is Level.OK and soon == 0):
        state = _better(state, view.at, level)
    return replace(state, level=level, worse=worse, seen=seen, soon=soon, low=low, excess=excess)


def effective(state: DeviceState, view: View, config: WatchdogConfig) -> Level:
    """The level to act on: a confirmed forecast inside the horizon acts as if the device were under trim."""
    if state.soon >= config.confirm and view.kind in OURS:
        return max(state.level, Level.TRIM)
    return state.level


def lost(view: View) -> int:
    """Bytes of ours that are gone since ready, elastic memory given up meanwhile included; never below 0."""
    assert view.idle_free is not None
    return max(0, view.floors.baseline + view.holdings.released - max(0, view.foreign or 0) - view.idle_free)


def rearmed(state: DeviceState, view: View, config: WatchdogConfig) -> DeviceState:
    """Degraded ends when idle free has risen by 10 % of E, or after an hour."""
    degraded = state.degraded
    if degraded is None or view.idle_free is None:
        return state
    risen = view.idle_free >= degraded.free + view.floors.extent // 10
    if risen or view.at - degraded.since >= config.rearm_s:
        return replace(state, degraded=None, lone_reload_at=None)
    return state


def _level(state: DeviceState, view: View, config: WatchdogConfig) -> tuple[Level, Level, int]:
    """(confirmed level, least level of the samples in a row that were worse, their number)."""
    if view.idle_free is None:
        return state.level, Level.OK, 0
    if view.floors.tight:
        return Level.OK, Level.OK, 0
    now = view.floors.level(view.idle_free)
    if now > state.level:
        worse = now if state.seen == 0 else min(now, state.worse)
        if state.seen + 1 >= config.confirm:
            return worse, Level.OK, 0
        return state.level, worse, state.seen + 1
    if state.level is not Level.OK and view.idle_free >= view.floors.leave(state.level):
        return now, Level.OK, 0
    return state.level, Level.OK, 0


def _better(state: DeviceState, at: float, level: Level) -> DeviceState:
    """A level has been left: the climb is over, and what was done once per stay may be done again."""
    if level is not Level.OK:
        return replace(state, ladder=end(state.ladder, at), climbed=min(state.climbed, level))
    if state.ladder.climbing or state.climbed is not Level.OK or state.capped is not None:
        return replace(state, ladder=end(state.ladder, at), climbed=Level.OK, capped=None)
    return state


def _has_excess(view: View) -> bool:
    """More is free than at ready, because elastic memory was given up and something else has come back."""
    if view.idle_free is None or view.kind in OURS:
        return False
    return view.holdings.elastic.missing > 0 and view.idle_free - view.floors.baseline >= margin(view)

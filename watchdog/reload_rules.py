"""When a reload is worth it, when it waits, and what bars it: the last rung has rules of its own."""

from dataclasses import dataclass, replace

from watchdog.actions import Action, Reload, ReloadReason
from watchdog.config import WatchdogConfig
from watchdog.floors import Level
from watchdog.sense import OURS, lost, margin
from watchdog.state import Degraded, DeviceState, Due, State, View, mib
from watchdog.trend import TrendClass

HOUR_S = 3600.0
LEAST_REQUESTS = 16
LEAST_S = 120.0
"""A forecast of fewer requests or seconds leaves no time to wait until a reload brings more back."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one row of the table says: the device's next state of mind, the state to show, and the act if any."""

    device: DeviceState
    state: State
    reason: str
    action: Action | None = None


def budget_left(reloads: tuple[float, ...], at: float, config: WatchdogConfig) -> int:
    return config.reload_per_hour - len([begun for begun in reloads if at - begun < HOUR_S])


def expected(view: View) -> int:
    """Idle free bytes after a reload: those of the last ready, less what others have taken since."""
    return view.floors.baseline - max(0, view.foreign or 0)


def bar(device: DeviceState, view: View, why: str) -> Choice:
    """A reload is due but barred: shown and alerted, work goes on."""
    assert view.idle_free is not None
    degraded = device.degraded or Degraded(view.at, view.idle_free, why)
    return Choice(
        replace(device, degraded=degraded, due=None), State.DEGRADED, f"a reload is due but barred: {degraded.why}"
    )


def reload_now(device: DeviceState, view: View, reason: ReloadReason, budget: int, why: str) -> Choice:
    """The reload itself, unless nothing would come of it."""
    if device.degraded is not None:
        return bar(device, view, device.degraded.why)
    if budget <= 0:
        return bar(device, view, "the budget of automatic reloads is spent")
    if lost(view) < margin(view):
        return bar(device, view, f"it would bring back only {mib(lost(view))}")
    return Choice(replace(device, due=None), State.RELOAD, why, Reload(view.device, reason))


def worth_it(view: View) -> bool:
    """For a forecast alone: half of the room is gone, or a quarter and the floor is too near to wait for half.

    A reload returns what was lost so far. One asked for at the first sign of a fast loss would return next to
    nothing, and the budget would be spent when it is needed.
    """
    elastic = view.holdings.elastic
    room = view.floors.baseline - view.floors.reload + max(0, elastic.plan - max(elastic.half, elastic.minimum))
    gone, near = lost(view), view.forecast
    soon = near is not None and (near.requests <= LEAST_REQUESTS or near.seconds <= LEAST_S)
    return gone * 2 >= room or (soon and gone * 4 >= room)


def set_due(device: DeviceState, view: View, config: WatchdogConfig, reason: ReloadReason, *, bridged: bool) -> Due:
    """A reload at the next idle moment; unless elastic memory bridges the wait, within the reload window."""
    if device.due is not None and (device.due.deadline is not None or bridged):
        return device.due
    if bridged:
        return Due(reason, view.at, None)
    wait = config.reload_window_s
    if view.forecast is not None:
        wait = min(wait, view.forecast.seconds / 2.0)
    return Due(reason, view.at, view.at + wait)


def settle_due(device: DeviceState, view: View, config: WatchdogConfig, level: Level, budget: int) -> Choice | None:
    """What becomes of a reload that is set; None while it goes on waiting. `level` is the level to act on."""
    due = device.due
    if due is None:
        return None
    passed = level < Level.TRIM and (due.deadline is not None or view.kind not in OURS)
    if passed or view.kind is TrendClass.FOREIGN:  # under trim a class that wavers for a window calls nothing off
        return Choice(replace(device, due=None), State.WATCH, "the need has passed, the reload is called off")
    idle = view.idle_for is not None and view.idle_for >= config.idle_s
    if idle and (budget > 0 or due.deadline is not None):
        return reload_now(device, view, due.reason, budget, "the reload that was set has its idle moment")
    if due.deadline is not None and view.at >= due.deadline:
        return reload_now(device, view, due.reason, budget, "the reload that was set could wait no longer")
    return None

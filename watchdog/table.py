"""The policy's table, a function for each row. `level` is the level to act on.

    class            above warn         under warn             under trim                    under reload
    flat, first_use  nothing            warn, idle rungs once  ladder                        ladder, reload if it helps
    growth           note the forecast  ladder                 ladder, bridge, set a reload  reload now
    fill             nothing            cap that owner         as growth                     as growth
    foreign          nothing            warn                   shrink elastic                shrink elastic, degraded
    unknown          nothing            warn                   ladder                        ladder, then one reload

One rung per decision: a row that returns a rung is asked again with the next fresh sample.
"""

from dataclasses import replace

from watchdog.actions import IDLE_RUNGS, TRIMS, Cap, Regrow, ReloadReason, Rung, Trim, whole
from watchdog.config import WatchdogConfig
from watchdog.floors import Level
from watchdog.ladder import end, next_rung, take
from watchdog.reload_rules import Choice, bar, expected, reload_now, set_due, worth_it
from watchdog.sense import OURS
from watchdog.state import DeviceState, State, View, mib
from watchdog.trend import TrendClass

NAMES = {Level.OK: "above its floors", Level.WARN: "warn", Level.TRIM: "trim", Level.RELOAD: "reload"}


def row(device: DeviceState, view: View, config: WatchdogConfig, level: Level, budget: int) -> Choice:
    """What the table says. `level` may be worse than the device's own when the forecast is inside the horizon."""
    if level is Level.OK:
        return _above_warn(device, view, config)
    if view.kind is TrendClass.GROWTH:
        return _growth(device, view, config, level, budget)
    if view.kind is TrendClass.FILL:
        return _fill(device, view, config, level, budget)
    if view.kind is TrendClass.FOREIGN:
        return _foreign(device, view, config, level)
    if view.kind is TrendClass.UNKNOWN:
        return _unknown(device, view, config, level, budget)
    return _flat(device, view, config, level, budget)


def _above_warn(device: DeviceState, view: View, config: WatchdogConfig) -> Choice:
    assert view.free is not None
    assert view.idle_free is not None
    if view.kind is TrendClass.GROWTH:
        return Choice(device, State.WATCH, f"free memory shrinks; {_outlook(view)}")
    if device.excess >= config.confirm and view.at - device.acted_at >= config.trim_cooldown_s:
        wanted = min(view.holdings.elastic.missing, view.idle_free - view.floors.baseline)
        action = Regrow(view.device, whole(wanted))
        return Choice(device, State.OK, f"room has come back: elastic memory may regrow by {mib(wanted)}", action)
    if device.low >= config.confirm:
        return Choice(device, State.WATCH, f"{mib(view.free)} free now, under the warn floor; idle memory is above it")
    if device.seen:
        return Choice(device, State.OK, f"{mib(view.idle_free)} idle free, if the next samples say the same")
    return Choice(device, State.OK, "idle free memory is above its floors")


def _flat(device: DeviceState, view: View, config: WatchdogConfig, level: Level, budget: int) -> Choice:
    if level is Level.WARN:
        if view.idle_for is not None and device.climbed < Level.WARN:
            device, trim = _climb(device, view, config, level, IDLE_RUNGS)
            if trim is not None:
                return _trimming(device, view, level, trim)
        return _warned(device, view)
    device, trim = _climb(device, view, config, level, TRIMS)
    if trim is not None:
        return _trimming(device, view, level, trim)
    if level is Level.TRIM:
        return Choice(device, State.TRIM, f"{_where(view, level)}; the ladder has no more and the loss has stopped")
    if expected(view) < view.floors.warn:
        return bar(device, view, f"it would end at {mib(expected(view))}, under the warn floor")
    return reload_now(device, view, ReloadReason.FLOOR, budget, f"{_where(view, level)}; trims were not enough")


def _growth(device: DeviceState, view: View, config: WatchdogConfig, level: Level, budget: int) -> Choice:
    if level is Level.RELOAD:
        why = f"{_where(view, level)} and it goes on shrinking"
        return reload_now(device, view, ReloadReason.FLOOR, budget, why)
    device, trim = _climb(device, view, config, level, TRIMS)
    bridged = view.holdings.elastic.releasable(keep_half=True) > 0
    forecast_only = device.level < Level.TRIM
    due = level is Level.TRIM and device.degraded is None and (not forecast_only or worth_it(view))
    if due:
        reason = ReloadReason.FORECAST if forecast_only else ReloadReason.GROWTH
        device = replace(device, due=set_due(device, view, config, reason, bridged=bridged))
    if trim is not None:
        return _trimming(device, view, level, trim)
    if device.due is not None and device.due.deadline is not None:
        return Choice(device, State.DRAIN, f"a reload is set for the next idle moment; {_outlook(view)}")
    if level is Level.TRIM and not due:
        return Choice(device, State.WATCH, f"{_outlook(view)}; a reload now would bring too little back")
    where = _where(view, level)
    return Choice(device, State.TRIM, where if where.endswith(_outlook(view)) else f"{where}; {_outlook(view)}")


def _fill(device: DeviceState, view: View, config: WatchdogConfig, level: Level, budget: int) -> Choice:
    if level is not Level.WARN:
        return _growth(device, view, config, level, budget)
    owner = view.fill_owner
    if owner is None or device.capped == owner:
        return _warned(device, view)
    why = f"{_where(view, level)}; {owner} is filling and stops where it is"
    return Choice(replace(device, capped=owner), State.TRIM, why, Cap(view.device, owner))


def _foreign(device: DeviceState, view: View, config: WatchdogConfig, level: Level) -> Choice:
    if level is Level.WARN:
        return _warned(device, view)
    taken = f"another process holds {mib(view.foreign or 0)} more than at ready"
    # No ladder and so no cool-down: who takes memory takes what is given up too, until it has what it wants.
    wanted = _wanted(device, view, config)
    if wanted and next_rung(replace(device.ladder, taken=None), (Rung.ELASTIC,), view.holdings) is not None:
        why = f"{_where(view, level)}; {taken}; elastic memory makes room"
        return Choice(device, State.TRIM, why, Trim(view.device, Rung.ELASTIC, wanted))
    if level is Level.RELOAD:
        return bar(device, view, taken)
    return Choice(device, State.TRIM, f"{_where(view, level)}; {taken}")


def _unknown(device: DeviceState, view: View, config: WatchdogConfig, level: Level, budget: int) -> Choice:
    if level is Level.WARN:
        return _warned(device, view)
    device, trim = _climb(device, view, config, level, TRIMS)
    if trim is not None:
        return _trimming(device, view, level, trim)
    if level is Level.TRIM:
        return Choice(device, State.TRIM, f"{_where(view, level)}; whose loss it is, is not known")
    if device.lone_reload_at is not None and view.at - device.lone_reload_at < config.rearm_s:
        return bar(device, view, "one was tried and the loss, whose owner is not known, came back")
    why = f"{_where(view, level)}; one reload may tell whose loss it is"
    choice = reload_now(device, view, ReloadReason.FLOOR, budget, why)
    if choice.action is None:
        return choice
    return replace(choice, device=replace(choice.device, lone_reload_at=view.at))


def _climb(
    device: DeviceState, view: View, config: WatchdogConfig, level: Level, rungs: tuple[Rung, ...]
) -> tuple[DeviceState, Trim | None]:
    """The next rung; None at the top of the ladder, and while it cools down after the last climb."""
    if device.ladder.cooling(view.at, config.trim_cooldown_s):
        return device, None
    wanted = _wanted(device, view, config)
    if wanted == 0:
        rungs = tuple(rung for rung in rungs if rung is not Rung.ELASTIC)
    rung = next_rung(device.ladder, rungs, view.holdings)
    if rung is not None:
        trim = Trim(view.device, rung, wanted if rung is Rung.ELASTIC else None)
        return replace(device, ladder=take(device.ladder, rung)), trim
    if device.ladder.climbing or device.climbed < level:
        return replace(device, ladder=end(device.ladder, view.at), climbed=max(device.climbed, level)), None
    return device, None


def _wanted(device: DeviceState, view: View, config: WatchdogConfig) -> int:
    """Elastic bytes to release: what brings the device back above warn, and under a loss what its next minutes need."""
    assert view.idle_free is not None
    ours = view.kind in OURS
    need = 0.0 if device.level is Level.OK else float(view.floors.leave(Level.TRIM) - view.idle_free)
    if ours and view.bytes_per_second is not None:
        bridge, room = view.bytes_per_second * config.bridge_s, view.idle_free - view.floors.reload
        if device.level is not Level.OK or room < bridge / 2.0:  # a forecast alone does not shrink a little each minute
            need = max(need, bridge - room)
    return min(whole(need), view.holdings.elastic.releasable(keep_half=ours))


def _trimming(device: DeviceState, view: View, level: Level, trim: Trim) -> Choice:
    return Choice(device, State.TRIM, f"{_where(view, level)}; next rung: {trim.rung}", trim)


def _warned(device: DeviceState, view: View) -> Choice:
    return Choice(device, State.WATCH, f"{_where(view, Level.WARN)} ({view.kind})")


def _where(view: View, level: Level) -> str:
    assert view.idle_free is not None
    floor = {Level.WARN: view.floors.warn, Level.TRIM: view.floors.trim, Level.RELOAD: view.floors.reload}[level]
    if view.idle_free >= floor:
        return f"{mib(view.idle_free)} idle free; {_outlook(view)}"
    return f"{mib(view.idle_free)} idle free, under the {NAMES[level]} floor of {mib(floor)}"


def _outlook(view: View) -> str:
    if view.forecast is None:
        return "no confident forecast"
    return f"reload floor in {view.forecast.requests:.0f} requests, {view.forecast.seconds / 60:.0f} minutes"

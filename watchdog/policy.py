"""The decision for one device at one sample: a pure function of what was kept, what is seen, and the settings.

table.py says what to do; here is what surrounds it: off, blind, stuck, dry-run, one act at a time, the shared budget,
and what outcomes do to the memory. A decision takes microseconds, so a recorded trace replays at once.
"""

from dataclasses import replace

from watchdog.actions import Outcome, Reload, Trim
from watchdog.config import WatchdogConfig
from watchdog.floors import Level
from watchdog.ladder import end, remember
from watchdog.reload_rules import HOUR_S, Choice, budget_left, settle_due
from watchdog.sense import effective, margin, rearmed, sense
from watchdog.snapshot import Holdings
from watchdog.state import Decision, Degraded, DeviceState, PolicyState, Reloading, State, View, mib
from watchdog.table import row
from watchdog.trend import TrendClass

Ready = tuple[int, ...] | None
"""Idle free bytes of each device at a new ready; None if no engine could be loaded."""

REHEARSED = (State.TRIM, State.DRAIN, State.RELOAD, State.DEGRADED)
"""States that a dry run names in its reason and does not enter."""


def start(devices: int) -> PolicyState:
    return PolicyState((DeviceState(),) * devices)


def decide(state: PolicyState, view: View, config: WatchdogConfig) -> tuple[PolicyState, Decision]:
    """What to do about `view.device` now. An action in the result is in flight until its outcome is told."""
    device = state.devices[view.device]
    if config.mode == "off":
        return _shown(state, view, State.DISABLED, "the watchdog is off")
    if view.engine == "stuck":
        return _shown(state, view, State.STUCK, "the engine was killed and is not gone: Xid or reboot")
    if state.reloading is not None or view.engine != "serving":
        return _shown(state, view, State.RELOAD, "the engine is being replaced")
    if view.free is None or view.idle_free is None:
        return _blind(state, device, view)
    device = rearmed(sense(device, view, config), view, config)
    choice = _choose(device, view, config, budget_left(state.reloads, view.at, config))
    if config.mode == "dry-run":
        return _rehearsed(state, choice, view, config)
    device = choice.device
    shown = choice.state if device.degraded is None else State.DEGRADED
    if shown is not device.state or choice.action is not None:
        device = replace(device, state=shown, in_flight=choice.action)
    state = state.put(view.device, device)
    if isinstance(choice.action, Reload):
        state = _begun(state, view)
    hold = device.degraded is not None and view.free < view.floors.hold_under
    return state, Decision(
        view.at, view.device, shown, view.kind, choice.reason, choice.action, device.due, hold, dry_run=False
    )


def told(state: PolicyState, outcome: Outcome, holdings: Holdings) -> PolicyState:
    """The state after a trim, a cap or a regrowth is over; `holdings` as they are now."""
    action = outcome.action
    device = state.devices[action.device]
    ladder = device.ladder
    if isinstance(action, Trim):
        ladder = remember(ladder, action.rung, outcome.returned if outcome.result == "ok" else 0, holdings)
    return state.put(action.device, replace(device, ladder=ladder, in_flight=None, acted_at=outcome.at))


def reload_begun(state: PolicyState, at: float) -> PolicyState:
    """A reload that the policy did not ask for (an operator, a crash): it costs no budget."""
    return replace(state, reloading=Reloading(at))


def reload_done(state: PolicyState, at: float, ready: Ready) -> PolicyState:
    """A reload is over. `ready`: idle free bytes per device at the new ready; None if no engine could be loaded.

    Everything starts anew, but for what must not be forgotten: a reload that failed, or brought nothing back, is not
    tried again until the device re-arms.
    """
    devices = []
    for index, old in enumerate(state.devices):
        barred = old.degraded or _disappointed(state.reloading, index, at, ready)
        devices.append(DeviceState(acted_at=at, degraded=barred, lone_reload_at=old.lone_reload_at))
    return PolicyState(tuple(devices), state.reloads, None)


def _disappointed(reloading: Reloading | None, device: int, at: float, ready: Ready) -> Degraded | None:
    if reloading is None or reloading.device != device:
        return None
    assert reloading.before is not None
    assert reloading.margin is not None
    if ready is None:
        return Degraded(at, reloading.before, "the last one failed")
    gain = ready[device] - reloading.before
    return Degraded(at, ready[device], f"the last one brought back {mib(gain)}") if gain < reloading.margin else None


def rearm(state: PolicyState, device: int) -> PolicyState:
    """The operator says that a barred reload may be tried again."""
    return state.put(device, replace(state.devices[device], degraded=None, lone_reload_at=None))


def _choose(device: DeviceState, view: View, config: WatchdogConfig, budget: int) -> Choice:
    if device.in_flight is not None:
        return Choice(device, State.TRIM, "a trim is in flight")
    if view.at <= device.acted_at:
        return Choice(device, device.state, "waits for a sample taken after the last act")
    level = effective(device, view, config)
    settled = settle_due(device, view, config, level, budget)
    if settled is not None:
        return settled
    return row(device, view, config, level, budget)


def _shown(state: PolicyState, view: View, shown: State, reason: str) -> tuple[PolicyState, Decision]:
    device = state.devices[view.device]
    if device.state is not shown:
        state = state.put(view.device, replace(device, state=shown))
    return state, Decision(view.at, view.device, shown, view.kind, reason)


def _blind(state: PolicyState, device: DeviceState, view: View) -> tuple[PolicyState, Decision]:
    """Nothing is decided on stale numbers, and what was counted or set before does not count afterwards."""
    forgotten = replace(
        device, worse=Level.OK, seen=0, soon=0, low=0, excess=0, due=None, ladder=end(device.ladder, view.at)
    )
    return _shown(state.put(view.device, forgotten), view, State.BLIND, "no fresh reading of this device")


def _begun(state: PolicyState, view: View) -> PolicyState:
    recent = tuple(begun for begun in state.reloads if view.at - begun < HOUR_S)
    devices = tuple(replace(device, due=None, in_flight=None) for device in state.devices)
    return PolicyState(devices, (*recent, view.at), Reloading(view.at, view.device, view.idle_free, margin(view)))


def _rehearsed(state: PolicyState, choice: Choice, view: View, config: WatchdogConfig) -> tuple[PolicyState, Decision]:
    """Dry run: the decision is recorded and nothing comes of it.

    Only the place in the ladder moves on, as if each rung had returned nothing; a reload that would have come, or a
    shrink for a neighbour, is not named again for a cool-down. Memory of rungs, budget and degraded stay as they were.
    """
    shown = State.WATCH if choice.state in REHEARSED else choice.state
    device = replace(choice.device, degraded=None, lone_reload_at=None, state=shown)
    if isinstance(choice.action, Reload) or (choice.action is not None and view.kind is TrendClass.FOREIGN):
        device = replace(device, due=None, acted_at=view.at + config.trim_cooldown_s)
    elif choice.action is not None:
        device = replace(device, acted_at=view.at)
    return state.put(view.device, device), Decision(
        view.at, view.device, shown, view.kind, choice.reason, choice.action, device.due, dry_run=True
    )

"""Puts into words, as events, what the watchdog sees, decides and does. What goes on as before is not said again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.events import Events, Kind
from watchdog.actions import Action, Cap, Regrow, Reload, Result, Rung, Trim
from watchdog.state import Decision, mib
from watchdog.status import DeviceStatus


@dataclass(frozen=True, slots=True)
class Done:
    """What one rung did on one device. `returned` is measured, below 0 where memory was taken; None: not known."""

    rung: Rung
    device: int
    result: Result
    returned: int | None
    seconds: float
    message: str = ""

    def json(self) -> dict[str, Any]:
        """The shape of POST /admin/trim."""
        return {
            "rung": self.rung.value,
            "device": self.device,
            "result": self.result,
            "returned_bytes": None if self.returned is None else max(0, self.returned),
            "seconds": round(self.seconds, 6),
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class _Said:
    """What the last event about a device has said."""

    state: str
    trend: str
    due: bool


class Notes:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._said: dict[int, _Said] = {}

    def ready(self, generation: int, devices: Sequence[DeviceStatus]) -> None:
        """The first readings under a new engine are there."""
        self._said.clear()
        for device in devices:
            floors = device.floors
            if floors is None:
                continue
            tight = "; tight: under its warn floor from the start, so only its trend leads to acts"
            self._events.record(
                "ready",
                f"engine {generation}: {mib(floors.baseline)} idle free; floors: warn {mib(floors.warn)}, trim "
                f"{mib(floors.trim)}, reload {mib(floors.reload)}{tight if floors.tight else ''}",
                device=device.device,
                trend=device.kind.value,
                state=device.state.value,
            )
            self._said[device.device] = _Said(device.state.value, device.kind.value, due=False)

    def decided(self, decision: Decision, *, acting: bool) -> None:
        """`acting`: something is being done at the moment, and its end will be told."""
        if acting and decision.action is None:
            return
        last = self._said.get(decision.device)
        said = _Said(decision.state.value, decision.kind.value, decision.due is not None)
        self._said[decision.device] = said
        newly_due = said.due and not (last and last.due)
        if decision.action is not None or newly_due:
            rung = "reload" if decision.action is None else _rung(decision.action)
            reason = decision.reason
            if decision.dry_run:
                reason = f"would {_would(decision.action)}: {reason}"
            self._record("dry_run" if decision.dry_run else "decision", decision, reason, rung)
        elif last is None or (said.state, said.trend) != (last.state, last.trend):
            self._record("state", decision, decision.reason, None)

    def acted(self, kind: Literal["trim", "regrow"], done: Done, *, by_operator: bool = False) -> None:
        """A rung was taken, or elastic memory again."""
        returned, said = done.returned, self._said.get(done.device)
        amount = "an unknown amount" if returned is None else mib(max(0, returned) if kind == "trim" else -returned)
        if kind == "trim":
            words = {"ok": f"{done.rung} gave back {amount}", "noop": f"{done.rung} had nothing to give back"}
        else:
            words = {"ok": f"elastic memory took {amount} again", "noop": "elastic memory found no room to grow"}
        reason = words.get(done.result, f"{done.rung} failed")
        self._events.record(
            kind,
            reason + (f": {done.message}" if done.message else "") + (", as an operator asked" if by_operator else ""),
            device=done.device,
            trend=None if said is None else said.trend,
            state=None if said is None else said.state,
            rung=done.rung.value,
            returned_bytes=max(0, returned) if kind == "trim" and returned is not None else returned,
        )

    def _record(self, kind: Kind, decision: Decision, reason: str, rung: str | None) -> None:
        self._events.record(
            kind,
            reason,
            device=decision.device,
            trend=decision.kind.value,
            state=decision.state.value,
            rung=rung,
        )


def _rung(action: Action) -> str | None:
    match action:
        case Trim():
            return action.rung.value
        case Reload():
            return "reload"
        case Regrow():
            return "elastic"
        case Cap():
            return None


def _would(action: Action | None) -> str:
    match action:
        case Trim():
            return f"take {action.rung}"
        case Reload():
            return f"reload ({action.reason})"
        case Regrow():
            return "regrow elastic memory"
        case Cap():
            return f"cap {action.owner}"
        case None:
            return "set a reload"

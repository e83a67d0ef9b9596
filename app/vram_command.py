"""`ullage vram`: the devices of a running service as a live table; once, where nobody watches or JSON is asked for."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.ops_client import NoAnswer, OpsClient
from app.settings import Settings

MIB = 1 << 20
SHOWN_EVENTS = 8
EVERY_S = 1.0
STYLES = {
    "ok": "green",
    "disabled": "dim",
    "watch": "yellow",
    "trim": "yellow",
    "drain": "yellow",
    "reload": "cyan",
    "degraded": "bold red",
    "blind": "bold red",
    "stuck": "bold red",
}


def vram(settings: Settings, out: TextIO, *, as_json: bool = False, once: bool = False) -> int:
    """Show until interrupted, or once. Raises ConfigError where no service answers at the beginning."""
    client = OpsClient.of(settings)
    shown = client.json("/admin/vram")
    if as_json:
        out.write(json.dumps(shown) + "\n")
        return 0
    console = Console(file=out)
    happened = client.json("/admin/events")["events"]
    if once or not console.is_terminal:
        console.print(view(shown, happened))
        return 0
    with Live(view(shown, happened), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(EVERY_S)
            live.update(_now(client), refresh=True)


def _now(client: OpsClient) -> RenderableType:
    try:
        return view(client.json("/admin/vram"), client.json("/admin/events")["events"])
    except NoAnswer as error:
        return Text(str(error), style="bold red")


def view(shown: Mapping[str, Any], happened: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What /admin/vram and /admin/events say, within a screen. Unknown is `?`, never 0."""
    parts: list[RenderableType] = [_head(shown)]
    if shown["devices"]:
        parts.append(_devices(shown["devices"]))
    else:
        parts.append(Text("The model runs on the CPU: there is no device memory to watch."))
    if happened:
        parts.append(_events(happened[-SHOWN_EVENTS:]))
    return Group(*parts)


def _head(shown: Mapping[str, Any]) -> Text:
    watchdog, queue, reload = shown["watchdog"], shown["queue"], shown["reload"]
    until = f" until {watchdog['until']}" if watchdog["until"] else ""
    work = f"{queue['running']} running, {queue['waiting']} waiting, {queue['held']} held, {queue['lost']} lost"
    engine = f"engine {reload['generation']}"
    if reload["in_progress"]:
        engine += f", reload: {reload['phase']} ({reload['reason']})"
    return Text(f"{shown['model']}   watchdog {watchdog['mode']}{until}   {engine}   {work}")


def _devices(devices: Sequence[Mapping[str, Any]]) -> Table:
    """A column a device, so that two or eight fit; sizes are MiB."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("MiB")
    for device in devices:
        table.add_column(f"{device['device']} {device['name']}", justify="right")
    table.add_row("state", *map(_state, devices))
    for name, key in (("free", "free"), ("idle free", "idle_free"), ("idle free at ready", "baseline_free")):
        table.add_row(name, *(_mib(device[key]) for device in devices))
    for floor in ("warn", "trim", "reload"):
        table.add_row(f"{floor} floor", *(_mib(device["floors"][floor]) for device in devices))
    trends = [device["trend"] for device in devices]
    table.add_row("class", *(trend["class"] for trend in trends))
    table.add_row("change a request", *(_mib(_less(trend["bytes_per_request"]), 1) for trend in trends))
    table.add_row("change an hour", *(_mib(_less(trend["bytes_per_second"], 3600), 1) for trend in trends))
    table.add_row("reload floor in", *map(_ahead, trends), end_section=True)
    for owner in dict.fromkeys(owner for device in devices for owner in device["ledger"]):
        table.add_row(owner, *(_mib(device["ledger"].get(owner), 1) for device in devices))
    for name in ("own", "other"):
        table.add_row(f"{name} in all", *(_mib(device[name], 1) for device in devices))
    return table


def _state(device: Mapping[str, Any]) -> Text:
    return Text(device["state"] + (" (tight)" if device["tight"] else ""), style=STYLES.get(device["state"], ""))


def _events(happened: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for event in happened:
        device = "" if event["device"] is None else f"device {event['device']}"
        table.add_row(event["time"][11:19], device, event["kind"], Text(event["reason"]))
    return table


def _less(slope: float | None, times: float = 1.0) -> float | None:
    """A loss is shown as one: what room changes by."""
    return None if slope is None else -slope * times


def _mib(size: float | None, digits: int = 0) -> str:
    if size is None:
        return "?"
    text = f"{size / MIB:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def _ahead(trend: Mapping[str, Any]) -> str:
    seconds, requests = trend["forecast_seconds"], trend["forecast_requests"]
    if seconds is None:
        return "-" if trend["class"] in ("flat", "first_use") else "?"
    return f"{seconds / 60:,.0f} min" + ("" if requests is None else f", {requests:,.0f} requests")

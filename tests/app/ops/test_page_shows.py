"""What the status page shows of what the service says, in a browser."""

from datetime import UTC, datetime

import pytest

from tests.app.ops.scripted_admin import MIB, Scripted, device, event, losing, request_row, vram
from tests.app.ops.signed_in import Shared, card, opened, rows_of


def test_what_a_device_has_and_loses(shared: Shared, admin: Scripted) -> None:
    page = opened(shared)
    text = card(page, 1)
    for words in ("98 MiB idle free", "Free now\n94 MiB", "At ready\n204 MiB", "Since ready\n−106 MiB"):
        assert words in text
    for words in (
        "Warn floor\n122 MiB",
        "Trim floor\n92 MiB",
        "Reload floor\n64 MiB",
        "drain",
        "RTX 5060 Ti · stage 1",
    ):
        assert words in text
    for words in (
        "growth: shrinks",
        "3.9 MiB lost",
        "156 MiB lost",
        "0.034 MiB lost",
        "87 %",
        "13 min, 9 requests",
    ):
        assert words in text
    for words in ("weights\t9,400 MiB\t57 %", "unaccounted\t6 MiB\t< 0.1 %", "this engine\t15,397 MiB\t94 %"):
        assert words in text
    assert "total\t16,384 MiB\t100 %" in text
    exact = page.run("document.querySelector('#device-1 [data-is=idle] data').title")
    assert exact == f"{98 * MIB:,} bytes"
    assert page.complaints == []


def test_what_is_first_seen_at_night(shared: Shared, admin: Scripted) -> None:
    page = opened(shared)
    assert page.text("#verdict") == "Device 1: drain. A reload is set and waits for an idle moment."
    now = page.text("#now")
    for words in ("Why: a reload is set", "98 MiB\nidle free on device 1", "13 min\n9 requests, device 1"):
        assert words in now
    for words in (
        "3 running\n1 waiting, 0 held",
        "Requests lost\n0",
        "serving\ngeneration 2",
        "on\nuntil it is changed",
    ):
        assert words in now
    assert page.run("document.title").startswith("98 MiB free")


def test_growth_before_anything_is_done_is_said(shared: Shared, admin: Scripted) -> None:
    admin.vram = vram(device(0), losing(1, state="watch"))
    page = opened(shared)
    assert page.text("#verdict") == "Device 1 loses memory: its reload floor is 13 min away."


def test_all_is_well(shared: Shared, admin: Scripted) -> None:
    admin.vram = vram(device(0), device(1))
    page = opened(shared)
    assert page.text("#verdict") == "All devices have room above their floors."
    assert "Reload floor in\nnot shrinking" in page.text("#now")


UNKNOWN = ("free", "used", "reserved", "own", "other", "idle_free", "baseline_free")


def test_unknown_is_never_zero(shared: Shared, admin: Scripted) -> None:
    nothing = dict.fromkeys(UNKNOWN) | {
        "floors": dict.fromkeys(("warn", "trim", "reload")),
        "ledger": {},
        "tight": None,
    }
    trend = dict.fromkeys(device(0)["trend"]) | {"class": "unknown"}
    admin.vram = vram(device(0, state="blind", name=None, total=None, **nothing, trend=trend))
    admin.requests = [request_row(1, [None], [None])]
    page = opened(shared)
    rows_of(page, "requests", 1)
    assert (
        page.run(
            r"/(^|[^.\d,])0 (MiB|%|requests)|NaN|null|undefined/.test(document.querySelector('#devices').innerText)"
        )
        is False
    )
    assert card(page, 0).count("unknown") >= 19
    assert "Least room\nunknown" in page.text("#now")
    assert "unknown unknown" in page.text("#requests tbody")


def test_own_bytes_that_are_unknown(shared: Shared, admin: Scripted) -> None:
    ledger = {"context": 400 * MIB, "weights": 9400 * MIB}
    admin.vram = vram(device(0, own=None, other=None, ledger=ledger, drift=-6 * MIB))
    page = opened(shared)
    text = card(page, 0)
    assert "this engine\tunknown" in text
    assert "other processes\tunknown" in text
    assert "unexplained change since ready\t−6 MiB" in text


SENTENCES = {
    "stuck": "Look for an Xid in the kernel log",
    "degraded": "A reload is due but barred",
    "blind": "Its memory cannot be read",
    "reload": "The engine is being replaced",
    "trim": "Memory is being given back",
    "disabled": "it measures and does nothing",
}


@pytest.mark.parametrize("state", SENTENCES)
def test_a_state_is_explained(shared: Shared, admin: Scripted, state: str) -> None:
    admin.vram = vram(device(0, state=state, reason="words of the policy", error="NVML said no"), device(1))
    page = opened(shared)
    assert state in page.text("#device-0 header")
    assert SENTENCES[state] in card(page, 0)
    assert "Why: words of the policy (NVML said no)." in card(page, 0)
    assert SENTENCES[state] in page.text("#verdict")


def test_tight_is_explained(shared: Shared, admin: Scripted) -> None:
    admin.vram = vram(device(0), device(1, tight=True, baseline_free=100 * MIB, idle_free=98 * MIB))
    page = opened(shared)
    assert "tight" in page.text("#device-1 header")
    assert "under its warn floor when the engine became ready" in card(page, 1)
    assert "tight" not in page.text("#device-0")
    assert "Device 1 is tight." in page.text("#now")


def test_the_worst_is_named_first_and_the_others_too(shared: Shared, admin: Scripted) -> None:
    admin.vram = vram(device(0, state="blind"), device(1, state="watch"), device(2, state="degraded"))
    admin.vram["watchdog"] = {"mode": "dry-run", "until": "2126-01-01T00:00:00Z"}
    admin.vram["queue"]["lost"] = 2
    page = opened(shared)
    assert page.text("#verdict").startswith("Device 2: degraded.")
    assert "Device 0: blind. Device 1: watch." in page.text("#now")
    assert "Dry run" in page.text("#now")
    assert "until 01/01/2126" in page.text("#now")
    assert page.run("document.querySelector('[data-is=lost]').dataset.level") == "reload"


def test_a_reload_under_way(shared: Shared, admin: Scripted) -> None:
    busy = {"in_progress": True, "phase": "load", "reason": "vram_growth", "started_at": datetime.now(UTC).isoformat()}
    admin.vram["reload"] |= busy
    page = opened(shared)
    assert page.text("#verdict").startswith("The engine is being replaced: load.")
    assert "load (vram_growth), since" in page.text("#reload")
    assert page.run("document.querySelector('#reload button').disabled")


@pytest.mark.parametrize(
    ("engine", "words"),
    [("loading", "The engine is being loaded"), ("failed", "No engine could be loaded"), ("stopped", "is ending")],
)
def test_no_engine(shared: Shared, admin: Scripted, engine: str, words: str) -> None:
    admin.vram["engine"] = engine
    page = opened(shared)
    assert words in page.text("#verdict")
    assert f"Engine\n{engine}" in page.text("#now")


def test_the_plain_cpu(shared: Shared, admin: Scripted) -> None:
    admin.vram = vram(watchdog={"mode": "disabled", "until": None})
    page = opened(shared)
    assert "there is no device memory to watch" in page.text("#devices-title, #no-devices") + page.text("#no-devices")
    assert page.run("document.querySelector('#trim').hidden && document.querySelector('#mode').hidden")
    assert "Reload the engine" in page.text("#reload")


def test_live_by_the_stream(shared: Shared, admin: Scripted) -> None:
    """The list of events is asked for once, so what comes later has come by the stream."""
    admin.events = [event(1, kind="ready", state="ok", reason="engine 2: 204 MiB idle free")]
    page = opened(shared)
    rows_of(page, "events", 1)
    admin.vram = vram(device(0), losing(1, free=61 * MIB))
    admin.events.append(
        event(2, kind="trim", rung="pools", state="trim", reason="pools gave back 4 MiB", returned_bytes=4 * MIB)
    )
    admin.events.append(event(3, kind="trim", rung="elastic", state="trim", reason="elastic failed"))
    admin.events.append(
        event(4, kind="mode", device=None, state=None, **{"class": None}, reason="set to off by an operator")
    )
    rows_of(page, "events", 4)
    page.until("document.querySelector('#device-1').innerText.includes('61 MiB')")
    newest, failed, trimmed, _ = page.text("#events tbody").split("\n")
    assert newest.endswith("\tmode\tset to off by an operator\t")
    assert failed.endswith("\ttrim\ttrim elastic · growth\telastic failed\tunknown")
    assert trimmed.endswith("\ttrim\ttrim pools · growth\tpools gave back 4 MiB\t4 MiB")
    assert page.complaints == []


def test_requests(shared: Shared, admin: Scripted) -> None:
    admin.requests = [request_row(number, [272 * MIB, (110 - 2 * number) * MIB], [0, -2 * MIB]) for number in range(60)]
    admin.requests.append(request_row(60, [270 * MIB, -0 * MIB], [None, None]) | {"overlap": 3})
    page = opened(shared)
    rows_of(page, "requests", 50)
    newest, before = page.text("#requests tbody").split("\n")[:2]
    assert newest.split("\t")[1:] == ["113,445", "0", "128", "3", "270 MiB unknown", "0 MiB unknown"]
    assert before.split("\t")[1:] == ["113,445", "0", "128", "0", "272 MiB 0 MiB", "−8 MiB −2 MiB"]
    assert page.run("document.querySelectorAll('#requests tbody tr')[1].lastElementChild.title") == "unaccounted +2 MiB"
    assert page.run("document.querySelector('a[download]').href").endswith("/admin/vram/requests?format=csv")


def test_the_chart_begins_before_the_page_did(shared: Shared, admin: Scripted) -> None:
    now = datetime.now(UTC).timestamp()
    times = [now - 600 + 10 * number for number in range(60)]
    levels = {name: [size * MIB] * 60 for name, size in (("warn", 122), ("trim", 92), ("reload", 64))}
    falling = [(204 - number) * MIB for number in range(60)]
    admin.history = [{"device": 1, "time": times, "free": falling, "idle_free": falling, **levels}]
    page = opened(shared)
    page.until("charts.get(1).data[0].length > 60")
    assert page.run("[charts.get(1).data[2][0], charts.get(1).data[2].at(-1), charts.get(1).data[5][0]]") == [
        204,
        98,
        64,
    ]
    assert page.run("document.querySelector('#device-1 .chart').ariaLabel").endswith("from 204 to 98 MiB")
    page.until(
        "(() => { const it = document.querySelector('#device-1 canvas');"
        " const dots = it.getContext('2d').getImageData(0, 0, it.width, it.height).data; let drawn = 0;"
        " for (let at = 3; at < dots.length; at += 4) drawn += dots[at] > 0; return drawn > 1000; })()"
    )
    page.run("(document.querySelector('#span').value = '900', 0)")
    page.until("charts.get(1).scales.x.max > charts.get(1).scales.x.min")

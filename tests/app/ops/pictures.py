"""Pictures of the status page, for somebody to look at: python -m tests.app.ops.pictures FOLDER

The motivating report's 19 requests, and four cards none of which is well; on a desk, in the dark, on a phone.
"""

import random
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.app.ops.chromium import browser
from tests.app.ops.scripted_admin import MIB, Scripted, device, event, losing, request_row, serving, vram
from tests.app.ops.signed_in import OPENED, opened, rows_of, sign_in

LOSSES = (62, 0, 6, 4, 4, 2, 4, 4, 2, 4, 2, 0, 0, 0, 0, 0, 4, 2, 6)
"""MiB that the later card loses over each of the report's requests."""
LEFT = list(accumulate(LOSSES, lambda left, lost: left - lost, initial=204))
LOOKS: dict[str, dict[str, Any]] = {
    "desk": {},
    "dark": {"dark": True},
    "phone": {"width": 360, "height": 740},
    "phone-dark": {"width": 360, "height": 740, "dark": True},
}


def report(admin: Scripted) -> None:
    """The later card shrinks, and a reload is set."""
    first = [330, *[272] * len(LOSSES)]
    admin.history = [_past(0, first, (198, 148, 82)), _past(1, LEFT, (122, 92, 64))]
    admin.requests = [
        request_row(number, [first[number + 1] * MIB, left * MIB], [(-58 if number == 0 else 0) * MIB, -lost * MIB])
        for number, (left, lost) in enumerate(zip(LEFT[1:], LOSSES, strict=True))
    ]
    under = "116 MiB idle free, under the warn floor of 122 MiB; next rung: "
    due = "a reload is set for the next idle moment; reload floor in 9 requests, 13 minutes"
    admin.events = [
        event(1, kind="ready", state="ok", reason="engine 2: 204 MiB idle free"),
        event(9, reason="free memory shrinks; reload floor in 14 requests, 21 minutes"),
        event(12, kind="decision", rung="pools", state="trim", reason=under + "pools"),
        event(13, kind="trim", rung="pools", state="trim", reason="pools gave back 4 MiB", returned_bytes=4 * MIB),
        event(19, kind="decision", rung="reload", state="drain", reason=due),
    ]


def _past(number: int, sizes: list[int], floors: tuple[int, ...]) -> dict[str, Any]:
    """Half an hour, a request every 90 s, in MiB."""
    noise = random.Random(number)
    times = [time.time() - 1800 + 10 * at for at in range(180)]
    idle = [sizes[min(len(sizes) - 1, at // 9)] * MIB for at in range(180)]
    levels = zip(("warn", "trim", "reload"), floors, strict=True)
    return {
        "device": number,
        "time": times,
        "free": [size - noise.choice((0, 2, 4, 8, 14)) * MIB for size in idle],
        "idle_free": idle,
        **{name: [floor * MIB] * 180 for name, floor in levels},
    }


def trouble(admin: Scripted) -> None:
    """Degraded, blind, tight, stuck."""
    unread = dict.fromkeys(("free", "used", "reserved", "own", "other", "idle_free")) | {"ledger": {}, "error": "NVML"}
    barred = {"idle_free": 70 * MIB, "free": 66 * MIB, "reason": "a reload is due but barred: the budget is spent"}
    admin.vram = vram(
        losing(0, **barred, state="degraded"),
        device(1, state="blind", reason="no fresh reading of this device", **unread, trend={"class": "unknown"}),
        device(2, tight=True, baseline_free=90 * MIB, idle_free=88 * MIB),
        device(3, state="stuck", reason="the engine was killed and is not gone: Xid or reboot"),
        engine="stuck",
        watchdog={"mode": "dry-run", "until": "2126-01-01T00:00:00Z"},
        queue={"running": 0, "waiting": 4, "held": 2, "lost": 1},
    )


def main(folder: Path) -> None:
    scenes: dict[str, Callable[[Scripted], None]] = {"report": report, "trouble": trouble}
    folder.mkdir(parents=True, exist_ok=True)
    with serving() as admin, browser() as chrome, chrome.page(admin.url) as page:
        page.picture(folder / "key.png")
        sign_in(page)
        page.until(OPENED)
        for scene, set_up in scenes.items():
            for look, size in LOOKS.items():
                admin.begin()
                set_up(admin)
                opened((admin, page), **size)
                rows_of(page, "requests", len(admin.requests))
                page.picture(folder / f"{scene}-{look}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`make demo-watchdog`: a card that leaks, a watchdog that sees it, and a stream that goes on. No GPU, under 90 s.

Two simulated cards with the smallest KV pool and little room; each request takes 6 MiB of the later one for good. An
operator takes the whole ladder of trims first, so that nothing is left in it: what follows can only be a reload. What
must happen is read from the admin API and checked in the end; the exit code is 0 only if all of it did.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.served import Answer, Served, serving

MIB = 1 << 20
LATER = 1
LEAK = 6 * MIB
CRUMB = 2 * MIB
"""One granule: what the prompt just computed leaves in a pool, and what a trim may return though it returns nothing."""
ARGUMENTS = (
    *("--simulate-gpus", "1700MiB,1660MiB", "--layer-split", "15,15", "--faults", "leak=6MiB/request@1"),
    *("--max-context", "2048", "--max-batch", "4", "--kv-dtype", "f32", "--kv-pool-mib", "120"),
    *("--vram-reserve-mib", "140", "--trim-cooldown", "2"),
)
STORY = "Tell a long story"
LONGEST = 1900
MOST_REQUESTS = 60
PACE_S, PACE_EVENTS = 0.3, 8
"""A request comes after so many seconds and so many events of the stream, so that it lasts on fast machines too."""
AFTERWARDS = 60
"""Characters of the stream that must come after the reload."""
LIMIT_S = 90.0
BAR = 40


@dataclass
class Watched:
    """What was seen, in its order."""

    began: float
    free: list[int] = field(default_factory=list)
    """Idle free bytes of the later card after each request, until a reload is due."""
    classes: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    first_engine: int = 0
    story: Answer = field(default_factory=Answer)
    said_before: int = 0
    """Characters of the stream when the reload was over."""

    def say(self, line: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self.began:5.1f} s  {line}\n")
        sys.stdout.flush()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def reloaded(self) -> bool:
        return any(event["reason"].startswith("is over: ok") for event in self.of("reload"))


def main(model: str | None) -> int:
    watched = Watched(time.monotonic())
    with tempfile.TemporaryDirectory() as folder:
        chosen = () if model is None else ("--model", model)
        watched.say("a service starts on two simulated cards")
        with serving(Path(folder) / "state", *chosen, *ARGUMENTS) as served:
            _watch(served, watched)
            after = served.vram()
            twin = _undisturbed(served, len(watched.story.text))
    results = [(name, holds(watched, after, twin)) for name, holds in CHECKS]
    seconds = time.monotonic() - watched.began
    results.append((f"all of it within {LIMIT_S:.0f} s ({seconds:.0f} s)", seconds < LIMIT_S))
    sys.stdout.write("\n" + "".join(f"  {'yes' if holds else 'NO '}  {name}\n" for name, holds in results))
    return 0 if all(holds for _, holds in results) else 1


def _watch(served: Served, watched: Watched) -> None:
    _until(lambda: _later(served)["baseline_free"] is not None)
    watched.first_engine = served.vram()["reload"]["generation"]
    heard = threading.Event()
    story = threading.Thread(target=_tell, args=(served, watched.story, lambda answer: heard.is_set()), daemon=True)
    story.start()
    _until(lambda: len(watched.story.arrivals) > 1)
    given = sum(result["returned_bytes"] or 0 for result in served.trim() if result["device"] == LATER)
    watched.say(f"a stream is told; the operator takes every rung of trims, which gives {given // MIB} MiB once")
    for number in range(1, MOST_REQUESTS + 1):
        paced = len(watched.story.arrivals) + PACE_EVENTS
        served.chat(f"Say hello, number {number}.", max_tokens=1)
        _show(served, watched, number)
        if watched.reloaded:
            break
        time.sleep(PACE_S)
        _until(partial(_told, watched.story, paced), 5.0)
    watched.said_before = len(watched.story.text)
    _until(lambda: len(watched.story.text) - watched.said_before >= AFTERWARDS or not story.is_alive())
    heard.set()
    _until(lambda: (_later(served)["idle_free"] or 0) > min(watched.free, default=0), 10.0)


def _show(served: Served, watched: Watched, number: int) -> None:
    device, events = _later(served), served.events(watched.events[-1]["seq"] if watched.events else 0)
    watched.events += events
    free, kind = device["idle_free"], device["trend"]["class"]
    if free is not None and not watched.of("reload"):
        watched.free.append(free)
        watched.classes.append(kind)
    amount = 0 if free is None else free // MIB
    watched.say(f"request {number:2}  {amount:4} MiB {'█' * round(amount / 6):{BAR}}  {kind:9}  {device['state']}")
    for event in events:
        if event["kind"] in ("decision", "trim", "reload", "ready", "degraded") and event["device"] in (LATER, None):
            watched.say(f"    {event['kind']}: {event['reason']}")


def _later(served: Served) -> dict[str, Any]:
    return dict(served.vram()["devices"][LATER])


def _told(story: Answer, events: int) -> bool:
    return len(story.arrivals) >= events or story.finish is not None


def _tell(served: Served, answer: Answer, enough: Callable[[Answer], bool]) -> None:
    served.chat(STORY, answer, enough, stream=True, max_tokens=LONGEST, temperature=0)


def _undisturbed(served: Served, length: int) -> str:
    """The beginning of the same stream when nothing happens, so many characters or more if it has them."""
    answer = Answer()
    _tell(served, answer, lambda answer: len(answer.text) >= length)
    return answer.text


def _until(holds: Callable[[], bool], patience_s: float = 30.0) -> None:
    """Wait for it; whether it came is for the checks to say."""
    end = time.monotonic() + patience_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)


def _fell(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    return len(watched.free) > 4 and watched.free[0] - watched.free[-1] >= 4 * LEAK


def _grew(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    return watched.classes[:1] != ["growth"] and "growth" in watched.classes


def _trimmed_in_vain(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    trims = [event for event in watched.of("trim") if "operator" not in event["reason"] and event["device"] == LATER]
    return bool(trims) and all((event["returned_bytes"] or 0) <= CRUMB for event in trims)


def _by_the_watchdog(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    last = after["reload"]["last"]
    reasons = ("vram_forecast", "vram_growth", "vram_floor")
    return last is not None and last["result"] == "ok" and last["reason"] in reasons and watched.reloaded


def _in_order(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    trims = [event["seq"] for event in watched.of("trim") if "operator" not in event["reason"]]
    begun = [event["seq"] for event in watched.of("reload") if event["reason"].startswith("begins")]
    growth = [event["seq"] for event in watched.events if event["class"] == "growth"]
    return bool(trims and begun and growth) and growth[0] < trims[0] < begun[0]


def _room_is_back(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    device = after["devices"][LATER]
    returned = sum(event["returned_bytes"] or 0 for event in watched.of("reload") if event["device"] == LATER)
    free = device["idle_free"]
    return returned >= 4 * LEAK and free is not None and free >= device["baseline_free"] - LEAK


def _another_engine(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    return bool(after["reload"]["generation"] == watched.first_engine + 1)


def _went_on(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    story = watched.story
    grown = len(story.text) - watched.said_before
    return story.status == 200 and story.error is None and watched.said_before > 0 and grown >= AFTERWARDS


def _same_text(watched: Watched, after: dict[str, Any], twin: str) -> bool:
    length = min(len(twin), len(watched.story.text))
    return length > watched.said_before and twin[:length] == watched.story.text[:length]


CHECKS: tuple[tuple[str, Callable[[Watched, dict[str, Any], str], bool]], ...] = (
    ("free memory of the later card fell", _fell),
    ("the class turned to growth", _grew),
    ("the watchdog's trims returned nothing of it", _trimmed_in_vain),
    ("growth was known before the trims, and they came before the reload", _in_order),
    ("the watchdog reloaded the engine", _by_the_watchdog),
    ("exactly one engine took over", _another_engine),
    ("the room came back", _room_is_back),
    ("the stream went on, without an error", _went_on),
    ("its text is that of an undisturbed run", _same_text),
    ("nothing was lost", lambda watched, after, twin: after["queue"]["lost"] == 0),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))

"""How long a client's stream stands still over a reload: 8 streams of the demo model, planned reloads and kill -9.

Pass marks on an idle machine: p95 of the pause under 2 s when planned; after kill -9 at most 1.5 s plus 1.3 times what
the prefill of all that the streams held takes at the rate measured here. Requests that arrive meanwhile are counted in.
Last, what the watchdog costs while it decodes.
"""

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.demo_model import ensure_demo_model
from benchmarks import watchdog
from benchmarks.served import PATIENCE_S, Answer, Served, serving

STREAMS, LATE = 8, 2
"""Streams that run when it happens, and requests that come right after."""
TOKENS = 80
PROMPT_WORDS = 120
ENDLESS = {"0": -100, "2": -100}
"""The demo model's tokens that end an answer are never taken, so all streams are of one length."""
ROUNDS = 2
GRACEFUL_S, KILLED_S, PREFILL_FACTOR = 2.0, 1.5, 1.3
CARDS = ("--simulate-gpus", "2x4GiB", "--max-context", "2048")


def run() -> dict[str, Any]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ullage"
    model = os.environ.get("ULLAGE_DEMO_MODEL") or str(ensure_demo_model(cache))
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "state", "--model", model, *CARDS) as served:
        rate = _prefill_rate(served)
        planned = [_round(served, served.reload) for _ in range(ROUNDS)]
        killed = [_round(served, lambda: os.kill(served.engines()[0], signal.SIGKILL)) for _ in range(ROUNDS)]
        cost = _watchdog_share(served)
    limit = KILLED_S + PREFILL_FACTOR * min(each["tokens"] for each in killed) / rate
    result = {
        "prefill_tokens_per_second": rate,
        "planned_p95_s": _p95(planned),
        "planned_limit_s": GRACEFUL_S,
        "killed_p95_s": _p95(killed),
        "killed_limit_s": limit,
        "watchdog_share_of_decode": cost,
        "planned_phases": planned[-1]["phases"],
        "killed_phases": killed[-1]["phases"],
    }
    for name, rounds, most in (("planned", planned, GRACEFUL_S), ("kill -9", killed, limit)):
        sys.stdout.write(f"{name:8} p95 {_p95(rounds):6.2f} s of {most:5.2f}   {_phases(rounds[-1]['phases'])}\n")
    sys.stdout.write(f"prefill {rate:.0f} tokens/s; the watchdog takes {100 * cost:.2f} % of a core while decoding\n")
    return result


def _round(served: Served, act: Callable[[], object]) -> dict[str, Any]:
    """Pauses of all clients in seconds, the phases of the reload, and the tokens that a kill makes compute again."""
    answers = [Answer() for _ in range(STREAMS + LATE)]
    began = [0.0] * len(answers)
    generation = served.vram()["reload"]["generation"]

    def ask(number: int) -> None:
        began[number] = time.monotonic()
        prompt = f"{number} {'word ' * PROMPT_WORDS}"  # no two of them share a block
        served.chat(prompt, answers[number], stream=True, max_tokens=TOKENS, temperature=0, logit_bias=ENDLESS)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(answers))]
    for thread in threads[:STREAMS]:
        thread.start()
    _until(lambda: all(len(answer.arrivals) > TOKENS // 4 for answer in answers[:STREAMS]))
    tokens = len(answers) * PROMPT_WORDS + sum(len(answer.arrivals) for answer in answers)
    act()
    for thread in threads[STREAMS:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer.whole for answer in answers), [(answer.status, answer.error) for answer in answers]
    _until(lambda: served.vram()["reload"]["generation"] > generation and not served.vram()["reload"]["in_progress"])
    late = [answers[n].arrivals[0] - began[n] for n in range(STREAMS, STREAMS + LATE)]
    pauses = [answer.longest_pause_s for answer in answers[:STREAMS]] + late
    phases = served.vram()["reload"]["last"]["phases"]
    sys.stdout.write(f"pauses of {min(pauses):.2f} to {max(pauses):.2f} s   {_phases(phases)}\n")
    sys.stdout.flush()
    return {"pauses": pauses, "phases": phases, "tokens": tokens}


def _prefill_rate(served: Served) -> float:
    """Tokens a second, from the time to the first token of one long prompt."""
    best = 0.0
    for number in range(2):
        began = time.monotonic()
        answer = served.chat(f"{number} " + "word " * 500, max_tokens=1)
        assert answer.whole
        best = max(best, 500 / (time.monotonic() - began))
    return best


def _watchdog_share(served: Served) -> float:
    """Seconds of sampling and deciding per second of decoding: how often it looked times what one look takes."""
    looks, began = _looks(served), time.monotonic()
    served.chat("Tell a long story", stream=True, max_tokens=100)
    rate = (_looks(served) - looks) / (time.monotonic() - began)
    return rate * float(watchdog.run()["sample_and_decide_us"]) / 1e6


def _looks(served: Served) -> float:
    [count] = re.findall(
        r'^ullage_watchdog_samples_total{device="0",result="ok"} (\S+)$', served.metrics(), re.MULTILINE
    )
    return float(count)


def _p95(rounds: list[dict[str, Any]]) -> float:
    pauses = sorted(pause for each in rounds for pause in each["pauses"])
    return float(pauses[min(len(pauses) - 1, round(0.95 * len(pauses)))])


def _phases(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("what was waited for has not come")
        time.sleep(0.01)

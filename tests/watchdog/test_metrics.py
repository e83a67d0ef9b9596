"""The whole exposition, byte for byte, and the rules that names and series keep."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from watchdog.actions import Rung
from watchdog.counts import Counts
from watchdog.floors import floors_of
from watchdog.metrics import TABLE, alone
from watchdog.snapshot import GIB, MIB, Health, Reading
from watchdog.state import State
from watchdog.status import DeviceStatus, Status
from watchdog.trend import Forecast, Slopes, TrendClass

GOLDEN = Path(__file__).with_name("metrics.txt")
LEDGER = {"context": 500 * MIB, "weights": 9 * GIB, "kv_cache": 5 * GIB, "unaccounted": -3 * MIB}

GROWING = DeviceStatus(
    device=1,
    uuid="GPU-b",
    name="card",
    health=Health(attempted_at=99.5, succeeded_at=99.5, duration_s=1e-5, failures_total=3, samples_total=60),
    stages=(1,),
    reading=Reading(
        99.5,
        16 * GIB,
        free=300 * MIB,
        used=16 * GIB - 800 * MIB,
        reserved=500 * MIB,
        own=14 * GIB + 497 * MIB,
        other=GIB,
        own_source="host_pid",
    ),
    lowest_free=290 * MIB,
    runtime_free=301 * MIB,
    idle_free=310 * MIB,
    floors=floors_of(480 * MIB, 512 * MIB),
    kind=TrendClass.GROWTH,
    slopes=Slopes(4.0 * MIB, 1000.0, 50000.0),
    confidence=0.9,
    forecast=Forecast(requests=47.5, seconds=3600.0),
    ledger=LEDGER,
    state=State.WATCH,
)
BLIND = DeviceStatus(
    device=0,
    uuid="GPU-a",
    name="card",
    health=Health(attempted_at=99.0, succeeded_at=40.0, duration_s=2.5, failures=4, failures_total=4, samples_total=9),
    state=State.BLIND,
)


def counts() -> Counts:
    counts = Counts(devices=2)
    counts.trimmed(1, Rung.ELASTIC, "ok", 64 * MIB, 0.02)
    counts.trimmed(1, Rung.POOLS, "noop", -2 * MIB, 0.001)
    return counts


def exposition(*devices: DeviceStatus, happened: Counts | None = None) -> str:
    status = Status(100.0, 1_700_000_100.0, devices)
    return generate_latest(alone(lambda: status, happened or Counts(2))).decode()


def test_golden() -> None:
    assert exposition(BLIND, GROWING, happened=counts()) == GOLDEN.read_text(encoding="utf-8")


def test_before_anything_is_known_counters_are_zero_and_gauges_absent() -> None:
    text = exposition()
    assert "ullage_vram_" not in text
    assert 'ullage_watchdog_trims_total{device="1",result="failed",rung="elastic"} 0.0' in text
    assert set(re.findall(r"^(?!#).* (\S+)$", text, re.MULTILINE)) == {"0.0"}
    assert "_created" not in text


def test_a_forecast_is_infinite_while_nothing_leads_to_the_floor() -> None:
    text = exposition(replace(GROWING, forecast=None))
    assert 'ullage_vram_exhaustion_forecast_seconds{device="1"} +Inf' in text
    assert "ullage_vram_exhaustion" not in exposition(BLIND)


def test_unknown_own_bytes_have_no_series_and_drift_takes_their_place() -> None:
    reading = replace(GROWING.reading, own=None, other=None, own_source="none")  # type: ignore[type-var]
    text = exposition(replace(GROWING, reading=reading, drift=-6 * MIB))
    assert "ullage_vram_process_bytes" not in text
    assert 'ullage_vram_attribution_info{device="1",source="none"} 1.0' in text
    assert 'ullage_vram_drift_bytes{device="1"} -6291456.0' in text


def test_every_device_is_in_one_state() -> None:
    for state in State:
        states = re.findall(r'watchdog_state\{device="0",state="(\w+)"\} 1\.0', exposition(replace(BLIND, state=state)))
        assert states == [state.value]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_names_keep_the_rules_of_the_linter(row) -> None:
    assert re.fullmatch(r"ullage_[a-z0-9_]+[a-z]", row.name)
    assert row.name.endswith("_total") == (row.kind == "counter")
    assert not re.search(r"_(mib|mb|ms|minutes|hours|percent|count|sum|bucket|info_total)(_|$)", row.name)
    assert row.help
    assert row.help[0].isupper() or row.help[0].isdigit()
    assert not row.help.endswith(".")
    if row.kind != "counter" and row.name.startswith("ullage_vram_") and row.name != "ullage_vram_tight":
        assert re.search(r"_(bytes|ratio|seconds|requests|info)(_per_(request|second))?$", row.name)


def test_the_table_names_each_family_once() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names)) == 25


def test_only_label_values_of_the_closed_sets_are_counted() -> None:
    happened = Counts(devices=1)
    with pytest.raises(AssertionError, match="was not created at zero"):
        happened.trimmed(1, Rung.POOLS, "ok", 0, 0.0)
    assert set(happened.trims) == set(product(["0"], [str(rung) for rung in list(Rung)[:5]], ["ok", "noop", "failed"]))

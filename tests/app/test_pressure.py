"""The watchdog in a running service: what it sees becomes acts at the engine, and what they did is measured."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.boot import Boot
from app.events import rfc3339
from app.service import Service
from engine.messages import RungResult
from tests.app.cards import ELASTIC, FREE, KEY, MIB, on_cards, other_process, reasons, reasons_of
from tests.app.running import Running, service
from watchdog.simulated import Loss

CLIENT = httpx.Client(timeout=30)
CHAT = "/v1/chat/completions"
BODY = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}


def ask(running: Running, **fields: Any) -> httpx.Response:
    return CLIENT.post(running.url + CHAT, json={**BODY, **fields})


def vram(running: Running) -> dict[str, Any]:
    answer = CLIENT.get(running.ops_url + "/admin/vram", headers=KEY)
    assert answer.status_code == 200
    return dict(answer.json())


def events(running: Running) -> list[dict[str, Any]]:
    return list(CLIENT.get(running.ops_url + "/admin/events", headers=KEY).json()["events"])


def rows(running: Running) -> list[dict[str, Any]]:
    return list(CLIENT.get(running.ops_url + "/admin/vram/requests", headers=KEY).json()["requests"])


def state(running: Running, device: int) -> str:
    return str(running.call(lambda inside: inside.pressure.status().devices[device].state))


def idle_free(inside: Service, device: int = 1) -> int:
    """Bytes; 0 while they are not known."""
    return inside.pressure.status().devices[device].idle_free or 0


def wait_for(running: Running, states: set[str], device: int = 1) -> None:
    running.wait_until(lambda inside: str(inside.pressure.status().devices[device].state) in states)


def test_a_leak_is_seen_trimmed_and_in_the_end_reloaded_away(tmp_path: Path) -> None:
    with on_cards(tmp_path, leak=8 * MIB, settings={"reload_horizon": 0.001}) as (running, _):
        began = vram(running)["devices"]
        assert [device["baseline_free"] for device in began] == [FREE, FREE]
        assert [device["own"] for device in began] == [4096 * MIB - FREE] * 2
        for _ in range(200):
            assert ask(running).status_code == 200
            if len(running.engines) > 1:
                break
            time.sleep(0.02)  # one who asks faster leaves no time to trim
        running.wait_until(lambda inside: inside.supervisor.phase == "ready" and not inside.supervisor.reloading)
        running.wait_until(lambda inside: idle_free(inside) >= FREE - 16 * MIB)
        told = events(running)
        kinds = [event["kind"] for event in told]
        by_kind = {kind: [event for event in told if event["kind"] == kind] for kind in kinds}
        assert any(event["class"] == "growth" and event["device"] == 1 for event in told)
        assert all(event["device"] in (1, None) for event in by_kind["decision"])
        trims = [(event["rung"], event["returned_bytes"]) for event in by_kind["trim"] if event["device"] == 1]
        assert {rung for rung, _ in trims} == {"pools", "stack_limit", "cublas_workspace", "graph_cache", "elastic"}
        assert max(size for rung, size in trims if rung == "cublas_workspace") >= 48 * MIB
        assert max(size for rung, size in trims if rung == "elastic") > 0
        assert by_kind["decision"][-1]["rung"] == "reload"
        assert kinds.index("decision") < kinds.index("trim") < kinds.index("reload")
        assert [event["seq"] for event in told] == list(range(1, len(told) + 1))
        reload = vram(running)["reload"]
        assert reload["last"]["reason"].startswith("vram_")
        assert reload["budget_left"] == 1
        assert vram(running)["devices"][1]["state"] == "ok"
        text = CLIENT.get(running.ops_url + "/metrics").text
        assert 'ullage_watchdog_trims_total{device="1",result="ok",rung="elastic"}' in text
        assert 'ullage_watchdog_trim_returned_bytes_total{device="1",rung="pools"} 0.0' in text
        assert 'ullage_vram_baseline_free_bytes{device="1"} ' in text
        assert 'ullage_device_info{device="1",mig="",name="simulated 4096 MiB",pci_bus_id="",stage="1"' in text


def test_a_dry_run_names_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    with on_cards(tmp_path, leak=16 * MIB, settings={"watchdog": "dry-run"}) as (running, _):
        for _ in range(60):
            assert ask(running).status_code == 200
            if len(reasons(running, "dry_run")) > 4:
                break
        assert any(reason.startswith("would take ") for reason in reasons(running, "dry_run"))
        assert running.engine.trims == []
        assert len(running.engines) == 1
        assert reasons(running, "decision") == []
        assert not running.service.scheduler.held
        assert vram(running)["watchdog"] == {"mode": "dry-run", "until": None}


def test_another_process_is_made_room_for_and_not_reloaded_for(tmp_path: Path) -> None:
    with on_cards(tmp_path) as (running, machine):
        ask(running)
        with other_process(machine, 1, FREE - 100 * MIB):
            wait_for(running, {"trim", "degraded"})
            running.wait_until(lambda inside: bool(running.engine.trims))
            rung, device, keep = running.engine.trims[0]
            assert (rung, device) == ("elastic", 1)
            assert keep is not None
            assert 0 < keep < ELASTIC
            running.wait_until(lambda inside: idle_free(inside) > 230 * MIB)
            assert vram(running)["devices"][1]["trend"]["class"] == "foreign"
            assert not any(rung == "grow" for rung, _, _ in running.engine.trims)
        running.wait_until(lambda inside: any(rung == "grow" for rung, _, _ in running.engine.trims))
        running.wait_until(lambda inside: idle_free(inside) == FREE)
        wait_for(running, {"ok"})
        assert len(running.engines) == 1
        assert [event["rung"] for event in events(running) if event["kind"] == "regrow"][:1] == ["elastic"]


def test_requests_wait_while_a_device_has_no_memory_at_all(tmp_path: Path) -> None:
    with on_cards(tmp_path) as (running, machine):
        ask(running)
        with other_process(machine, 1, 4096 * MIB):  # it takes what is given up too
            running.wait_until(lambda inside: bool(reasons_of(inside, "hold")))
            answers: list[httpx.Response] = []
            waiting = threading.Thread(target=lambda: answers.append(ask(running)))
            waiting.start()
            running.wait_until(lambda inside: inside.scheduler.held == 1)
            assert state(running, 1) == "degraded"
            assert vram(running)["queue"]["held"] == 1
        waiting.join(20)
        assert answers[0].status_code == 200
        assert reasons(running, "hold") == [
            "new requests wait: a device has next to no free memory",
            "new requests are admitted again",
        ]
        assert len(running.engines) == 1


def test_a_device_that_cannot_be_read_is_blind_and_nothing_is_done_about_it(tmp_path: Path) -> None:
    with on_cards(tmp_path, loss=Loss(4.0, device=1)) as (running, machine):
        machine.leak(1, FREE - 10 * MIB)
        wait_for(running, {"blind"})
        shown = vram(running)["devices"]
        assert [device["state"] for device in shown] == ["ok", "blind"]
        assert (shown[1]["free"], shown[1]["idle_free"], shown[1]["error"]) == (None, None, "simulated: NVML is lost")
        text = CLIENT.get(running.ops_url + "/metrics").text
        assert 'ullage_watchdog_state{device="1",state="blind"} 1.0' in text
        assert 'ullage_vram_free_bytes{device="1"}' not in text
        assert ask(running).status_code == 200
        assert running.engine.trims == []
        machine.leaked = [0, 0]
        machine.gpus.resize(1, "leak", 0)
        wait_for(running, {"ok"})
        assert running.engine.trims == []


def test_a_crash_is_no_reason_to_distrust_the_next_engine(tmp_path: Path) -> None:
    with on_cards(tmp_path) as (running, _):
        ask(running)
        running.call(lambda inside: running.engine.die())
        running.wait_until(lambda inside: len(running.engines) == 2 and inside.supervisor.phase == "ready")
        running.wait_until(lambda inside: idle_free(inside) == FREE)
        assert ask(running).status_code == 200
        running.wait_until(lambda inside: len(reasons_of(inside, "ready")) == 4)
        ready = [event for event in events(running) if event["kind"] == "ready"]
        assert [event["reason"][:9] for event in ready] == ["engine 1:", "engine 1:", "engine 2:", "engine 2:"]
        assert reasons(running, "reload")[0] == "begins: engine_fault"
        assert reasons(running, "decision") == []


def test_the_table_says_what_a_request_left_behind(tmp_path: Path) -> None:
    with on_cards(tmp_path, leak=6 * MIB) as (running, _):
        for count in (1, 2):  # this engine leaks as a request begins: sooner than its predecessor's end may be read
            ask(running)
            running.wait_until(lambda inside, count=count: len(inside.table.rows) == count)  # type: ignore[misc]
        [first, second] = rows(running)
        assert (first["prompt_tokens"], first["generated_tokens"], first["overlap"]) == (20, 4, 0)
        assert [device["change"] for device in second["devices"]] == [0, -6 * MIB]
        assert second["devices"][1]["idle_free_before"] - second["devices"][1]["idle_free_after"] == 6 * MIB
        changes = second["devices"][1]["change_by_owner"]
        assert {owner: size for owner, size in changes.items() if size} == {"unaccounted": 6 * MIB}
        csv = CLIENT.get(running.ops_url + "/admin/vram/requests?format=csv&limit=1", headers=KEY)
        assert csv.headers["content-type"].startswith("text/csv")
        lines = csv.text.splitlines()
        assert lines[0].startswith(
            "id,finished_at,prompt_tokens,cached_tokens,generated_tokens,overlap,device,idle_free"
        )
        assert len(lines) == 3
        assert lines[2].split(",")[2:10] == [
            "20",
            "0",
            "4",
            "0",
            "1",
            str(FREE - 6 * MIB),
            str(FREE - 12 * MIB),
            "-6291456",
        ]


def test_what_ran_beside_others_says_nothing_of_its_own(tmp_path: Path) -> None:
    with on_cards(tmp_path, leak=6 * MIB, text="x" * 200, engine={"step_s": 0.001}) as (running, _):
        threads = [threading.Thread(target=ask, args=[running]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        running.wait_until(lambda inside: len(inside.table.rows) == 2)
        for row in rows(running):
            assert row["overlap"] == 1
            assert [device["change"] for device in row["devices"]] == [None, None]
            assert [device["change_by_owner"] for device in row["devices"]] == [None, None]
            assert row["devices"][0]["idle_free_after"] == FREE


def test_events_and_rows_outlive_the_service(tmp_path: Path) -> None:
    with on_cards(tmp_path) as (running, _):
        ask(running)
        running.wait_until(lambda inside: len(inside.table.rows) == 1)
        before, row = events(running), rows(running)
    with on_cards(tmp_path) as (running, _):
        after = events(running)
        assert after[: len(before)] == before
        assert after[len(before)]["seq"] == before[-1]["seq"] + 1
        assert rows(running) == row


def test_the_mode_for_a_while(tmp_path: Path) -> None:
    with on_cards(tmp_path) as (running, _):
        until = rfc3339(time.time() + 0.8)
        answer = CLIENT.put(running.ops_url + "/admin/watchdog", headers=KEY, json={"mode": "off", "until": until})
        assert answer.json() == {"mode": "off", "until": until}
        wait_for(running, {"disabled"})
        running.wait_until(lambda inside: inside.pressure.mode == "on")
        wait_for(running, {"ok"})
        assert vram(running)["watchdog"] == {"mode": "on", "until": None}
        assert [reason.split(" until ")[0] for reason in reasons(running, "mode")] == [
            "set to off by an operator",
            "set back to on: the time it was changed for is over",
        ]


def test_a_trim_tells_what_the_card_says_and_not_what_the_engine_believes(tmp_path: Path) -> None:
    with on_cards(tmp_path) as (running, _):
        running.engine.rungs["pools"] = RungResult("pools", 1, "ok", 500 * MIB, 0.01)
        answer = CLIENT.post(running.ops_url + "/admin/trim", headers=KEY, json={"rung": None, "device": 1})
        results = answer.json()["results"]
        assert [(each["rung"], each["device"]) for each in results] == [
            ("pools", 1),
            ("stack_limit", 1),
            ("cublas_workspace", 1),
            ("graph_cache", 1),
            ("elastic", 0),
            ("elastic", 1),
        ]
        assert {each["rung"]: (each["result"], each["returned_bytes"]) for each in results} == {
            "pools": ("noop", 0),
            "stack_limit": ("noop", 0),
            "cublas_workspace": ("ok", 64 * MIB),
            "graph_cache": ("noop", 0),
            "elastic": ("ok", ELASTIC),
        }
        running.wait_until(lambda inside: any(rung == "grow" for rung, _, _ in running.engine.trims))
        assert all("as an operator asked" in reason for reason in reasons(running, "trim"))


def test_an_engine_that_does_not_answer_a_trim_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.pressure_acts.ACT_S", 0.05)
    with on_cards(tmp_path) as (running, _):
        running.call(lambda inside: running.engine.hang())
        answer = CLIENT.post(running.ops_url + "/admin/trim", headers=KEY, json={"rung": "pools"})
        [result] = answer.json()["results"]
        assert (result["result"], result["returned_bytes"]) == ("failed", None)
        assert "did not answer" in result["message"]


def test_reloads_of_an_earlier_service_are_in_the_budget(tmp_path: Path) -> None:
    boot = Boot(tmp_path, "x", reloads_per_hour=2)
    for _ in range(2):
        boot.reloaded()
    with on_cards(tmp_path, leak=24 * MIB, boot=boot) as (running, _):
        assert vram(running)["reload"]["budget_left"] == 0
        for _ in range(60):
            assert ask(running).status_code == 200
            if state(running, 1) == "degraded":
                break
            time.sleep(0.01)
        else:
            pytest.fail("never degraded")
        assert len(running.engines) == 1
        running.call(lambda inside: inside.pressure.set_mode("on", None))
        assert running.call(lambda inside: inside.pressure._runner._watch.policy.devices[1].degraded) is None


def test_without_a_device_there_is_nothing_to_watch() -> None:
    with service() as running:
        ask(running)
        shown = vram(running)
        assert shown["devices"] == []
        assert shown["watchdog"] == {"mode": "disabled", "until": None}
        [row] = rows(running)
        assert (row["devices"], row["overlap"], row["generated_tokens"]) == ([], 0, 13)
        csv = CLIENT.get(running.ops_url + "/admin/vram/requests?format=csv", headers=KEY).text.splitlines()
        assert csv[1].endswith(",20,0,13,0,,,,")
        answer = CLIENT.put(running.ops_url + "/admin/watchdog", headers=KEY, json={"mode": "off"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_devices")
        trim = CLIENT.post(running.ops_url + "/admin/trim", headers=KEY, json={})
        assert (trim.status_code, trim.json()) == (200, {"results": []})

"""Real engines on simulated cards: what another process sees of them, and that trims change no token."""

import asyncio
import os
import signal
from pathlib import Path

from engine.client import EngineProcess
from engine.ladder import RUNGS
from engine.messages import Ready, Sampling, Submit
from tests.engine.cards import MIB, config_on, simulated
from tests.engine.children import Listener, launcher, submit

STREAMS = 32


def streams(first: int) -> list[Submit]:
    """32 of them, some with a long prompt; none finds anything in the cache."""
    return [
        submit(
            first + n,
            max_tokens=60,
            prompt_ids=[(7 * n + i) % 600 for i in range(400 if n % 4 == 0 else 3 + n)],
            sampling=Sampling(temperature=0.0 if n % 3 else 1.0, seed=n),
            cache_prompt=False,
        )
        for n in range(STREAMS)
    ]


async def run(engine: EngineProcess, listener: Listener, submits: list[Submit]) -> list[list[int]]:
    for each in submits:
        engine.submit(each)
    ids = {each.sequence for each in submits}
    await listener.until(lambda: ids <= set(listener.released))
    return [listener.tokens[each.sequence] for each in submits]


async def test_trims_during_32_streams_change_no_token_and_return_what_they_claim(tmp_path: Path) -> None:
    gpus = simulated(tmp_path, 2048, 1900)
    listener = Listener()
    with launcher(**settings_on(tmp_path)) as launch:
        engine = launch(1, listener)
        ready = await engine.start()
        assert {row.pid for row in gpus.rows()} == {engine.pid}
        assert_held(gpus, [device.ledger for device in ready.devices])

        undisturbed = await run(engine, listener, streams(0))
        assert [len(tokens) for tokens in undisturbed] == [60] * STREAMS
        before = [gpus.free(device) for device in (0, 1)]
        assert [row["pool_cached"] for row in listener.ledgers[-1].devices] == [2 * MIB] * 2

        returned = {rung: await measured(engine, gpus, rung) for rung in RUNGS}
        assert returned["pools"] == [2 * MIB] * 2
        assert returned["stack_limit"] == [0, 0]
        assert returned["cublas_workspace"] == [64 * MIB] * 2
        assert returned["elastic"] == [device.elastic_plan_bytes for device in ready.devices]
        assert_held(gpus, listener.ledgers[-1].devices)
        grown = await engine.grow()
        assert [-result.claimed_bytes for result in grown] == returned["elastic"]

        disturbance = asyncio.create_task(disturb(engine, ready))
        disturbed = await run(engine, listener, streams(100))
        assert not disturbance.done(), "it has not gone on to the end"
        disturbance.cancel()
        assert disturbed == undisturbed
        assert sum(step.stats.preemptions_total for step in listener.steps) == 0
        assert [gpus.free(device) for device in (0, 1)] >= before
        await engine.stop(10)
    assert gpus.rows() == []
    assert listener.deaths == []


def settings_on(folder: Path, **settings: object) -> dict[str, object]:
    config = config_on(folder, **{"max_batch": STREAMS, **settings})
    return {name: getattr(config, name) for name in config.__struct_fields__}


def assert_held(gpus, ledgers) -> None:
    rows = {(row.device, row.owner): row.size for row in gpus.rows() if row.size}
    assert rows == {(place, owner): size for place, held in enumerate(ledgers) for owner, size in held.items() if size}


async def measured(engine: EngineProcess, gpus, rung: str) -> list[int]:
    """What the cards have more of after a rung; it is what the rung says it gave back."""
    before = [gpus.free(device) for device in (0, 1)]
    results = await engine.trim(rung)
    returned = [gpus.free(device) - before[device] for device in (0, 1)]
    assert [result.claimed_bytes for result in results] == returned
    assert [result.result for result in results] == ["ok" if size else "noop" for size in returned]
    assert [result.device for result in results] == [0, 1]
    return returned


async def disturb(engine: EngineProcess, ready: Ready) -> None:
    """Every rung, and growth, again and again."""
    while True:
        for rung in RUNGS:
            await engine.trim(rung, keep_bytes=ready.devices[0].elastic_plan_bytes // 3)
            await asyncio.sleep(0.002)
        await engine.grow()


async def test_faults_of_cards(tmp_path: Path) -> None:
    """Leaks are no owner's; a foreign process stays when the engine goes, and comes once; one request fails alone."""
    gpus = simulated(tmp_path, 2048, 1900)
    listener = Listener()
    faults = "leak=3MiB/request@1,oom=request:3,foreign=100MiB@0"
    with launcher(**settings_on(tmp_path, faults=faults)) as launch:
        engine = launch(1, listener)
        await engine.start()
        submits = streams(0)[:5]
        for each in submits:
            engine.submit(each)
        await listener.until(lambda: len(listener.released) == 5)
        assert [(failed.sequence, failed.code) for failed in listener.failed] == [(2, "oom_alone")]
        assert [len(listener.tokens.get(n, [])) for n in range(5)] == [60, 60, 0, 60, 60]
        rows = {(row.device, row.owner): row for row in gpus.rows()}
        assert rows[1, "leak"].size == 5 * 3 * MIB
        assert rows[1, "leak"].pid == engine.pid
        assert all("leak" not in ledger.devices[1] for ledger in listener.ledgers)
        async with asyncio.timeout(20):
            while not (foreign := [row for row in gpus.rows() if row.owner == "foreign"]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (foreign[0].device, foreign[0].size) == (0, 100 * MIB)
        await engine.stop(10)
        assert [row.owner for row in gpus.rows()] == ["foreign"]

        following = Listener()
        engine = launch(2, following)
        await engine.start()
        await run(engine, following, streams(0)[:4])
        assert following.failed == []
        assert [row.pid for row in gpus.rows() if row.owner == "foreign"] == [foreign[0].pid]
        await engine.stop(10)
    os.kill(foreign[0].pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while gpus.rows():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

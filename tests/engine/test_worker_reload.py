"""Real engines that replace each other: what is carried is not computed again, and no token changes."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from engine.checkpoint import PIECES_AT
from engine.client import EngineLauncher, EngineProcess
from engine.errors import LoadRefused
from engine.messages import Ready, Sampling, Submit
from tests.engine.cards import MIB, simulated
from tests.engine.children import Listener, launcher, submit
from tests.engine.test_worker_cards import settings_on

ENDLESS = 1 << 40
TOKENS = 300

SUBMITS = [
    submit(
        n,
        max_tokens=TOKENS,
        prompt_ids=[(11 * n + i) % 600 for i in range(5 + 40 * n)],
        sampling=Sampling(temperature=float(n % 2), seed=n, frequency_penalty=0.1 * (n % 3), logprobs=1),
        cache_prompt=n != 3,
    )
    for n in range(6)
] + [submit(n, max_tokens=TOKENS, prompt_ids=[1, 2, 3], sampling=Sampling(temperature=0.0)) for n in (6, 7)]
"""Among them two that are the same, and one that shares with nobody."""


def go_on(listeners: list[Listener]) -> list[Submit]:
    """Those that have not ended, as the service hands them to the next engine."""
    told = {each.sequence: [t for heard in listeners for t in heard.tokens.get(each.sequence, [])] for each in SUBMITS}
    return [
        msgspec.structs.replace(each, generated_ids=told[each.sequence])
        for each in SUBMITS
        if len(told[each.sequence]) < TOKENS
    ]


async def replace(
    launch: EngineLauncher,
    old: EngineProcess,
    new: EngineProcess,
    heard: list[Listener],
    spoil: bool = False,
    **settings: object,
) -> tuple[Ready, int]:
    """Checkpoint, end, load the prepared one, resume; (Ready, pieces carried). `heard` are the engines so far."""
    done = await old.checkpoint(ENDLESS)
    told = [len(step.tokens) for step in heard[-1].steps]
    await old.stop(10)
    assert [len(step.tokens) for step in heard[-1].steps] == told, "no step after the checkpoint"
    if spoil:
        os.pwrite(launch.carry.descriptor, b"spoilt", PIECES_AT + 100)
    ready = await new.load(msgspec.structs.replace(launch.config, **settings), restore=True)
    assert os.fstat(launch.carry.descriptor).st_size == 0
    live = go_on(heard)
    assert live
    for each in live:
        new.submit(each)
    return ready, done.blocks


def read_again(listener: Listener) -> int:
    return sum(step.stats.prefill_tokens for step in listener.steps)


async def test_a_carried_token_is_never_computed_again(tmp_path: Path) -> None:
    """Over another split of the layers; and one spoilt block is read again, by those alone that need it."""
    gpus = simulated(tmp_path, 2048, 2048)
    heard = [Listener() for _ in range(3)]
    with launcher(**settings_on(tmp_path, max_batch=8, layer_split=(1, 2))) as launch:
        first, second, third = (launch(n + 1, listener) for n, listener in enumerate(heard))
        await asyncio.gather(first.start(), second.prepare(), third.prepare())
        for each in SUBMITS:
            first.submit(each)
        await heard[0].until(lambda: all(len(heard[0].tokens.get(each.sequence, [])) > 20 for each in SUBMITS))
        ready, carried = await replace(launch, first, second, heard[:1], layer_split=(2, 1))
        assert (ready.restored_blocks, ready.skipped_blocks) == (carried, 0)
        assert ready.layer_split == [2, 1]
        assert {row.pid for row in gpus.rows()} == {second.pid}
        live = go_on(heard[:1])
        await heard[1].until(lambda: all(len(heard[1].tokens.get(each.sequence, [])) > 20 for each in live))
        assert read_again(heard[1]) == len(live), "one token each, which had been told and not computed on"

        ready, carried = await replace(launch, second, third, heard[:2], spoil=True, layer_split=(3,), devices=(0,))
        assert (ready.restored_blocks, ready.skipped_blocks) == (carried - 1, 1)
        live = go_on(heard[:2])
        await heard[2].until(lambda: all(each.sequence in heard[2].released for each in live))
        assert len(live) < read_again(heard[2]) < sum(len(each.prompt_ids + each.generated_ids) for each in live)

        told = {each.sequence: [t for one in heard for t in one.tokens.get(each.sequence, [])] for each in SUBMITS}
        again = [msgspec.structs.replace(each, sequence=each.sequence + 100, cache_prompt=False) for each in SUBMITS]
        for each in again:
            third.submit(each)
        await heard[2].until(lambda: {each.sequence for each in again} <= set(heard[2].released))
        for each in SUBMITS:
            assert told[each.sequence] == heard[2].tokens[each.sequence + 100], f"sequence {each.sequence}"
        await third.stop(10)
    assert [listener.deaths for listener in heard] == [[], [], []]


async def test_a_successor_holds_nothing_until_its_turn(tmp_path: Path) -> None:
    gpus = simulated(tmp_path, 2048)
    with launcher(**settings_on(tmp_path)) as launch:
        unwanted, wanted = launch(1, Listener()), launch(2, Listener())
        await asyncio.gather(unwanted.prepare(), wanted.prepare())
        assert gpus.rows() == []
        await unwanted.stop(10)
        assert (await unwanted.wait()).endswith("exited with code 0")
        gpus.take(0, "somebody", 900 * MIB)
        with pytest.raises(LoadRefused) as caught:
            await wanted.load(msgspec.structs.replace(launch.config, max_context=1024), restore=True)
        assert caught.value.kind == "DoesNotFit"


async def test_faults_happen_once_over_all_engines() -> None:
    with launcher(faults="crash=after:20tokens,hang=after:40tokens,crash=after:60tokens") as launch:
        listener = Listener()
        engine = launch(1, listener)
        await engine.start()
        engine.submit(submit(1, max_tokens=100))
        assert "signal 6" in await engine.wait()
        assert len(listener.tokens[1]) == 20

        listener = Listener()
        engine = launch(2, listener)
        await engine.start()
        engine.submit(submit(1, max_tokens=100))
        await listener.until(lambda: len(listener.tokens.get(1, [])) == 40)
        async with asyncio.timeout(60):
            while (beat := engine.heartbeat) is None or beat.kind != "decode" or beat.step_seconds < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert beat.busy
        assert len(listener.tokens[1]) == 40
        assert 0 < beat.longest_seconds < 30
        engine.kill()
        await engine.wait()

        listener = Listener()
        engine = launch(3, listener)
        await engine.start()
        engine.submit(submit(1, max_tokens=59))
        await listener.until(lambda: 1 in listener.released)
        engine.submit(submit(2, poison=True))
        assert "signal 6" in await engine.wait()
        assert 2 not in listener.tokens


async def test_a_fault_that_does_not_exist_is_refused_at_start() -> None:
    with (
        launcher(faults="leak=4MiB/request@0") as launch,
        pytest.raises(LoadRefused, match="there are no simulated cards") as caught,
    ):
        await launch(1, Listener()).start()
    assert caught.value.kind == "ConfigError"

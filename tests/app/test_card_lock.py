import asyncio
import logging
import os
from pathlib import Path

import pytest

from app.card_lock import CardLocks, shared_folder


async def order_of(*holders: tuple[CardLocks, list[str]]) -> list[str]:
    """Who begins and who ends, in their order."""
    events: list[str] = []

    async def load(name: str, locks: CardLocks, uuids: list[str]) -> None:
        async with locks.held(uuids):
            events.append(f"{name} begins")
            await asyncio.sleep(0.05)
            events.append(f"{name} ends")

    await asyncio.gather(*(load(f"{n}", locks, uuids) for n, (locks, uuids) in enumerate(holders)))
    return events


async def test_loads_onto_one_card_come_one_after_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    locks = CardLocks(tmp_path)
    with caplog.at_level(logging.WARNING):
        events = await order_of((locks, ["GPU-a", "GPU-b"]), (locks, ["GPU-b", "GPU-c"]))
    assert events == ["0 begins", "0 ends", "1 begins", "1 ends"]
    assert caplog.text.count("another service is loading onto card GPU-b: waiting for it") == 1


async def test_other_cards_and_no_cards_wait_for_nobody(tmp_path: Path) -> None:
    locks = CardLocks(tmp_path)
    events = await order_of((locks, ["GPU-a"]), (locks, ["GPU-b", "GPU-b"]), (locks, []))
    assert [event.split()[1] for event in events] == ["begins"] * 3 + ["ends"] * 3
    assert sorted(os.listdir(tmp_path)) == ["ullage-GPU-a.lock", "ullage-GPU-b.lock"]


async def test_a_lock_goes_with_its_holder(tmp_path: Path) -> None:
    locks = CardLocks(tmp_path)
    with pytest.raises(ZeroDivisionError):
        async with locks.held(["GPU-a"]):
            raise ZeroDivisionError
    async with asyncio.timeout(5), locks.held(["GPU-a"]):
        waiting = asyncio.create_task(order_of((locks, ["GPU-a"])))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    descriptors = set(os.listdir("/proc/self/fd"))
    async with asyncio.timeout(5), locks.held(["GPU-a"]):
        pass
    assert set(os.listdir("/proc/self/fd")) == descriptors


async def test_one_that_never_lets_go_is_ignored_in_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with CardLocks(tmp_path).held(["GPU-a"]):
        impatient = CardLocks(tmp_path, patience_s=0.0)
        async with asyncio.timeout(5), impatient.held(["GPU-a"]):
            assert "takes too long" in caplog.text


async def test_a_file_that_cannot_be_had_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ullage-GPU-a.lock").symlink_to("/etc/passwd")
    async with CardLocks(tmp_path).held(["GPU-a"]):
        assert "another service may load onto this card at the same time" in caplog.text
    async with CardLocks(tmp_path / "none").held(["GPU-b"]):
        assert "No such file" in caplog.text


async def test_another_users_file_serves_too(tmp_path: Path) -> None:
    path = tmp_path / "ullage-GPU-a.lock"
    path.write_text("")
    path.chmod(0o444)
    async with CardLocks(tmp_path).held(["GPU-a"]):
        pass


def test_the_folder_is_one_for_all() -> None:
    assert shared_folder().is_dir()

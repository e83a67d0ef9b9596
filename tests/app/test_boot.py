"""What survives the service, start after start."""

import logging
from pathlib import Path

import msgspec
import pytest

from app.boot import BOOT_FILE, HOUR_S, STARTS, Boot, CrashLoop, fingerprint
from engine.config import EngineConfig

NOW = 1_800_000_000.0


def fail(folder: Path, now: float, reason: str | None = "killed by signal 11", mark: str = "f") -> tuple[str, ...]:
    """One service whose engine does not stay up; what it was started without."""
    boot = Boot(folder, mark, now=now)
    boot.begin(now)
    if reason is not None:
        boot.failed(reason)
    return boot.without


def test_a_crash_loop_leaves_out_one_part_after_the_other_and_then_ends(tmp_path: Path) -> None:
    tried = [fail(tmp_path, NOW + 60 * n) for n in range(3 * STARTS)]
    shadow, both = ("shadow",), ("shadow", "graph buckets")
    assert tried == [()] * STARTS + [shadow] * STARTS + [both] * STARTS
    with pytest.raises(CrashLoop) as caught:
        fail(tmp_path, NOW + 1000)
    lines = str(caught.value).splitlines()
    assert "9 starts" in lines[0]
    assert len(lines) == 2 + 9 + 1
    assert "nothing" in lines[2]
    assert "shadow, graph buckets" in lines[-2]
    assert lines[-2].endswith("killed by signal 11")
    assert str(tmp_path / BOOT_FILE) in lines[-1]


def test_it_tries_again_after_an_hour(tmp_path: Path) -> None:
    for n in range(3 * STARTS):
        fail(tmp_path, NOW + n)
    with pytest.raises(CrashLoop):
        fail(tmp_path, NOW + HOUR_S / 2)
    assert fail(tmp_path, NOW + HOUR_S + 10) == ("shadow", "graph buckets")


def test_a_death_without_a_word_counts(tmp_path: Path) -> None:
    for n in range(STARTS):
        fail(tmp_path, NOW + n, reason=None)
    assert fail(tmp_path, NOW + 10) == ("shadow",)


def test_one_that_served_begins_a_new_count(tmp_path: Path) -> None:
    for n in range(STARTS - 1):
        fail(tmp_path, NOW + n)
    boot = Boot(tmp_path, "f", now=NOW + 10)
    boot.begin(NOW + 10)
    boot.proved()
    boot.failed("of something else, later")
    assert [fail(tmp_path, NOW + 20 + n) for n in range(STARTS + 1)] == [()] * STARTS + [("shadow",)]


def test_an_end_in_order_is_no_failure(tmp_path: Path) -> None:
    for n in range(10):
        boot = Boot(tmp_path, "f", now=NOW + n)
        boot.begin(NOW + n)
        boot.ended()
        boot.ended()
    assert fail(tmp_path, NOW + 20) == ()


def test_other_settings_begin_anew_but_keep_the_budget(tmp_path: Path) -> None:
    for n in range(STARTS + 1):
        fail(tmp_path, NOW + n)
    Boot(tmp_path, "f", now=NOW + 5).reloaded(NOW + 5)
    assert fail(tmp_path, NOW + 10, mark="g") == ()
    assert Boot(tmp_path, "g", now=NOW + 11).budget_left(NOW + 11) == 1


def test_the_parts_an_engine_came_up_without_stay_out(tmp_path: Path) -> None:
    boot = Boot(tmp_path, "f", now=NOW)
    boot.begin(NOW)
    boot.left_out(("shadow",))
    boot.proved()
    assert Boot(tmp_path, "f", now=NOW + 2 * HOUR_S).without == ("shadow",)
    boot.left_out(())
    assert Boot(tmp_path, "f", now=NOW).without == ()


def test_the_budget_of_reloads_outlives_the_service(tmp_path: Path) -> None:
    boot = Boot(tmp_path, "f", reloads_per_hour=2, now=NOW)
    assert boot.budget_left(NOW) == 2
    boot.reloaded(NOW)
    boot.reloaded(NOW + 600)
    again = Boot(tmp_path, "f", reloads_per_hour=2, now=NOW + 700)
    assert again.reloads(NOW + 700) == [NOW, NOW + 600]
    assert [again.budget_left(NOW + after) for after in (700, HOUR_S + 1, HOUR_S + 601)] == [0, 1, 2]
    again.reloaded(NOW + HOUR_S + 1)
    again.reloaded(NOW + HOUR_S + 2)
    assert again.budget_left(NOW + HOUR_S + 3) == 0, "never below nothing"


@pytest.mark.parametrize("content", [b"", b"{", b'{"fingerprint": 1}', b"\xff"])
def test_a_broken_file_is_said_and_begun_anew(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / BOOT_FILE).write_bytes(content)
    assert fail(tmp_path, NOW) == ()
    assert "is begun anew" in caplog.text
    assert msgspec.json.decode((tmp_path / BOOT_FILE).read_bytes())["fingerprint"] == "f"


def test_a_folder_that_cannot_be_written_to_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    boot = Boot(tmp_path / "gone", "f", now=NOW)
    with caplog.at_level(logging.ERROR):
        boot.begin(NOW)
    assert "the next start will not know" in caplog.text


def test_without_a_folder_nothing_is_kept() -> None:
    boot = Boot(now=NOW)
    boot.begin(NOW)
    boot.reloaded(NOW)
    assert boot.budget_left(NOW) == 1
    assert Boot(now=NOW).budget_left(NOW) == 2


def test_what_makes_another_try_worth_its_while(tmp_path: Path) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("first boot")
    marks = {fingerprint(EngineConfig(model_path=path), build, boot_id) for path in "ab" for build in ("x", "y")}
    boot_id.write_text("second boot")
    marks.add(fingerprint(EngineConfig(model_path="a"), "x", boot_id))
    assert len(marks) == 5
    assert fingerprint(EngineConfig(model_path="a"), "x", boot_id) in marks
    assert fingerprint(EngineConfig(model_path="a"), "x", tmp_path / "none")
